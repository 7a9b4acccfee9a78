"""A client of a remote sandbox, which runs programs by SandboxFusion's `POST /run_code`.

SandboxFusion is at github.com/bytedance/SandboxFusion. `run` returns what `sandbox.run` returns on this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from megarl.isolation.http_status import certificates, host_of, require_available
from megarl.isolation.sandbox import Outcome, SandboxLimits
from megarl.isolation.service import Service, ServiceError, Unavailable
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

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
        answer = _service(url).call_plain(
            lambda left_s: _posted(url, request, left_s),
            timeout_s=limits.wall_s + _SERVICE_OVERHEAD_S,
        )
    except ServiceError as error:
        raise ConnectionError(f"the sandbox at {error}") from None
    except httpx.HTTPStatusError as error:
        raise ConnectionError(f"the sandbox at {url} gave no answer: {error}") from error
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


@cache
def _service(url: str) -> Service:
    """The service at an address, of which all calls of this process know whether it answers."""
    return Service(host_of(url), faults=(httpx.RequestError, TimeoutError))


def _posted(url: str, request: Mapping[str, Any], left_s: float) -> JsonObject:
    """The service's answer to one try. Raises TimeoutError when it is not whole after left_s."""
    ends_at = time.monotonic() + left_s
    content = b""
    address = f"{url.rstrip('/')}/run_code"
    verify = certificates()
    with httpx.stream(
        "POST", address, json=request, verify=verify, timeout=ends_at - time.monotonic()
    ) as reply:
        require_available(reply.status_code, reply.headers)
        reply.raise_for_status()
        for chunk in reply.iter_bytes():
            content += chunk
            if time.monotonic() > ends_at:
                raise TimeoutError
    try:
        answer = json.loads(content)
    except ValueError:
        raise Unavailable("a reply that is not JSON") from None
    return answer if isinstance(answer, dict) else {}
