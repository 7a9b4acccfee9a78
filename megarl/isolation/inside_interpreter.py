"""The program of `interpreter.SandboxInterpreter` inside the sandbox: it runs cells of code, one after the other.

All cells share one module, so that a cell finds what earlier ones have defined. Standard input and output are one
socket. Its input is the seed of `random`, then a line of JSON `[code, mark]` for each cell; its output is what the cell
writes to standard output and error, then the mark, by which the parent sees that the cell has ended.

The sandbox has no packages of this environment, so this file imports nothing of megarl.
"""

import ast
import json
import linecache
import os
import random
import sys
import traceback
from contextlib import suppress
from types import ModuleType
from typing import Any

_TRACEBACK_LINES = 20  # the last ones are shown


def main() -> None:
    parent = open(os.dup(0), encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a cell that is ended loses one line at most
    module = sys.modules["__main__"] = ModuleType("__main__")
    random.seed(json.loads(parent.readline()))
    own_pid = os.getpid()
    for number, line in enumerate(parent, start=1):
        code, mark = json.loads(line)
        run(code, f"<cell {number}>", vars(module))
        if os.getpid() != own_pid:  # a cell has forked
            os._exit(0)
        flush()
        write(parent.fileno(), mark)


def run(code: str, name: str, space: dict[str, Any]) -> None:
    """Run a cell; as in an interactive session the value of its last line is printed, and so is an exception."""
    # tracebacks show a cell's lines from here
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last: list[ast.stmt] = []
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last.append(tree.body.pop())
        exec(compile(tree, name, "exec"), space)
        if last:
            exec(compile(ast.Interactive(last), name, "single"), space)
    except BaseException as error:
        shown = error.__traceback__
        while shown and shown.tb_frame.f_code.co_filename != name:
            shown = shown.tb_next
        lines = "".join(traceback.format_exception(type(error), error, shown)).splitlines()
        flush()
        write(2, "\n".join(lines[-_TRACEBACK_LINES:]) + "\n")


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a cell may have replaced or closed them
            stream.flush()


def write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
