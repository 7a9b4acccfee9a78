"""Targets of workers that hang in the ways in which runs do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from megarl.config import RewardConfig
from megarl.device import BACKEND, DEVICE
from megarl.environments.runtime.environment_processes import EnvironmentSettings
from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.types.conditions import WorkLoad
from megarl.types.sampling import Sampling

_START_S = 120.0
_LONG_S = 500.0


class Rank:
    """A rank of a world of two."""

    def __init__(self, rank: int, meeting: Path) -> None:
        import torch.distributed as dist

        self._rank = rank
        dist.init_process_group(BACKEND, f"file://{meeting}", rank=rank, world_size=2)

    def train(self, skips: int) -> int:
        """A rank that skips the collective returns, and the other waits for it."""
        import torch
        import torch.distributed as dist

        if self._rank != skips:
            ones = torch.ones(1, device=DEVICE)
            dist.all_reduce(ones)
            ones.item()
        return self._rank


class Scorer:
    """The reward functions and the tools of an engine, in their real processes, without an engine."""

    def __init__(self, files: Path) -> None:
        self._rewards = RewardWorkers(
            RewardConfig(
                function="hung_functions:score", arguments={"file": str(files / "reward")},
                timeout_s=_LONG_S, workers=1,
            ),
            _START_S,
        )  # fmt: skip
        settings = EnvironmentSettings(
            tools=("hung_functions:look_up",),
            arguments={"file": str(files / "tool")},
            call_timeout_s=_LONG_S,
            workers=1,
        )
        self._tools = EnvironmentThread(settings)

    async def score(self) -> Any:
        return await self._rewards.reward_results("42", {"question": "6 * 7"}, ["it is 42"])

    async def call_tool(self) -> Any:
        await self._tools.open("episode", {"question": "where?"}, 0)
        return await self._tools.call("episode", [("look_up", {"word": "Atlantis"})])

    async def work_load(self) -> WorkLoad:
        return WorkLoad(jobs=(*await self._rewards.running(), *await self._tools.running()))

    async def shutdown(self) -> None:
        await asyncio.to_thread(self._rewards.shutdown)
        await asyncio.to_thread(self._tools.shutdown)


class Sleeper:
    """Waits until a file is there."""

    def wait_for(self, file: Path) -> None:
        import time

        while not file.exists():
            time.sleep(0.05)


class RealEngine:
    """SGLang on a tiny model, as the worker of an engine calls it."""

    def __init__(self, model: Path) -> None:
        from megarl.rollout.sglang.engine import Engine
        from tests.tiny_engines import tiny_settings

        settings = tiny_settings(model_path=str(model), timeout_s=_START_S)
        self._engine = Engine(settings, "megarl.rollout.sglang.weight_loader.load")

    async def sample(self) -> None:
        """For longer than a test looks at it."""
        await self._engine.generate([3, 7, 15, 8], Sampling(256, 450))

    async def fail(self) -> None:
        await self._engine.fail()

    async def work_load(self) -> WorkLoad:
        queue = self._engine.queue
        return WorkLoad(queue.num_placed, queue.num_waiting)
