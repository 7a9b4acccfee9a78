"""A recipe's reward functions, each with worker processes of its own: which of them scores which row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.config import RewardConfig
from megarl.isolation.loop_thread import LoopThread
from megarl.rollout.reward_workers.reward_pool import Episodes, Pool
from megarl.rollout.reward_workers.reward_process import RewardSpec
from megarl.rollout.rewards import WHERE
from megarl.types.json_objects import Columns
from megarl.types.reward_result import Failure, RewardResult
from megarl.types.worker_faults import WorkerFaults, all_faults

DEFAULT = ""  # stands for all sources without a function of their own


def reward_specs(reward: RewardConfig, start_s: float) -> dict[str, RewardSpec]:
    """Source -> the function that scores its rows. start_s: the limit of a function's import."""
    limits = (reward.timeout_s, reward.memory_mb, start_s)
    specs = {
        name: RewardSpec(
            f"reward.by_source.{name}.function", source.function, source.arguments, *limits
        )
        for name, source in reward.by_source.items()
    }
    if reward.function:
        specs[DEFAULT] = RewardSpec(WHERE, reward.function, reward.arguments, *limits)
    return specs


def scored_as(reward: RewardConfig, row: Columns) -> str:
    """The source whose function scores a row: its own if it has one. A row without a source, or with null, has none."""
    source = row.get(reward.source)
    if source is None or str(source) not in reward.by_source:
        return DEFAULT
    return str(source)


class RewardWorkers:
    """The workers of all functions, and the thread whose loop reads their messages.

    The constructor waits until every function is imported; UserError if one cannot be.
    """

    def __init__(self, reward: RewardConfig, start_s: float) -> None:
        self._reward = reward
        self._thread = LoopThread("scorers")
        self._pools: dict[str, Pool] = {}
        try:
            self._thread.submit(self._start(start_s)).result()
        except BaseException:
            self.shutdown()
            raise

    async def reward_results(
        self, answer: str, row: Columns, responses: Sequence[str], episodes: Episodes = ()
    ) -> list[RewardResult | Failure]:
        """One for each response, in order. episodes: as of `Pool.verdicts`.

        Raises UserError when the function can no longer be used.
        """
        pool = self._pools[scored_as(self._reward, row)]
        return await self._thread.run(pool.reward_results(answer, row, responses, episodes))

    def wait_for_rewards(
        self, answer: str, row: Columns, responses: Sequence[str], episodes: Episodes = ()
    ) -> list[RewardResult | Failure]:
        """`reward_results` where no loop runs."""
        return asyncio.run(self.reward_results(answer, row, responses, episodes))

    @property
    def slowest_s(self) -> float:
        """The time of the slowest verdict so far."""
        return max(pool.slowest_s for pool in self._pools.values())

    def take_faults(self) -> WorkerFaults:
        """The faults of all workers since the last call."""
        return all_faults([pool.take_faults() for pool in self._pools.values()])

    def take_worked_s(self) -> float | None:
        """For how long the mean worker has worked since the last call; None where there is none."""
        if not self._pools:
            return None
        worked_s = sum(pool.take_worked_s() for pool in self._pools.values())
        return worked_s / (len(self._pools) * self._reward.workers)

    def pids(self) -> list[int]:
        """The worker processes."""
        return [pid for pool in self._pools.values() for pid in pool.pids()]

    def shutdown(self) -> None:
        """End and reap the workers; may be called again."""
        self._thread.end(self._end())

    async def _start(self, start_s: float) -> None:
        for source, spec in reward_specs(self._reward, start_s).items():
            self._pools[source] = Pool(spec, self._reward.workers)
        await asyncio.gather(*(pool.start() for pool in self._pools.values()))

    async def _end(self) -> None:
        for pool in self._pools.values():
            await pool.end()
