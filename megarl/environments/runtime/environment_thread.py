"""The tools and environments of an engine's episodes, in worker processes, as its other threads see them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megarl.config import Recipe
from megarl.environments.runtime.environment_processes import (
    EnvironmentProcess,
    EnvironmentSettings,
    EnvironmentWorkers,
    JobFailure,
    JobResult,
    Offer,
    call_result,
    sentence,
    unknown,
)
from megarl.environments.runtime.history import (
    Operation,
    Together,
    from_json,
    function_of,
    is_interrupted,
    timeless,
    to_json,
)
from megarl.environments.runtime.results import CallResult
from megarl.isolation.loop_thread import LoopThread, in_own_thread
from megarl.isolation.pool import start_pool
from megarl.isolation.process import Lost
from megarl.types import UserError
from megarl.types.conditions import RunningJob
from megarl.types.json_objects import Columns, JsonObject
from megarl.types.reward_result import RewardResult
from megarl.types.worker_faults import WorkerFaults

# more than a token's text usually has; what is longer is cut by tokens afterwards
_BYTES_OF_TOKEN = 16
_MADE_ANEW = "its state had to be made anew, and"
_NOT_REPLAYABLE = "it cannot be replayed"
_NO_HISTORY = "[]"  # of functions, which have no state


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


class EnvironmentFailure(Exception):
    """The environment of an episode has failed: the episode has ended, and `reward.on_failure` decides about it.

    It is not the model's error. The text says in a few words what happened.
    """


class ReplayFailure(EnvironmentFailure):
    """The state of an episode cannot be made again."""


@dataclass
class _Episode:
    """One attempt at a row. history: the operations done so far with their results, those done together in a list.
    is_spoiled: one was cut or given up; nobody knows the instance's state. turn: held by operations to their end."""

    row: Columns
    seed: int
    instance: int
    worker: EnvironmentProcess | None = None
    is_spoiled: bool = False
    history: list[Together] = field(default_factory=list)
    failure: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentThread:
    """Tools, or an instance of an environment for each episode, in processes of their own.

    The constructor waits until the processes have loaded everything. Raises UserError when they cannot.

    An episode is asked for one thing at a time. Every `open` is followed by a `finish`, also after a failure. Methods
    raise EnvironmentFailure, and UserError when the processes cannot be started again. They may be awaited in any loop.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.thread = LoopThread("environments")
        self._settings = settings
        self._episodes: dict[str, _Episode] = {}
        self._num_opened = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._workers = start_pool(self.thread, lambda: EnvironmentWorkers(settings))
        self._workers.row_of = self._row_of

    @property
    def offer(self) -> Offer:
        """What the processes have loaded."""
        assert self._workers.offer
        return self._workers.offer

    @property
    def schemas(self) -> list[JsonObject]:
        """The schemas of the tools, in the form of OpenAI's `tools`."""
        return self.offer.schemas

    @property
    def has_reply(self) -> bool:
        """Whether the environment answers responses that call no tool."""
        return "reply" in self.offer.has

    @property
    def has_reset(self) -> bool:
        """Whether the environment may add a message to the prompt."""
        return "reset" in self.offer.has

    @property
    def has_reward(self) -> bool:
        """Whether the environment gives episodes a reward itself."""
        return "reward" in self.offer.has

    @property
    def is_replayable(self) -> bool:
        """Whether the state of an episode can be made again, by doing the same again."""
        return self.offer.is_replayable

    @property
    def num_ended(self) -> int:
        """How many processes were ended by a limit, or have ended themselves."""
        return self._workers.num_ended

    def take_faults(self) -> WorkerFaults:
        """The faults of the worker processes since the last call."""
        return self._workers.take_faults()

    def pids(self) -> list[int]:
        """The worker processes."""
        return self._workers.pids()

    @in_own_thread
    async def running(self) -> list[RunningJob]:
        """The calls that the processes have."""
        return await self._workers.running()

    @in_own_thread
    async def restart(self) -> None:
        """End every process and start others, as after a call that exceeded its memory: open episodes are replayed."""
        self._workers.restart()

    @in_own_thread
    async def open(self, episode: str, row: Columns, seed: int) -> str | None:
        """Begin an episode under a name of its own: the text that `reset` appends to the prompt as the user."""
        opened = self._added(episode, row, seed)
        if self._settings.environment is None:
            return None
        await self._place(opened)
        (result,) = await self._perform(opened, [("open", row, seed)])
        if result is None:
            return None
        return self._text(opened, "reset", result).text

    @in_own_thread
    async def resume(self, episode: str, row: Columns, seed: int, history: str | None) -> int:
        """Begin an episode that `leave` has ended, with the state that it had: what was done is done again.

        Returns how many operations that were, as `leave` counts them.
        Raises ReplayFailure where that is not possible; then the episode is not open.
        """
        if self._settings.environment is None:
            self._added(episode, row, seed)
            return 0
        if history is None or not self.is_replayable:
            raise ReplayFailure(_NOT_REPLAYABLE)
        try:
            done = from_json(history, row, seed)
        except (TypeError, ValueError, RecursionError) as error:
            raise ReplayFailure(f"its history cannot be read ({error})") from None
        if not any(done):
            raise ReplayFailure("it has no history")
        opened = self._added(episode, row, seed)
        opened.history = done
        try:
            await self._place(opened)
            if not await self._replay(opened, alone=False):
                await self._restore(opened)
        except BaseException:
            self._close_later(self._episodes.pop(episode))
            raise
        return len(opened.history)

    @in_own_thread
    async def call(self, episode: str, calls: Sequence[tuple[str, object]]) -> list[CallResult]:
        """The results of calls (name, arguments), which run together, in their order. Failed calls have results too."""
        opened = self._opened(episode)
        names = self.offer.names
        known = [("call", *call) for call in calls if call[0] in names]
        results = iter(await self._perform(opened, known))
        tools = ", ".join(sorted(names)) or "none"
        return [
            call_result(name, next(results)) if name in names else unknown(name, tools)
            for name, _ in calls
        ]

    @in_own_thread
    async def reply(self, episode: str, text: str) -> CallResult | None:
        """The environment's answer to a response without calls; None: the episode ends."""
        opened = self._opened(episode)
        if not self.has_reply:
            return None
        (result,) = await self._perform(opened, [("reply", text)])
        if result is None:
            return None
        return self._text(opened, "reply", result)

    @in_own_thread
    async def finish(self, episode: str) -> RewardResult | None:
        """End an episode: the environment's reward, if it gives one, then its `close`. None after a failure."""
        try:
            opened = self._episodes[episode]
            if opened.failure or not self.has_reward:
                return None
            (result,) = await self._perform(opened, [("reward",)])
            if isinstance(result, JobFailure):
                raise self._failure(opened, sentence("reward", result))
            return result if isinstance(result, RewardResult) else None
        finally:
            await self._close(self._episodes.pop(episode))

    @in_own_thread
    async def leave(self, episode: str, operations: int) -> str | None:
        """End an episode that goes on later: what `resume` takes, None where it could not be done again.

        operations: how many of `open`, `call` and `reply` have had a result; a further one was given up, perhaps an
        `open` before it had begun. Does not wait for it, nor for `close`.
        """
        if (left := self._episodes.pop(episode, None)) is None:
            return None
        self._close_later(left)
        if self._settings.environment is None:
            return _NO_HISTORY
        if self.is_replayable:
            return to_json(left.history[:operations])
        return None

    def shutdown(self) -> None:
        """End and reap the processes, and cancel callers that wait; may be called again."""
        self.thread.end(self._end())

    async def _end(self) -> None:
        self._episodes.clear()
        await self._workers.end()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _row_of(self, instance: int) -> Columns | None:
        rows = {episode.instance: episode.row for episode in self._episodes.values()}
        return rows.get(instance)

    def _added(self, episode: str, row: Columns, seed: int) -> _Episode:
        if episode in self._episodes:
            raise ValueError(f"the episode {episode!r} is open")
        self._num_opened += 1
        self._episodes[episode] = added = _Episode(row, seed, self._num_opened)
        return added

    def _close_later(self, dropped: _Episode) -> None:
        """Close an instance without waiting for its process, which a call may hold."""
        task = asyncio.create_task(self._close_quietly(dropped))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_quietly(self, dropped: _Episode) -> None:
        with suppress(UserError):  # whoever asks for something has it, too
            await self._close(dropped)

    async def _close(self, dropped: _Episode) -> None:
        if dropped.worker is None:
            return
        dropped.worker.instances -= 1
        if not dropped.worker.is_gone:
            await self._do(dropped, ("close",))

    def _opened(self, episode: str) -> _Episode:
        opened = self._episodes[episode]
        if opened.failure:
            raise EnvironmentFailure(opened.failure)
        return opened

    async def _place(self, episode: _Episode) -> None:
        """Give the episode to the process with the fewest."""
        episode.worker = await self._workers.least_busy()
        episode.worker.instances += 1

    async def _replace(self, episode: _Episode) -> None:
        """Give the episode another instance."""
        self._close_later(replace(episode))
        self._num_opened += 1
        episode.instance = self._num_opened
        episode.is_spoiled = False
        await self._place(episode)

    async def _perform(self, episode: _Episode, operations: Sequence[Operation]) -> list[JobResult]:
        """Do operations together, and write them into the history, unless they are given up."""
        async with episode.turn:
            num_done = len(episode.history)
            try:
                return await self._results(episode, operations)
            except ReplayFailure as error:
                raise self._failure(episode, f"{_MADE_ANEW} {error}") from None
            except asyncio.CancelledError:
                del episode.history[num_done:]
                episode.is_spoiled = self.is_replayable
                raise

    async def _results(self, episode: _Episode, operations: Sequence[Operation]) -> list[JobResult]:
        """Operations whose process ends without their being to blame are done once more, after a replay, alone where
        they may be to blame. Raises ReplayFailure."""
        results: dict[int, JobResult] = {}
        done: Together = {}
        episode.history.append(done)
        alone: set[int] = set()
        killed: set[int] = set()
        while left := [index for index in range(len(operations)) if index not in results]:
            await self._restore(episode)
            waits = [
                self._do(
                    episode, operations[index], alone=index in alone, was_killed=index in killed
                )
                for index in left
            ]
            for index, result in zip(left, await asyncio.gather(*waits), strict=True):
                if isinstance(result, Lost):
                    alone |= {index} if result.is_suspect else set()
                    killed |= {index} if result.was_killed else set()
                    continue
                results[index] = result
                if is_interrupted(result):
                    episode.is_spoiled = self.is_replayable
                else:
                    done[index] = (operations[index], result)
        if episode.worker is not None and episode.worker.is_gone and not self.is_replayable:
            raise ReplayFailure(_NOT_REPLAYABLE)
        return [results[index] for index in range(len(operations))]

    async def _do(
        self,
        episode: _Episode,
        operation: Operation,
        *,
        alone: bool = False,
        was_killed: bool = False,
    ) -> JobResult:
        kind, *fields = operation
        message = [kind, episode.instance, *fields]
        is_plain = function_of(operation) not in self.offer.is_async
        try:
            return await self._workers.do(
                message,
                is_plain=is_plain,
                worker=episode.worker,
                alone=alone,
                was_killed=was_killed,
            )
        except (TypeError, ValueError, RecursionError) as error:
            if kind == "call":
                return JobFailure(
                    "arguments", f"{fields[0]} was not called: its arguments are no JSON ({error})."
                )
            raise self._failure(
                episode, f"the row cannot be sent to its process ({error})"
            ) from None

    async def _restore(self, episode: _Episode) -> None:
        """Make the state of an episode anew, in another instance, if its process has ended or it is spoiled."""
        alone = False
        while episode.worker is not None and (episode.worker.is_gone or episode.is_spoiled):
            has_begun = any(episode.history)
            if has_begun and not self.is_replayable:
                raise ReplayFailure(_NOT_REPLAYABLE)
            await self._replace(episode)
            if not has_begun:  # not even reset has been done
                return
            if await self._replay(episode, alone=alone):
                return
            alone = True

    async def _replay(self, episode: _Episode, *, alone: bool) -> bool:
        """Whether the whole history was done again; False: the process has ended. Raises ReplayFailure."""
        for done in list(episode.history):
            steps = [done[index] for index in sorted(done)]
            waits = [self._do(episode, operation, alone=alone) for operation, _ in steps]
            for (operation, before), now in zip(steps, await asyncio.gather(*waits), strict=True):
                if isinstance(now, Lost):
                    return False
                if timeless(now) != timeless(before):
                    raise ReplayFailure(
                        f"{function_of(operation)} gave another result in the replay"
                    )
        return True

    def _text(self, episode: _Episode, name: str, result: JobResult) -> CallResult:
        if isinstance(result, CallResult):
            return result
        if isinstance(result, JobFailure):
            words = sentence(name, result)
        else:
            words = f"{name} gave no text"
        raise self._failure(episode, words)

    def _failure(self, episode: _Episode, words: str) -> EnvironmentFailure:
        episode.failure = episode.failure or words
        return EnvironmentFailure(words)
