"""A remote sandbox with SandboxFusion's `POST /run_code` (github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from megarl.isolation.sandbox import WHERE, Outcome, SandboxLimits
from megarl.types import UserError

_ANSWER_S = 30.0  # added to the program's time, for the service's queue and the sandbox's start
_TIMED_OUT = "TimeLimitExceeded"


def url_errors(url: str) -> list[UserError]:
    """The error of a malformed address."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname:
        return []
    return [
        UserError(
            WHERE,
            f"url {url!r} is not the address of a service",
            "write https://host or http://host:port",
        )
    ]


def run(url: str, program: str, stdin: str, limits: SandboxLimits) -> Outcome:
    """Run a program there. Raises ConnectionError when the service does not run it: the reward fails."""
    request = {
        "code": program,
        "language": "python",
        "stdin": stdin,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_mb,
    }
    try:
        reply = httpx.post(
            f"{url.rstrip('/')}/run_code", json=request, timeout=limits.wall_s + _ANSWER_S
        )
        reply.raise_for_status()
        answer = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConnectionError(
            f"the sandbox at {url} gave no answer: {type(error).__name__}: {error}"
        ) from error
    answer = answer if isinstance(answer, dict) else {}
    result = answer.get("run_result")
    if not isinstance(result, dict) or answer.get("status") not in ("Success", "Failed"):
        message = " ".join(str(answer.get("message") or "no message").split())[:200]
        raise ConnectionError(f"the sandbox at {url} could not run a program: {message}")
    timed_out = result.get("status") == _TIMED_OUT
    status = None if timed_out else result.get("return_code")
    return Outcome(
        status, result.get("stdout") or "", result.get("stderr") or "", timed_out=timed_out
    )
