"""The second node of an engine, for tests: settings as JSON on stdin; its scheduler, then what ends it, on stdout."""

from __future__ import annotations

import asyncio
import json
import sys

from megarl.device import Address
from megarl.rollout.sglang.adapter_slot import AdapterSlot
from megarl.rollout.sglang.arguments import Endpoint, EngineSettings, NodeSpan
from megarl.rollout.sglang.engine import EngineError, Schedulers


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    door = Endpoint(settings.pop("door").encode())
    span = NodeSpan(2, 1, Address(*settings.pop("meet")), door)
    adapter = settings.pop("adapter", None)
    slot = AdapterSlot(adapter["rank"], tuple(adapter["modules"])) if adapter else None
    part = Schedulers(EngineSettings(**settings, span=span, adapter=slot), "engine_loader.load")
    print(*part.pids(), flush=True)
    try:
        asyncio.run(part.fail())
    except EngineError as error:
        print(error.cause, flush=True)
    part.shutdown()


if __name__ == "__main__":
    main()
