"""Python programs in the sandbox: each call is a program of its own, which keeps nothing for the next."""

from __future__ import annotations

import asyncio

from megarl.rollout.sandbox import sandbox
from megarl.rollout.sandbox.sandbox import Outcome, SandboxLimits
from megarl.types import UserFault

_OUTPUT_BYTES = 2**16
_ERROR_LINES = 20


async def python(code: str, *, timeout_s: float = 4.0, memory_mb: int = 512, unsafe: bool = False) -> str:
    """Run a Python program and return what it prints. It has the standard library, no network and no other files.

    Args:
        code: the whole program; print what you want to see
    """
    limits = SandboxLimits(wall_s=timeout_s, memory_mb=memory_mb, stdout_bytes=_OUTPUT_BYTES)
    return _told(await asyncio.to_thread(sandbox.run, code, limits=limits, unsafe=unsafe), timeout_s)


def _prepare(*, unsafe: bool = False, **_: object) -> None:
    """Refuse a machine on which programs cannot be isolated."""
    for fault in sandbox.sandbox_faults(unsafe=unsafe):
        raise UserFault("episode.tools", fault.problem, "install bubblewrap, or run without isolation: `unsafe: true`")


python.prepare = _prepare  # type: ignore[attr-defined]


def _told(outcome: Outcome, timeout_s: float) -> str:
    """What the program printed, then how it failed."""
    parts = [outcome.stdout]
    if outcome.timed_out:
        parts.append(f"The program took longer than {timeout_s:g} s and was ended.")
    elif outcome.too_much_output:
        parts.append(f"The program printed more than {_OUTPUT_BYTES} bytes and was ended.")
    elif outcome.status != 0:
        parts += outcome.stderr.strip().splitlines()[-_ERROR_LINES:] or [f"Exit status {outcome.status}."]
    elif not outcome.stdout:
        parts.append("The program printed nothing.")
    return "\n".join(part.rstrip("\n") for part in parts if part)
