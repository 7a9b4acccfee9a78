"""The phases of sampling of one step: those before its training, and the one beside it (`rollout.ahead`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megarl.config import Recipe
from megarl.controller.samples import Collected, Limits, collect, sampling_of, waiting_metrics
from megarl.data.streams import PromptStream
from megarl.fleet.engines import Engines
from megarl.fleet.rank_groups import GroupBuffer
from megarl.fleet.sampling_phase import SamplingPhase
from megarl.tracking.metrics import balance_metrics, failed_share
from megarl.tracking.run_log import Record
from megarl.types import PhaseBalance


@dataclass(frozen=True)
class PhaseAhead:
    """The phase that the next step would begin with, while it is sampled; buffer: as it began at `began_s`."""

    buffer: GroupBuffer
    phase: SamplingPhase
    began_s: float


@dataclass(frozen=True)
class StepRollout:
    """Samples the groups that a step trains on, and then, with ahead, the phase that the next step would begin with.

    That phase is sampled while the ranks learn, by the policy before these updates. It ends before the checkpoint, so
    that a run that resumes needs no older weights; its prompts have the random streams of the next step's round 0.

    number: of the step. before_phase: is called before each phase that the step's training waits for. What has been
    sampled is in the values that the methods return.
    """

    recipe: Recipe
    limits: Limits
    engines: Engines
    prompts: PromptStream
    number: int
    before_phase: Callable[[], None]

    def collect(self, buffer: GroupBuffer) -> Collected:
        """The groups that the step trains on; buffer: of the step before."""
        return collect(self.limits, buffer, self._admit, self._advance)

    def begin_next(self, collected: Collected) -> PhaseAhead | None:
        """Begin the next step's first phase, with ahead and where that step needs a phase."""
        buffer = collected.buffer
        following = self.number + 1
        if not self.limits.ahead or not self.limits.begins_with_phase(buffer):
            return None
        if count := self.limits.of_next_step().num_admitted(buffer, 0, 0):
            buffer = self._admitted(buffer, count, following, 0)
        sampling = sampling_of(self.recipe, following)
        phase = self.engines.begin(buffer.open, sampling, beside_training=True)
        return PhaseAhead(buffer, phase, time.monotonic())

    def finish(self, collected: Collected, ahead: PhaseAhead | None, record: Record) -> GroupBuffer:
        """Wait for the phase that was begun; the buffer for the next step, and in the record what all phases found."""
        if ahead:
            with record.phase("ahead"):
                entries, balance = ahead.phase.result()
                after = ahead.buffer.updated(entries)
                collected = collected.advanced(self.limits, ahead.buffer, after, balance)
            # the seconds since the step's groups were chosen in which no engine sampled
            waited_s = time.monotonic() - ahead.began_s - ahead.phase.sampled_s
            record.add({"rollout/waited_s": waited_s})
        record.add(collected.counts(self.limits))
        if self.limits.is_phased:
            record.add(waiting_metrics(collected.chosen.summaries, collected.buffer))
        record.add(balance_metrics(collected.balances))
        record.sampled(
            sum(balance.seconds for balance in collected.balances),
            self.engines.num_engines,
            have_own_gpus=self.engines.have_own_gpus,
        )
        # also of groups that no step trains on
        record.add({"reward/failed": failed_share(collected.complete)})
        record.failed(collected.complete)
        return collected.buffer

    def _admit(self, buffer: GroupBuffer, count: int, round_: int) -> GroupBuffer:
        return self._admitted(buffer, count, self.number, round_)

    def _admitted(self, buffer: GroupBuffer, count: int, number: int, round_: int) -> GroupBuffer:
        """With so many prompts more; number, round_: the step and its round of drawing, which name random streams."""
        sampling = sampling_of(self.recipe, number, round_)
        return buffer.admitted(self.prompts.take(count), sampling.stream, sampling.group_size)

    def _advance(self, buffer: GroupBuffer) -> tuple[GroupBuffer, PhaseBalance]:
        self.before_phase()
        phase = self.engines.begin(buffer.open, sampling_of(self.recipe, self.number))
        entries, balance = phase.result()
        return buffer.updated(entries), balance
