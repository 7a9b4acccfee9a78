"""One side of a run without the other: samples into a file without training, and training on such a file."""

from __future__ import annotations

from pathlib import Path

from megarl import disk
from megarl.algos import hyperparameters_of
from megarl.cluster.session import Cluster
from megarl.config import Recipe
from megarl.controller.dynamic_sampling import shaped
from megarl.controller.loop import learn, publish, sampling_of, score
from megarl.fleet.fleet import Fleet
from megarl.fleet.rank_groups import RolloutBatch, gpus_alone, ranks_alone
from megarl.parallel.hf_config import model_shape
from megarl.preflight.check import Inputs
from megarl.rollout.episodes import summary
from megarl.rollout.sample_file import SampleFile, writing
from megarl.tracking.metrics import rollout_metrics
from megarl.tracking.run_log import RunLog


def roll_out(recipe: Recipe, inputs: Inputs, log: RunLog, out: Path) -> None:
    """Sample and score every step's prompts with the weights of the recipe's model, into a file.

    Raises as `controller.train` does.
    """
    vocab_size, temperature = model_shape(recipe.model.path).vocab_size, recipe.rollout.temperature
    cluster = Cluster(recipe.placement.gpus, recipe.placement.node_gpus, recipe.run.timeout_s, log.say)
    with cluster, writing(out, vocab_size, temperature, "--out") as file:
        log.say("starting training ranks and engines")
        with log.start() as record:
            record.add(inputs.metrics)
            with record.phase("start"):
                fleet = Fleet(cluster, recipe, log.say, learns=False)
            publish(fleet, record)
        for step in range(1, recipe.run.steps + 1):
            with log.step(step) as record:
                with record.phase("rollout"):
                    prompts = inputs.prompts.take(recipe.rollout.prompts_per_step)
                    groups = fleet.engines.sample(prompts, sampling_of(recipe, step))
                groups = score(fleet, groups, record)
                with disk.writing(out.parent, out.name, "--out"):
                    file.write(fleet.fetch(groups))
                if fleet.reward_model:
                    publish(fleet, record)  # it may have had the engines' memory, and then their weights are lost
                record.add(rollout_metrics(groups.summaries))
                record.samples(groups.summaries)
                record.failed(groups.summaries)
        fleet.shutdown()
    log.say(f"the samples are in {out}")


def train_from(recipe: Recipe, samples: SampleFile, log: RunLog) -> None:
    """Train each step on the groups that the file has of it; no engine is started, so nothing is evaluated.

    Raises WorkerFailed when a training rank fails.
    """
    rules = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
    with Cluster(gpus_alone(recipe), recipe.placement.node_gpus, recipe.run.timeout_s, log.say) as cluster:
        log.say("starting training ranks")
        trainers, critic = ranks_alone(cluster, recipe)
        log.options(*cluster.call_all(trainers.workers[:1], "options"))
        for step in range(1, recipe.run.steps + 1):
            with log.step(step) as record:
                groups = samples.groups(step)
                given = RolloutBatch([summary(group) for group in groups], [cluster.put(group) for group in groups])
                given = shaped(given, rules, recipe.rollout.max_response_tokens)
                record.add(rollout_metrics(given.summaries))
                record.samples(given.summaries)
                learn(recipe, trainers, critic, given, record, hand_over=lambda _: None)
