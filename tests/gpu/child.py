"""A process of its own for a test of a GPU path: it may abort a communicator or be killed, and takes no test along.

The child serves the methods of one object; a request and its reply are one line of JSON each, on its standard streams.
Without a GPU it is forked from the server of tests/forked.py, which has imported torch and Megatron.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

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
    """A process that makes an object of the class `served` ("module:Class") and answers for it until it is closed.

    fresh: it has nothing imported and this environment, without a GPU too.
    """

    def __init__(
        self,
        served: str,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        **arguments: Any,
    ) -> None:
        # not in the child, where the simulated GPU has to be there first
        from megarl.device import DEVICE
        from tests import forked

        self._process: Any
        if not (fresh or DEVICE == "cuda"):
            self._process, pipe = forked.start(_serve_forked, served, arguments)
            self._requests = self._replies = os.fdopen(os.dup(pipe.fileno()), "r+b", buffering=0)
            return
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
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def ask(self, method: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
        """What the method returns. Raises as `request` and `reply`."""
        self.request(method, **arguments)
        return self.reply(timeout_s)

    def request(self, method: str, **arguments: Any) -> None:
        """Call the method; `reply` waits for what it returns. Raises RuntimeError where the child ended before."""
        self._asked = method
        try:
            self._requests.write(json.dumps([method, arguments]).encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError(f"the child ended with {self._ended()} before {method}") from None

    def reply(self, timeout_s: float = TIMEOUT_S) -> Any:
        """What the called method returns. Raises Failed where it raises, RuntimeError on the child's end or silence."""
        if not select.select([self._replies], [], [], timeout_s)[0]:
            raise RuntimeError(f"the child did not answer to {self._asked} within {timeout_s} s")
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"the child ended with {self._ended()} in {self._asked}")
        value, error = json.loads(line)
        if error:
            raise Failed(*error)
        return value

    def kill(self) -> None:
        """End the process as a crash would."""
        self._process.kill()
        self._ended()

    def _ended(self) -> int:
        """Wait for the process's end; its exit code."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait()
        self._process.join()
        return self._process.exitcode

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        for stream in (self._requests, self._replies):
            stream.close()


def _serve_forked(pipe: Connection, served: str, arguments: Mapping[str, Any]) -> None:
    requests = os.fdopen(pipe.fileno(), "r", closefd=False)
    with requests, os.fdopen(pipe.fileno(), "w", closefd=False) as replies:
        serve(served, arguments, requests, replies)


def serve(
    served: str, arguments: Mapping[str, Any], requests: Iterable[str], replies: TextIO
) -> None:
    """Answer each line until there is none."""
    module, name = served.split(":")
    instance: Any = None
    for line in requests:
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
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as own_output:
        os.dup2(2, 1)  # what libraries print goes to standard error
        serve(sys.argv[1], json.loads(sys.argv[2]), sys.stdin, own_output)
