"""Sampling into a file without training, and training on the samples of a file without engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl import disk
from megarl.algos import ALGORITHMS
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.controller.learning_rate import policy_lr
from megarl.controller.run import Step, TrainingRun
from megarl.controller.samples import sampling_of, with_overlong_penalty
from megarl.controller.stages import LEARNING_STAGES, advantages, reshard, score
from megarl.data.inputs import Inputs
from megarl.fleet.fleet import Fleet, training_fleet
from megarl.model.hf_config import model_shape
from megarl.placement.roles import resolve
from megarl.samples.parquet import SampleFile, writing
from megarl.tracking.metrics import rollout_metrics
from megarl.tracking.run_log import Record, RunLog
from megarl.types import GroupSummary


def roll_out(recipe: Recipe, inputs: Inputs, log: RunLog, out: Path) -> None:
    """Sample and score every step's prompts with the weights of the recipe's model, into a file.

    Raises as `megarl.controller.loop.train` does.
    """
    vocab_size = model_shape(recipe.model.path).vocab_size
    cluster = Cluster(
        recipe.placement.gpus, recipe.placement.node_gpus, recipe.run.timeout_s, log.say
    )
    with cluster, writing(out, vocab_size, recipe.rollout.temperature, "--out") as file:
        log.say("starting training ranks and engines")
        with log.start() as record:
            record.add(inputs.metrics)
            with record.phase("start"):
                fleet = Fleet(cluster, recipe, log.say, learns=False)
            reshard(fleet, record)
        for step in range(1, recipe.run.steps + 1):
            with log.step(step) as record:
                with record.phase("rollout"):
                    prompts = inputs.prompts.take(recipe.rollout.prompts_per_step)
                    groups = fleet.engines.sample(prompts, sampling_of(recipe, step))
                groups = score(fleet, groups, record, recipe.reward_model.weight)
                with disk.writing(out.parent, out.name, "--out"):
                    file.write(fleet.fetch(groups))
                if fleet.reward_model:
                    # where it had the engines' memory their weights may be lost
                    reshard(fleet, record)
                _record_samples(record, recipe, groups.summaries)
                record.failed(groups.summaries)
        fleet.shutdown()
    log.say(f"the samples are in {out}")


def train_from(recipe: Recipe, samples: SampleFile, log: RunLog) -> None:
    """Train each step on its groups in the file; no engine is started, so nothing is evaluated.

    Raises WorkerFailed when a training rank fails.
    """
    roles = resolve(recipe)
    with Cluster(
        roles.num_training_slots, recipe.placement.node_gpus, recipe.run.timeout_s, log.say
    ) as cluster:
        log.say("starting training ranks")
        fleet = training_fleet(cluster, roles)
        log.write_options(fleet.options())
        run = TrainingRun(
            recipe=recipe,
            fleet=fleet,
            algorithm=recipe.algorithm.name,
            learning_rate=policy_lr(recipe, fleet),
        )
        for number in range(1, recipe.run.steps + 1):
            with log.step(number) as record:
                given = fleet.put(samples.groups(number))
                groups = with_overlong_penalty(given, run.hyperparameters, recipe.longest_sample)
                _record_samples(record, recipe, groups.summaries)
                step = advantages(run, Step(number, record, groups=groups))
                for stage in run.stages[1:]:  # the file is the source of the groups
                    step = LEARNING_STAGES[stage](run, step)
                record.add(step.update_metrics)


def _record_samples(record: Record, recipe: Recipe, summaries: Sequence[GroupSummary]) -> None:
    compares_samples = ALGORITHMS[recipe.algorithm.name].needs_group
    record.add(rollout_metrics(summaries, compares_samples=compares_samples))
    record.samples(summaries)
