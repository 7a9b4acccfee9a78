"""The second node of an engine, for tests: settings as JSON on stdin; its scheduler, then what ends it, on stdout."""

from __future__ import annotations

import asyncio
import json
import sys

from megarl.device import Address
from megarl.rollout.arguments import EngineSettings
from megarl.rollout.engine import EngineFault, Schedulers


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    meet = Address(*settings.pop("meet"))
    part = Schedulers(EngineSettings(**settings, meet=meet), "engine_loader.load")
    print(*part.pids(), flush=True)
    try:
        asyncio.run(wait(part))
        print("asked to end", flush=True)
    except EngineFault as fault:
        print(fault.cause, flush=True)
    part.shutdown()


async def wait(part: Schedulers) -> None:
    """Until stdin ends or a scheduler does."""
    asked = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    failed = asyncio.ensure_future(part.fail())
    done, _ = await asyncio.wait([asked, failed], return_when=asyncio.FIRST_COMPLETED)
    if failed in done:
        sys.stdin.close()
        failed.result()
    failed.cancel()


if __name__ == "__main__":
    main()
