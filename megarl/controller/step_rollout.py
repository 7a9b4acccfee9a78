"""The phases of sampling of one step: those before its training, and the one beside it (`rollout.ahead`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

from megarl.config import Recipe
from megarl.controller.samples import Collected, Limits, collect, sampling_of, waiting_metrics
from megarl.data.streams import PromptStream
from megarl.fleet.engines import Engines
from megarl.fleet.rank_groups import GroupBuffer, RolloutBatch
from megarl.fleet.sampling_phase import SamplingPhase
from megarl.tracking.metrics import balance_metrics, failed_share
from megarl.tracking.run_log import Record
from megarl.types import PhaseBalance


class StepRollout:
    """Samples the groups that a step trains on, and then, with ahead, the phase that the next step would begin with.

    That phase is sampled while the ranks learn, by the policy before these updates. It ends before the checkpoint, so
    that a run that resumes needs no older weights; its prompts have the random streams of the next step's round 0.
    """

    def __init__(
        self,
        recipe: Recipe,
        limits: Limits,
        engines: Engines,
        prompts: PromptStream,
        number: int,
        before_phase: Callable[[], None],
    ) -> None:
        """number: of the step. before_phase: is called before each phase that the step's training waits for."""
        self._recipe = recipe
        self._limits = limits
        self._engines = engines
        self._prompts = prompts
        self._number = number
        self._before_phase = before_phase
        self._balances: list[PhaseBalance] = []
        self._found: Collected
        # its buffer, the round, when it began
        self._beside: tuple[GroupBuffer, SamplingPhase, float] | None = None

    def collect(self, buffer: GroupBuffer) -> RolloutBatch:
        """The groups that the step trains on; buffer: of the step before."""
        self._found = collect(self._limits, buffer, self._admit, self._advance)
        return self._found.chosen

    def begin_next(self) -> None:
        """Begin the next step's first phase, with ahead and where that step needs a phase."""
        buffer = self._found.buffer
        following = self._number + 1
        if not self._limits.ahead or not self._limits.begins_with_phase(buffer):
            return
        if count := self._limits.of_next_step().num_admitted(buffer, 0, 0):
            buffer = self._admitted(buffer, count, following, 0)
        began = self._engines.begin(
            buffer.open, sampling_of(self._recipe, following), beside_training=True
        )
        self._beside = buffer, began, time.monotonic()

    def finish(self, record: Record) -> GroupBuffer:
        """Wait for the phase that was begun; the buffer for the next step, and in the record what all phases found."""
        with record.phase("ahead") if self._beside else nullcontext():
            record.add(self._end_next())
        record.add(self._found.counts(self._limits))
        if self._limits.is_phased:
            record.add(waiting_metrics(self._found.chosen.summaries, self._found.buffer))
        record.add(balance_metrics(self._balances))
        record.sampled(sum(balance.seconds for balance in self._balances))
        # also of groups that no step trains on
        record.add({"reward/failed": failed_share(self._found.complete)})
        record.failed(self._found.complete)
        return self._found.buffer

    def _end_next(self) -> dict[str, float]:
        """Wait for the phase; the seconds since the step's groups were chosen in which no engine sampled."""
        if self._beside is None:
            return {}
        before, round_, began_s = self._beside
        after = self._after(before, round_)
        self._found = self._found.advanced(*self._limits.completed(before, after))
        return {"rollout/waited_s": time.monotonic() - began_s - round_.sampled_s}

    def _admit(self, buffer: GroupBuffer, count: int, round_: int) -> GroupBuffer:
        return self._admitted(buffer, count, self._number, round_)

    def _admitted(self, buffer: GroupBuffer, count: int, number: int, round_: int) -> GroupBuffer:
        """With so many prompts more; number, round_: the step and its round of drawing, which name random streams."""
        how = sampling_of(self._recipe, number, round_)
        return buffer.admitted(
            self._prompts.take(count), how.stream, how.num_samples + how.with_baseline
        )

    def _advance(self, buffer: GroupBuffer) -> GroupBuffer:
        self._before_phase()
        return self._after(
            buffer, self._engines.begin(buffer.open, sampling_of(self._recipe, self._number))
        )

    def _after(self, buffer: GroupBuffer, round_: SamplingPhase) -> GroupBuffer:
        """The buffer after this round of its open groups."""
        entries, balance = round_.result()
        self._balances.extend([balance] if balance else [])
        return buffer.updated(entries)
