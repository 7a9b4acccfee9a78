"""A Python interpreter in the sandbox that runs one cell after the other, and keeps what they define."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

from megarl.isolation.sandbox import (
    SandboxError,
    SandboxLimits,
    end_program,
    first_of_namespace,
    has_begun,
    sandbox_errors,
    start,
)

_PROGRAM = Path(__file__).with_name("inside_interpreter.py").read_text(encoding="utf-8")
_HASH_SEED = 0
_MARK_BYTES = 16
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class CellOutcome:
    """output: what a cell wrote, its first bytes; num_bytes: of all of it. is_alive: the interpreter can run others;
    timed_out: it was killed at the cell's time limit, else it has ended itself."""

    output: str
    num_bytes: int
    is_alive: bool = True
    timed_out: bool = False


class SandboxInterpreter:
    """One interpreter, in a process of its own. A cell that takes longer than limits.wall_s ends it; limits.cpu_s is of
    all cells together, and of output limits.stdout_bytes are kept.

    With the same seed `random` and the order of sets repeat themselves.
    """

    def __init__(
        self, limits: SandboxLimits, seed: int, *, where: str, unsafe: bool = False
    ) -> None:
        """unsafe: as of `sandbox.run`. It ends with the thread that makes it, which waits some milliseconds.

        Raises UserError(where) where there is no isolation.
        """
        for error in sandbox_errors(where, unsafe=unsafe):
            raise error
        self._limits = limits
        self._seed = seed
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if unsafe:
            self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._is_closed = False
        self._socket, theirs = socket.socketpair()
        # Not by the thread's number: one thread starts many interpreters.
        user_number = secrets.randbits(32)
        folder = self._folder and self._folder.name
        with theirs:
            end = theirs.fileno()
            started = start(_PROGRAM, limits, folder, user_number, end, end, _HASH_SEED)
        self._begun = started.begun
        first = first_of_namespace(started.process.pid, started.info, limits.wall_s)
        # also where nobody closes it
        self._end = weakref.finalize(self, end_program, started.process, first)
        self._end.atexit = False  # a copy of this process that ends must not end it

    async def begin(self) -> None:
        """Wait until it can run cells. Raises SandboxError, or TimeoutError, where it cannot: then it is closed."""
        try:
            async with asyncio.timeout(self._limits.wall_s):
                await self._readable(self._begun.fileno())
            if not has_begun(self._begun):
                written = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
                lines = written.decode("utf-8", "replace").strip().splitlines()
                raise SandboxError((lines or ["no message"])[-1])
        except BaseException:
            await self.close()
            raise

    async def _readable(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)

    async def run(self, code: str) -> CellOutcome:
        """Run a cell, one at a time. After an outcome that is not alive, or a cancellation, it is closed."""
        mark = secrets.token_hex(_MARK_BYTES).encode()
        output = _Output(self._limits.stdout_bytes)
        timed_out = False
        try:
            async with asyncio.timeout(self._limits.wall_s):
                reader = await self._send([code, mark.decode()])
                while chunk := await reader.read(_CHUNK_BYTES):
                    if output.take(chunk, mark):
                        return CellOutcome(output.text(), output.num_bytes)
        except TimeoutError:
            timed_out = True
        except ConnectionError:  # it has ended before it read the cell
            pass
        except BaseException:
            await self.close()
            raise
        await self.close()
        output.take_rest()
        return CellOutcome(output.text(), output.num_bytes, is_alive=False, timed_out=timed_out)

    async def _send(self, cell: list[str]) -> asyncio.StreamReader:
        if self._stream is None:
            self._stream = await asyncio.open_connection(sock=self._socket)
            self._stream[1].write(json.dumps(self._seed).encode() + b"\n")
        reader, writer = self._stream
        writer.write(json.dumps(cell).encode() + b"\n")
        return reader

    async def close(self) -> None:
        """End it and what it has started; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._stream:
            self._stream[1].transport.abort()
        self._socket.close()
        self._begun.close()
        await asyncio.to_thread(self._end)
        if self._folder:
            self._folder.cleanup()


class _Output:
    """The first bytes that a cell writes before its mark."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept = bytearray()
        self._rest = b""
        self.num_bytes = 0

    def take(self, chunk: bytes, mark: bytes) -> bool:
        """Take in the next bytes; whether the mark is among them, or has begun in those before."""
        window = self._rest + chunk
        place = window.find(mark)
        if place >= 0:
            self._keep(window[:place])
            self._rest = b""
            return True
        # the last bytes may be the beginning of the mark
        before = max(0, len(window) - len(mark) + 1)
        self._keep(window[:before])
        self._rest = window[before:]
        return False

    def take_rest(self) -> None:
        """Take what would have been the mark's beginning."""
        self._keep(self._rest)

    def _keep(self, data: bytes) -> None:
        self._kept += data[: self._most_bytes - len(self._kept)]
        self.num_bytes += len(data)

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")
