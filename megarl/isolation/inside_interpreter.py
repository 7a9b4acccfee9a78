"""The interpreter of a session inside the sandbox: runs cells, all in one module. Imports nothing of megarl.

Standard input and output are one socket. Input: the seed of `random`, then for each cell a line `[code, mark]` of JSON.
Output: what the cell writes to standard output and error, then its mark.
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

_LINES = 20  # of a traceback: the last ones


def main() -> None:
    parent = open(os.dup(0), encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a cell that is ended loses one line at most
    module = sys.modules["__main__"] = ModuleType("__main__")
    random.seed(json.loads(parent.readline()))
    own = os.getpid()
    for number, line in enumerate(parent, start=1):
        code, mark = json.loads(line)
        run(code, f"<cell {number}>", vars(module))
        if os.getpid() != own:  # a cell has forked
            os._exit(0)
        flush()
        write(parent.fileno(), mark)


def run(code: str, name: str, space: dict[str, Any]) -> None:
    """Run a cell; as in an interactive session the value of its last line is printed, and so is an exception."""
    # for tracebacks
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = [tree.body.pop()]
        else:
            last = []
        exec(compile(tree, name, "exec"), space)
        if last:
            exec(compile(ast.Interactive(last), name, "single"), space)
    except BaseException as error:
        shown = error.__traceback__
        while shown and shown.tb_frame.f_code.co_filename != name:
            shown = shown.tb_next
        lines = "".join(traceback.format_exception(type(error), error, shown)).splitlines()
        flush()
        write(2, "\n".join(lines[-_LINES:]) + "\n")


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
