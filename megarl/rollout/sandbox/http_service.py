"""A remote sandbox that speaks SandboxFusion's `POST /run_code` (github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx

from megarl.rollout.sandbox.sandbox import WHERE, Outcome, SandboxLimits
from megarl.types import UserFault

_ANSWER_S = 30.0  # beyond the program's own time: a queue before the sandbox, a start in it
_TIMED_OUT = "TimeLimitExceeded"


def url_faults(url: str) -> list[UserFault]:
    """What is wrong with the address, if anything."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname:
        return []
    return [UserFault(WHERE, f"url {url!r} is no address of a service", "write https://host or http://host:port")]


def run(url: str, program: str, stdin: str, limits: SandboxLimits) -> Outcome:
    """Run a program there. Raises ConnectionError when the service does not answer as it should: that is no verdict."""
    asked = {
        "code": program,
        "language": "python",
        "stdin": stdin,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_mb,
    }
    try:
        reply = httpx.post(f"{url.rstrip('/')}/run_code", json=asked, timeout=limits.wall_s + _ANSWER_S)
        reply.raise_for_status()
        said = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConnectionError(f"the sandbox at {url} gave no answer: {type(error).__name__}: {error}") from error
    result = said.get("run_result") if isinstance(said, dict) else None
    if not isinstance(result, dict) or said.get("status") not in ("Success", "Failed"):
        raise ConnectionError(f"the sandbox at {url} could not run a program: {_message(said)}")
    timed_out = result.get("status") == _TIMED_OUT
    status = None if timed_out else result.get("return_code")
    return Outcome(status, result.get("stdout") or "", result.get("stderr") or "", timed_out=timed_out)


def _message(said: Any) -> str:
    message = said.get("message") if isinstance(said, dict) else None
    return " ".join(str(message or "no message").split())[:200]
