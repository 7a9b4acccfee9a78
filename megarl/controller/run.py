"""The run, which is made once, and the step, which each stage returns with its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megarl.algos import ALGORITHMS, Stage, hyperparameters_of
from megarl.config import Recipe
from megarl.controller.engine_watch import EngineWatch
from megarl.controller.samples import Collected
from megarl.controller.saver import Saver
from megarl.controller.step_rollout import PhaseAhead
from megarl.data.inputs import Inputs
from megarl.fleet.engine_count import EngineCount
from megarl.fleet.fleet import Fleet, TrainingFleet
from megarl.fleet.rank_groups import NO_GROUPS, GroupBuffer, PerTokenResults, RolloutBatch, Trained
from megarl.fleet.step_timeline import StepTimeline
from megarl.recovery.repetition import Repetition
from megarl.tracking.metrics import train_metrics
from megarl.tracking.run_log import Record, RunLog
from megarl.training.batching import SampleRef
from megarl.types import Hyperparameters, Metrics


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What updates on given samples need.

    algorithm: the row whose stages a step goes through; learning_rate: the policy's by step from 1, None in steps that
    do not update the policy. Both are the recipe's, except in a warm start.
    """

    recipe: Recipe
    fleet: TrainingFleet
    algorithm: str
    learning_rate: Callable[[int], float | None]

    @property
    def hyperparameters(self) -> Hyperparameters:
        return hyperparameters_of(self.algorithm, self.recipe.algorithm)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of a step in order: the source of its groups, then those that learn from them."""
        return ALGORITHMS[self.algorithm].stages(self.hyperparameters)


@dataclass(frozen=True, kw_only=True)
class Run(TrainingRun):
    """A run that samples, trains and saves. prompts_per_step: demonstrations in a warm start.

    repetition: what needs training ranks is run by it; None where a failure of them is the run's, as in a warm start.
    """

    fleet: Fleet
    inputs: Inputs
    saver: Saver
    log: RunLog
    prompts_per_step: int
    repetition: Repetition | None
    timeline: StepTimeline
    engine_watch: EngineWatch = field(default_factory=EngineWatch)
    engine_count: EngineCount = field(default_factory=EngineCount)


@dataclass(frozen=True)
class Step:
    """One step: the record that it fills, and what its stages have found so far.

    buffer: groups that were not trained on yet; of the step before until the rollout is finished, then for the next.
    collected, ahead: of the phases before the training, and the phase beside it; None where nothing is sampled.
    samples: of `groups`, with their advantages. lr: the policy's. trained: None where the policy was not updated.
    """

    number: int
    record: Record
    buffer: GroupBuffer = GroupBuffer()
    collected: Collected | None = None
    ahead: PhaseAhead | None = None
    groups: RolloutBatch = NO_GROUPS
    samples: Sequence[SampleRef] = ()
    logprobs: PerTokenResults | None = None
    token_values: PerTokenResults | None = None
    lr: float = 0.0
    trained: Trained | None = None

    @property
    def update_metrics(self) -> Metrics:
        """Statistics of the policy's updates."""
        if self.trained:
            return {"train/lr": self.lr, **train_metrics(self.trained.updates)}
        return {}

    @property
    def speed(self) -> Metrics:
        """Throughput of the policy's updates."""
        if self.trained:
            return self.trained.speed
        return {}
