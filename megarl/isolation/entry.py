"""The program of every worker process: `python -m megarl.isolation.entry MODULE`, started by `process`.

It forks before it imports MODULE: a library may start threads as it is imported, which a fork would lose (numpy's
OpenBLAS does), and the keeper that stays behind needs none of its memory. MODULE's `main` is called in the worker by
`child.serve`.
"""

from __future__ import annotations

import sys
from importlib import import_module

from megarl.isolation.keeper import fork_worker


def main() -> None:
    parent_pid = fork_worker()
    module = import_module(sys.argv[1])
    sys.argv = [str(module.__file__)]  # as of a program that is run by its own name
    child = import_module("megarl.isolation.child")  # not before the fork
    child.serve(module.main, parent_pid)


if __name__ == "__main__":
    main()
