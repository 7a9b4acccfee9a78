"""A client of a remote sandbox, which runs programs by SandboxFusion's `POST /run_code`.

SandboxFusion is at github.com/bytedance/SandboxFusion. `run` returns what `sandbox.run` returns on this machine.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from megarl.isolation.sandbox import Outcome, SandboxLimits
from megarl.types import UserError

# added to the program's own time limit: for the service's queue, and the start of its sandbox
_SERVICE_OVERHEAD_S = 30.0
_TIMED_OUT = "TimeLimitExceeded"


def url_errors(url: str, where: str) -> list[UserError]:
    """The error of an address that is not that of a service. where: the recipe key that names it."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname:
        return []
    return [
        UserError(
            where,
            f"url {url!r} is not the address of a service",
            "write https://host or http://host:port",
        )
    ]


def run(url: str, program: str, stdin: str, limits: SandboxLimits) -> Outcome:
    """Run a program there. Raises ConnectionError when the service does not run it, so that there is no outcome."""
    request = {
        "code": program,
        "language": "python",
        "stdin": stdin,
        "run_timeout": limits.wall_s,
        "memory_limit_MB": limits.memory_mb,
    }
    try:
        reply = httpx.post(
            f"{url.rstrip('/')}/run_code", json=request, timeout=limits.wall_s + _SERVICE_OVERHEAD_S
        )
        reply.raise_for_status()
        answer = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConnectionError(
            f"the sandbox at {url} gave no answer: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(answer, dict):
        answer = {}
    result = answer.get("run_result")
    if not isinstance(result, dict) or answer.get("status") not in ("Success", "Failed"):
        message = " ".join(str(answer.get("message") or "no message").split())[:200]
        raise ConnectionError(f"the sandbox at {url} could not run a program: {message}")
    timed_out = result.get("status") == _TIMED_OUT
    return Outcome(
        status=None if timed_out else result.get("return_code"),
        stdout=result.get("stdout") or "",
        stderr=result.get("stderr") or "",
        timed_out=timed_out,
    )
