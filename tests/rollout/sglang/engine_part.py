"""The second node of an engine, for tests: pickled settings on stdin; its scheduler, then what ends it, on stdout."""

from __future__ import annotations

import asyncio
import pickle
import sys

from megarl.rollout.sglang.engine import EngineError, Schedulers


def main() -> None:
    part = Schedulers(pickle.load(sys.stdin.buffer), "engine_loader.load")
    print(*part.pids(), flush=True)
    try:
        asyncio.run(part.fail())
    except EngineError as error:
        print(str(error).splitlines()[-1], flush=True)
    part.shutdown()


if __name__ == "__main__":
    main()
