"""Sampling into a file without training, and training on the samples of a file without engines."""

from __future__ import annotations

from pathlib import Path

from megarl import disk
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.controller.learning_rate import policy_lr
from megarl.controller.run import Step, TrainingRun
from megarl.controller.samples import sampling_of, with_overlong_penalty
from megarl.controller.stages import learn_from_groups, record_groups, reshard, score
from megarl.data.inputs import Inputs
from megarl.fleet.external_fleet import make_fleet
from megarl.fleet.fleet import training_fleet
from megarl.fleet.step_timeline import StepTimeline
from megarl.model.hf_config import model_shape
from megarl.placement.roles import resolve
from megarl.samples.parquet import SampleFile, writing
from megarl.tracking.run_log import RunLog
from megarl.tracking.secrets import redacted


def roll_out(recipe: Recipe, inputs: Inputs, log: RunLog, out: Path) -> None:
    """Sample and score every step's prompts with the weights of the recipe's model, into a file.

    Raises as `megarl.controller.loop.train` does.
    """
    vocab_size = model_shape(recipe.model.path, recipe.model.family).vocab_size
    cluster = Cluster(
        recipe.placement.gpus, recipe.placement.node_gpus, recipe.run.timeout_s, log.say
    )
    cluster.watch_phases(log.phases, log.folder, redacted)
    with cluster, writing(out, vocab_size, recipe.rollout.temperature, "--out") as file:
        log.say("starting training ranks and engines")
        with log.start() as record:
            record.add(inputs.metrics)
            with record.phase("start"):
                fleet = make_fleet(cluster, recipe, log.say, learns=False)
            reshard(fleet, record)
        timeline = StepTimeline(cluster, recipe.run.timeline, log.folder, log.say)
        for step in range(1, recipe.run.steps + 1):
            with timeline.recording(step), log.step(step) as record:
                with record.phase("rollout"):
                    prompts = inputs.prompts.take(recipe.rollout.prompts_per_step)
                    groups = fleet.engines.sample(prompts, sampling_of(recipe, step))
                groups = score(fleet, groups, record, recipe.reward_model.weight)
                with disk.writing(out.parent, out.name, "--out"):
                    file.write(fleet.fetch(groups))
                if fleet.reward_model:
                    # where it had the engines' memory their weights may be lost
                    reshard(fleet, record)
                record_groups(record, groups, recipe.algorithm.name)
                record.failed(groups.summaries)
        fleet.shutdown()
    log.say(f"the samples are in {out}")


def train_from(recipe: Recipe, samples: SampleFile, log: RunLog) -> None:
    """Train each step on its groups in the file; no engine is started, so nothing is evaluated.

    Raises WorkerFailed when a training rank fails.
    """
    roles = resolve(recipe)
    session = Cluster(
        roles.num_training_slots, recipe.placement.node_gpus, recipe.run.timeout_s, log.say
    )
    session.watch_phases(log.phases, log.folder, redacted)
    with session as cluster:
        log.say("starting training ranks")
        fleet = training_fleet(cluster, roles)
        log.write_options(fleet.options())
        run = TrainingRun(
            recipe=recipe,
            fleet=fleet,
            algorithm=recipe.algorithm.name,
            learning_rate=policy_lr(recipe, fleet),
        )
        timeline = StepTimeline(
            cluster, recipe.run.timeline, log.folder, log.say, lambda: fleet.trainers.workers
        )
        for number in range(1, recipe.run.steps + 1):
            with timeline.recording(number), log.step(number) as record:
                groups = fleet.put(samples.groups(number))
                groups = with_overlong_penalty(groups, run.hyperparameters, recipe.longest_sample)
                record_groups(record, groups, recipe.algorithm.name)
                step = learn_from_groups(run, Step(number, record, groups=groups))
                record.add(step.update_metrics)
