"""The log of a run that is no terminal: a file whose disk may be full, or the pipe of a program."""

from __future__ import annotations

import os
from typing import TextIO

MOST_BYTES = 2**20
_PIECE_BYTES = 2**16


class PatientStream:
    """A text stream that keeps what its file does not take, and writes it before what comes next.

    Where more than `most_bytes` wait, the oldest lines are lost, which a line says in their place. A pipe whose reader
    has gone is an error as ever. It writes past the other stream's buffer: what that could not get rid of would change
    the exit code of this process.
    """

    def __init__(self, stream: TextIO, most_bytes: int = MOST_BYTES) -> None:
        """stream: of a file descriptor."""
        self._stream = stream
        self._file = stream.fileno()
        self._most_bytes = most_bytes
        self._waiting = bytearray()
        self._num_lost = 0
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        self._waiting += text.encode(self.encoding, self._stream.errors or "strict")
        return len(text)

    def flush(self) -> None:
        """Write what waits. Raises BrokenPipeError, and no other error of the system."""
        try:
            self._stream.flush()  # what others have printed comes first
            if self._num_lost:
                lost = f"{self._num_lost} lines of this log are lost: its disk was full\n"
                os.write(self._file, lost.encode(self.encoding))
                self._num_lost = 0
            while self._waiting:
                written = os.write(self._file, self._waiting[:_PIECE_BYTES])
                del self._waiting[:written]
        except BrokenPipeError:
            raise
        except OSError:
            self._drop_oldest()

    def isatty(self) -> bool:
        return False

    def _drop_oldest(self) -> None:
        too_many = len(self._waiting) - self._most_bytes
        if too_many <= 0:
            return
        end = self._waiting.find(b"\n", too_many) + 1 or len(self._waiting)
        self._num_lost += self._waiting[:end].count(b"\n")
        del self._waiting[:end]
