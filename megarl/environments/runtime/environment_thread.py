"""The tools and environments of an engine's episodes as its other threads see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config import Recipe
from megarl.environments.runtime.environment_pool import EnvironmentPool, PoolCounts
from megarl.environments.runtime.environment_processes import EnvironmentSettings, Offer
from megarl.environments.runtime.results import CallResult
from megarl.isolation.loop_thread import LoopThread
from megarl.types.reward_result import RewardResult

# more than a token's text usually has; what is longer is cut by tokens afterwards
_BYTES_OF_TOKEN = 16


def environment_settings(
    recipe: Recipe, workers: int | None = None, *, prepares: bool = True
) -> EnvironmentSettings:
    """workers: in place of the recipe's. prepares: as of `EnvironmentSettings`."""
    episode = recipe.episode
    assert episode
    return EnvironmentSettings(
        tools=episode.tools,
        environment=episode.environment,
        arguments=episode.arguments,
        call_timeout_s=episode.call_timeout_s,
        workers=workers or episode.workers,
        memory_mb=episode.memory_mb,
        result_bytes=max(2**16, _BYTES_OF_TOKEN * episode.max_observation_tokens),
        start_s=recipe.run.timeout_s,
        prepares=prepares,
    )


class EnvironmentThread:
    """A pool in a thread with a loop of its own. The constructor waits until the processes have loaded everything.

    Methods as of `EnvironmentPool`. Raises UserError when what the recipe names cannot be used.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._thread = LoopThread("environments")
        self._pool = self._thread.make(lambda: EnvironmentPool(settings))
        try:
            self.schemas = self._thread.submit(self._pool.start()).result()
        except BaseException:
            self.shutdown()
            raise

    @property
    def offer(self) -> Offer:
        """What the processes have loaded."""
        return self._pool.offer

    @property
    def counts(self) -> PoolCounts:
        return self._pool.counts

    @property
    def has_reply(self) -> bool:
        return self._pool.has_reply

    @property
    def has_reset(self) -> bool:
        """Whether the environment may add a message to the prompt."""
        return self._pool.has_reset

    @property
    def has_reward(self) -> bool:
        """Whether the environment gives rewards itself."""
        return self._pool.has_reward

    @property
    def is_replayable(self) -> bool:
        """Whether the state of an episode can be made again."""
        return self._pool.is_replayable

    def pids(self) -> list[int]:
        """The worker processes."""
        return self._pool.pids()

    async def restart(self) -> None:
        await self._thread.run(self._pool.restart())

    async def open(self, episode: str, row: Mapping[str, Any], seed: int) -> str | None:
        return await self._thread.run(self._pool.open(episode, row, seed))

    async def resume(
        self, episode: str, row: Mapping[str, Any], seed: int, history: str | None
    ) -> int:
        return await self._thread.run(self._pool.resume(episode, row, seed, history))

    async def leave(self, episode: str, operations: int) -> str | None:
        return await self._thread.run(self._pool.leave(episode, operations))

    async def call(self, episode: str, calls: Sequence[tuple[str, object]]) -> list[CallResult]:
        return await self._thread.run(self._pool.call(episode, calls))

    async def reply(self, episode: str, text: str) -> CallResult | None:
        return await self._thread.run(self._pool.reply(episode, text))

    async def finish(self, episode: str) -> RewardResult | None:
        return await self._thread.run(self._pool.finish(episode))

    def shutdown(self) -> None:
        """End and reap the processes; may be called again."""
        self._thread.end(self._pool.end())
