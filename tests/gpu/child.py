"""A process of its own for a test of a GPU path: it may abort a communicator or be killed, and takes no test along.

The child serves the methods of one object; a request and its reply are one line of JSON each, on its standard streams.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 150.0
# the environment of a child that is to take itself for a machine without a GPU
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


class Failed(RuntimeError):
    """A method of a child raised; `kind` is the name of the exception's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Child:
    """A process that makes an object of the class `served` ("module:Class") and answers for it until it is closed."""

    def __init__(
        self, served: str, environment: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        command = [sys.executable, "-m", "tests.gpu.child", served, json.dumps(arguments)]
        settings = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, method: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
        """What the method returns. Raises as `request` and `reply`."""
        self.request(method, **arguments)
        return self.reply(timeout_s)

    def request(self, method: str, **arguments: Any) -> None:
        """Call the method; `reply` waits for what it returns. Raises RuntimeError where the child ended before."""
        assert self._process.stdin
        self._asked = method
        try:
            self._process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError(
                f"the child ended with {self._process.wait()} before {method}"
            ) from None

    def reply(self, timeout_s: float = TIMEOUT_S) -> Any:
        """What the called method returns. Raises Failed where it raises, RuntimeError on the child's end or silence."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise RuntimeError(f"the child did not answer to {self._asked} within {timeout_s} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the child ended with {self._process.wait()} in {self._asked}")
        value, error = json.loads(line)
        if error:
            raise Failed(*error)
        return value

    def kill(self) -> None:
        """End the process as a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()


def serve(served: str, arguments: Mapping[str, Any]) -> None:
    """Answer each line of standard input until it ends; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        module, name = served.split(":")
        instance: Any = None
        for line in sys.stdin:
            method, keywords = json.loads(line)
            value, error = None, None
            try:
                instance = instance or getattr(importlib.import_module(module), name)(**arguments)
                value = getattr(instance, method)(**keywords)
            except Exception as raised:
                traceback.print_exc()
                error = type(raised).__name__, str(raised)
            print(json.dumps([value, error]), file=replies, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
