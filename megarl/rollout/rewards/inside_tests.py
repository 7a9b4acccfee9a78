"""Runs a program's tests inside the sandbox, each in a forked process. Imports nothing of megarl.

stdin: JSON {program, setup, tests, wall_s, output_bytes, stop}; setup is run before the program. A test is {stdin},
{call, arguments}, {expression} or {inside}. stdout: `begun`, and a line of JSON for each test that was run: {status,
stdout, value, passed}. Only {inside} has an expected result, so a program gains nothing by changing this process or its
output.
"""

import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

_NAME = "main.py"
BEGUN = "begun"
_MOST_NODES = 1_000_000  # of one value


class Encoder:
    """Encodes values as JSON with types: null, true, "s", or [type, content]. Raises TypeError for other values."""

    def __init__(self) -> None:
        self.nodes = 0

    def encode(self, value: Any) -> Any:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise TypeError("a value of too many parts")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return ["int", format(int(value), "x")]  # fast, and without Python's limit on digits
        if isinstance(value, float):
            return ["float", float.__repr__(value)]
        if isinstance(value, complex):
            return ["complex", complex.__repr__(value)]
        if isinstance(value, bytes | bytearray):
            return [type(value).__name__, bytes(value).hex()]
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return [kind.__name__, [self.encode(item) for item in value]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        return self._encode_library(value)

    def _encode_library(self, value: Any) -> Any:
        library = type(value).__module__.partition(".")[0]
        if library in ("decimal", "fractions"):
            return [library, str(value)]
        if library in ("collections", "builtins", "itertools") and hasattr(value, "__iter__"):
            return ["iterator", [self.encode(item) for item in value]]
        raise TypeError(f"a value of type {type(value).__name__}")


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "float": float,
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
}
_MANY = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_LIBRARY = {"decimal": "Decimal", "fractions": "Fraction"}


def decode(encoded: Any, *, is_inside: bool = False) -> Any:
    """The value that was encoded. Raises LookupError for a type that has no literal.

    is_inside: a sandbox bounds what the value costs, so that types of libraries and iterators are made too.
    """
    if not isinstance(encoded, list):
        return encoded
    name, content = encoded
    if name in _PLAIN:
        return _PLAIN[name](content)
    if name == "dict":
        return {
            decode(key, is_inside=is_inside): decode(item, is_inside=is_inside)
            for key, item in content
        }
    if is_inside and name in _LIBRARY:
        return getattr(importlib.import_module(name), _LIBRARY[name])(content)
    items = [decode(item, is_inside=is_inside) for item in content]
    if is_inside and name == "iterator":
        return iter(items)
    return _MANY[name](items)


def run_test(code: Any, setup: str, test: dict[str, Any], token: int, answer: int) -> None:
    """Run one test in its own process.

    Functions that are needed after the program are held in local variables, because it may replace built-in ones.
    """
    run = exec
    evaluate = eval
    build = compile
    read = os.read
    write = os.write
    leave = os._exit
    encode = Encoder().encode
    dump = json.dumps
    # a tested function's module must not run as __main__
    name = "__main__" if "stdin" in test else "solution"
    module = sys.modules["__main__"] = sys.modules[name] = type(sys)(name)
    space: dict[str, Any] = module.__dict__
    space["_value"] = functools.partial(decode, is_inside=True)
    run(build(setup, "<setup>", "exec"), space)
    run(code, space)
    if "stdin" in test:
        return
    if "inside" in test:
        run(build(test["inside"], "<test>", "exec"), space)
        write(answer, read(token, 64))
        leave(0)
    if "expression" in test:
        value = evaluate(build(test["expression"], "<test>", "eval"), space)
    elif test["call"] in space:
        value = space[test["call"]](*test["arguments"])
    else:
        value = getattr(space["Solution"](), test["call"])(*test["arguments"])
    write_all(write, answer, dump(encode(value)).encode())
    leave(0)


def write_all(write: Any, descriptor: int, content: bytes) -> None:
    while content:
        content = content[write(descriptor, content) :]


def become_program(stdin: int, stdout: int, *kept: int) -> None:
    """Set standard streams and arguments as a new interpreter has them; close all descriptors but those kept."""
    null = os.open(os.devnull, os.O_WRONLY)
    for standard, descriptor in enumerate((stdin, stdout, null)):
        os.dup2(descriptor, standard)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 1 << 16)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv[:] = [_NAME]


def new_file(path: str) -> int:
    """An empty file that no process of an earlier test has open."""
    if os.path.lexists(path):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def await_child(pid: int, wall_s: float) -> int | None:
    """A child's exit status (128 + the signal that ended it); None: it was killed at the time limit."""
    deadline = time.monotonic() + wall_s
    status = None
    while status is None and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        ended, raw = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also the processes that it started
    if status is None:
        os.kill(pid, signal.SIGKILL)  # it may not have made a group of its own yet
        os.waitpid(pid, 0)
    return status


def read_from_start(descriptor: int, most_bytes: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as file:
        return file.read(most_bytes + 1).decode("utf-8", "replace")


def main() -> None:
    job = json.load(sys.stdin)
    print(BEGUN, flush=True)
    try:
        code = compile(job["program"], _NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for test in job["tests"]:
        stdin = new_file("stdin")
        stdout = new_file("stdout")
        value = new_file("value")
        write_all(os.write, stdin, test.get("stdin", "").encode("utf-8", "replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        token_read, token_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            become_program(stdin, stdout, token_read, value)
            run_test(code, job["setup"], test, token_read, value)
            return
        os.close(stdin)
        # made after the fork, so that it is not in the memory of the program's process
        token = os.urandom(16).hex()
        os.write(token_write, token.encode())
        # not before: the child may have ended, and a pipe without a reader cannot be written
        os.close(token_read)
        status = await_child(pid, job["wall_s"])
        os.close(token_write)
        answer = read_from_start(value, job["output_bytes"])
        report = {
            "status": status,
            "stdout": read_from_start(stdout, job["output_bytes"]),
            "value": answer,
            "passed": True,
        }
        if "inside" in test:
            report |= {"value": "", "passed": answer == token}
        print(json.dumps(report), flush=True)
        if job["stop"] and (status != 0 or not report["passed"]):
            return


if __name__ == "__main__":
    main()
