"""Python in the sandbox: for `python` each call is a program of its own, for `PythonSession` an episode is one."""

from __future__ import annotations

import asyncio

from megarl.environments import Environment
from megarl.isolation import sandbox
from megarl.isolation.interpreter import CellOutcome, SandboxInterpreter
from megarl.isolation.sandbox import Outcome, SandboxLimits

_OUTPUT_BYTES = 2**16
_ERROR_LINES = 20
_SESSION_CPU_S = 300.0  # of all calls of an interpreter together


async def python(
    code: str, *, timeout_s: float = 4.0, memory_mb: int = 512, unsafe: bool = False
) -> str:
    """Run a Python program and return what it prints. It has the standard library, no network and no other files.

    Args:
        code: the whole program; print what you want to see
    """
    limits = SandboxLimits(wall_s=timeout_s, memory_mb=memory_mb, stdout_bytes=_OUTPUT_BYTES)
    outcome = await asyncio.to_thread(
        sandbox.run, code, limits=limits, where="episode.tools", unsafe=unsafe
    )
    return _told(outcome, timeout_s)


def _prepare(*, unsafe: bool = False, where: str = "episode.tools", **_: object) -> None:
    """Refuse a machine on which programs cannot be isolated."""
    for error in sandbox.sandbox_errors(where, unsafe=unsafe):
        raise error


python.prepare = _prepare  # type: ignore[attr-defined]


class PythonSession(Environment):
    """An interpreter for each episode, started by its first call: what a call defines is there in the next.

    Hashes and `random` are seeded, so that calls can be repeated; code that reads the clock or other random numbers may
    give another result, and then the episode cannot be replayed.
    """

    def __init__(self, timeout_s: float = 4.0, memory_mb: int = 512, unsafe: bool = False) -> None:
        self._limits = SandboxLimits(
            wall_s=timeout_s, cpu_s=_SESSION_CPU_S, memory_mb=memory_mb, stdout_bytes=_OUTPUT_BYTES
        )
        self._unsafe = unsafe
        self._session: SandboxInterpreter | None = None
        self._turn = asyncio.Lock()  # calls of one turn arrive together, in their order
        self._is_closed = False

    @classmethod
    def prepare(cls, *, unsafe: bool = False, **arguments: object) -> None:
        """Refuse a machine on which programs cannot be isolated."""
        _prepare(unsafe=unsafe, where="episode.environment")

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last line.

        Variables, functions and imports are kept for later calls. It has the standard library, no network and no other
        files.

        Args:
            code: the code of this step; it may use what earlier calls have defined
        """
        async with self._turn:
            if self._is_closed:  # while the call waited
                raise RuntimeError("the episode has ended")
            if self._session is None:
                self._session = await sandbox.SERVICE.call(self._started)
            try:
                outcome = await self._session.run(code)
            except BaseException:  # cancelled: the interpreter has been ended
                self._session = None
                raise
            if not outcome.is_alive:
                self._session = None
        return _told_cell(outcome, self._limits.wall_s)

    async def _started(self) -> SandboxInterpreter:
        """An interpreter that can run code. Raises SandboxError."""
        session = SandboxInterpreter(
            self._limits, self.seed, where="episode.environment", unsafe=self._unsafe
        )
        await session.begin()
        if self._is_closed:  # while it started
            await session.close()
            raise RuntimeError("the episode has ended")
        return session

    async def close(self) -> None:
        """End the interpreter; calls that wait do not start another."""
        self._is_closed = True
        if self._session:
            await self._session.close()


def _told(outcome: Outcome, timeout_s: float) -> str:
    """What the program printed, then how it failed."""
    parts = [outcome.stdout]
    if outcome.timed_out:
        parts.append(f"The program took longer than {timeout_s:g} s and was ended.")
    elif outcome.too_much_output:
        parts.append(f"The program printed more than {_OUTPUT_BYTES} bytes and was ended.")
    elif outcome.status != 0:
        parts += outcome.stderr.strip().splitlines()[-_ERROR_LINES:] or [
            f"Exit status {outcome.status}."
        ]
    elif not outcome.stdout:
        parts.append("The program printed nothing.")
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _told_cell(outcome: CellOutcome, timeout_s: float) -> str:
    """What the code printed, then how it ended where it did not end well."""
    parts = [outcome.output.rstrip("\n")]
    if outcome.num_bytes > _OUTPUT_BYTES:
        parts.append(f"Only the first {_OUTPUT_BYTES} of {outcome.num_bytes} bytes are shown.")
    if not outcome.is_alive:
        if outcome.timed_out:
            reason = f"The code took longer than {timeout_s:g} s and was ended."
        else:
            reason = "Python has ended."
        parts.append(f"{reason} The next call begins anew: what earlier ones defined is lost.")
    return "\n".join(part for part in parts if part) or "The code printed nothing."
