"""The stages of a step, (run, step) -> the step with what was found: `Algorithm.stages` names those of an algorithm.

`LEARNING_STAGES` need no engines, so that a run on a sample file goes through them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar

from megarl.algos import ALGORITHMS, Stage
from megarl.controller.learning_rate import learning_rate
from megarl.controller.run import Run, Step, TrainingRun
from megarl.controller.samples import (
    Limits,
    refuse_empty,
    samples_of,
    staleness,
    with_overlong_penalty,
    with_scores,
)
from megarl.controller.silent_faults import compare_logprobs, step_of_faults
from megarl.controller.step_rollout import StepRollout
from megarl.fleet.fleet import Fleet
from megarl.fleet.rank_groups import GroupBuffer, RolloutBatch
from megarl.recovery.repetition import Repetition
from megarl.samples.buffer import staleness_bound
from megarl.tracking.metrics import rollout_metrics, update_metrics
from megarl.tracking.run_log import Record
from megarl.training.batching import shuffled

Result = TypeVar("Result")


def sample(run: Run, step: Step) -> Step:
    """Rollout and reward: as many groups as the step trains on, scored; with ahead the next phase has begun."""
    recipe = run.recipe
    record = step.record
    hyperparameters = run.hyperparameters
    rollout = _rollout(run, step.number)
    ahead = None
    with record.phase("rollout"):
        collected = rollout.collect(step.buffer)
        # else nothing has its samples
        if step.number < recipe.run.steps or run.saver.is_due(step.number):
            ahead = rollout.begin_next(collected)
    groups = collected.chosen
    bound = max(staleness_bound(recipe, hyperparameters), step.buffer.loaded_bound)
    record.add(staleness(groups.summaries, run.fleet.version, bound))
    if run.fleet.reward_model:
        groups = _repeated(
            run, step, partial(score, run.fleet, groups, record, recipe.reward_model.weight)
        )
    groups = with_overlong_penalty(groups, hyperparameters, recipe.longest_sample)
    record_groups(record, groups, run.algorithm)
    return replace(step, groups=groups, collected=collected, ahead=ahead)


def finish_rollout(run: Run, step: Step) -> Step:
    """After the updates: the buffer for the next step, once the phase has ended that was sampled meanwhile."""
    if step.collected is None:
        return step
    rollout = _rollout(run, step.number)
    with step_of_faults(run, step.number):
        buffer = rollout.finish(step.collected, step.ahead, step.record)
    return replace(step, buffer=buffer)


def _rollout(run: Run, number: int) -> StepRollout:
    rollout = run.recipe.rollout
    limits = Limits(
        run.prompts_per_step,
        rollout.in_flight,
        run.hyperparameters,
        ahead=rollout.ahead,
        is_phased=rollout.phase_tokens is not None,
        steps_left=run.recipe.run.steps - number,
    )
    prompts = run.inputs.prompts
    before_phase = run.saver.leave_within_step
    return StepRollout(run.recipe, limits, run.fleet.engines, prompts, number, before_phase)


def demonstrate(run: Run, step: Step) -> Step:
    """The next prompts' own answers, or demonstrated episodes, in place of samples."""
    prompts = run.inputs.prompts.take(run.prompts_per_step)
    groups = [run.inputs.demonstrate(prompt) for prompt in prompts]
    return replace(step, groups=run.fleet.put(groups))


def record_groups(record: Record, groups: RolloutBatch, algorithm: str) -> None:
    """What a step's groups are on average, and some of their samples."""
    compares_samples = ALGORITHMS[algorithm].needs_group
    record.add(rollout_metrics(groups.summaries, compares_samples=compares_samples))
    record.samples(groups.summaries)


def score(fleet: Fleet, groups: RolloutBatch, record: Record, weight: float) -> RolloutBatch:
    """The groups with the reward model's scores, times the weight, added to their rewards, where there is one."""
    if fleet.reward_model is None:
        return groups
    with record.phase("score"):
        record.add(fleet.onload_for("score"))
        scores = fleet.reward_model.scores(groups.refs)
    return with_scores(groups, scores, weight)


def advantages(run: TrainingRun, step: Step) -> Step:
    """The samples that the step trains on, each with the advantage that its reward gives it in its group.

    Their order is random, so that none of several updates has the oldest and longest samples.
    """
    only_finished = run.hyperparameters.overlong_filter
    groups = step.groups.summaries
    samples = samples_of(
        groups, run.algorithm, only_finished=only_finished, version=run.fleet.version
    )
    refuse_empty(samples, groups)
    step.record.learnt_from({(sample.group, sample.sample): sample.advantage for sample in samples})
    return replace(step, samples=shuffled(samples, run.recipe.run.seed, step.number))


def compute_logprobs(run: TrainingRun, step: Step) -> Step:
    """Old and reference logprobs, and so the KL penalties in the rewards that the critic learns from."""
    fleet = run.fleet
    critic = run.fleet.critic
    assert critic is not None
    with step.record.phase("logprobs"):
        step.record.add(fleet.onload_for("train"))
        readers = critic.plan_of(step.samples)
        logprobs = fleet.trainers.compute_logprobs(
            run.algorithm, step.samples, step.groups.refs, readers
        )
    return replace(step, logprobs=logprobs)


def compute_values(run: TrainingRun, step: Step) -> Step:
    """The critic's value of each token, from before its updates in this step; then all of these updates."""
    fleet = run.fleet
    critic = run.fleet.critic
    assert critic is not None
    with step.record.phase("critic"):
        step.record.add(fleet.onload_for("critic"))
        readers = fleet.trainers.plan_of(run.algorithm, step.samples)
        token_values = critic.values(step.samples, step.groups.refs, readers)
        lr = learning_rate(critic.recipe.train, step.number, run.recipe.run.steps)
        updates = critic.train(token_values, lr, step.logprobs)
    step.record.add({"critic/lr": lr, **update_metrics(updates, "critic")})
    return replace(step, token_values=token_values.for_readers())


def update(run: TrainingRun, step: Step) -> Step:
    """All updates of the policy, in the steps that have a learning rate for it.

    The returned step has no token values and no logprobs: only these updates read them.
    """
    lr = run.learning_rate(step.number)
    values = step.token_values
    logprobs = step.logprobs
    step = replace(step, token_values=None, logprobs=None)
    if lr is None:
        return step
    with step.record.phase("train"):
        step.record.add(run.fleet.onload_for("train"))
        trained = run.fleet.trainers.train(
            run.algorithm,
            step.samples,
            step.groups.refs,
            lr,
            token_values=values,
            logprobs=logprobs,
        )
    return replace(step, lr=lr, trained=trained)


def learn(run: Run, step: Step) -> Step:
    """The stages of a step in order: the source of its groups, their advantages, and those that learn from them.

    Raises SilentFault with the step, as `finish_rollout`.
    """
    with step_of_faults(run, step.number):
        step = STAGES[run.stages[0]](run, step)
        if run.repetition is None:
            step = learn_from_groups(run, step)
        else:
            step = _learn_repeatably(run, advantages(run, step), run.repetition)
        compare_logprobs(run, step)
    return step


def _learn_repeatably(run: Run, step: Step, repetition: Repetition) -> Step:
    # without what only the controller needs, such as references to groups that the next step trains on
    again = replace(
        step, record=Record(step.number), buffer=GroupBuffer(), collected=None, ahead=None
    )
    return repetition.train(
        step.number,
        partial(_learn_from_samples, run, step),
        again=partial(_learn_from_samples, run, again),
    )


def learn_from_groups(run: TrainingRun, step: Step) -> Step:
    """The stages behind the source of the groups, which the step has."""
    return _learn_from_samples(run, advantages(run, step))


def _learn_from_samples(run: TrainingRun, step: Step) -> Step:
    """What ranks do in a step: the same whenever they begin with the same state."""
    with step_of_faults(run, step.number):
        for stage in run.stages[1:]:
            step = LEARNING_STAGES[stage](run, step)
    return step


def save(run: Run, step: Step) -> None:
    """Begin the step's checkpoint, if it is due."""

    def begin() -> None:
        with step.record.phase("save"):
            step.record.add(run.saver.begin(step.number, step.buffer))

    _repeated(run, step, begin)


def publish(run: Run, step: Step) -> None:
    """Reshard the step's weights into the engines; while these sample with them, the ranks' state is copied."""
    _repeated(run, step, partial(reshard, run.fleet, step.record))
    if run.repetition:
        run.repetition.published(step.number)
        step.record.add(run.repetition.take_metrics())


def settle(run: Run, number: int) -> None:
    """Complete the checkpoint of a step whose record is written, or leave an asynchronous one to the next step."""
    complete = partial(run.saver.settle, number)
    if run.repetition is None:
        complete()
        return
    run.repetition.excuse(complete)
    if number == run.recipe.run.steps and run.saver.is_open:
        # no later step makes it good
        run.repetition.attempt(number, complete)


def _repeated(run: Run, step: Step, action: Callable[[], Result]) -> Result:
    """What the action returns, which needs training ranks; it is repeated when one of them has failed."""
    if run.repetition:
        return run.repetition.attempt(step.number, action)
    return action()


def reshard(fleet: Fleet, record: Record) -> None:
    """Reshard: the trained weights into the engines, which then hold the GPUs' memory again."""
    with record.phase("reshard"):
        stats, readings = fleet.reshard()
    record.add(
        {f"reshard/{name}": value for name, value in asdict(stats).items() if value is not None}
    )
    record.add({"reshard/version": fleet.version, "reshard/attempts": fleet.attempts, **readings})
    # a reshard by which the run goes back to before a step has no record, and leaves them to the next
    record.add({"recovery/engines_lost": fleet.take_engine_losses()})


LEARNING_STAGES: dict[Stage, Callable[[TrainingRun, Step], Step]] = {
    "logprobs": compute_logprobs,
    "values": compute_values,
    "update": update,
}
STAGES: dict[Stage, Callable[[Run, Step], Step]] = {
    "sample": sample,
    "demonstrate": demonstrate,
    **LEARNING_STAGES,
}
