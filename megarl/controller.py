"""The loop. It knows the order of the phases and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

import torch

from megarl import resume
from megarl.algos import ALGORITHMS, rules_of
from megarl.batching import SampleRef
from megarl.cluster import Cluster
from megarl.collect import collect, shaped
from megarl.config import Recipe
from megarl.fleet import Fleet
from megarl.memory import Phase
from megarl.metrics import critic_metrics, eval_metrics, failed_share, rollout_metrics, train_metrics
from megarl.preflight import Inputs
from megarl.ranks import CriticRanks, Rollout, TrainingRanks
from megarl.resume import Saver
from megarl.rollout.episodes import Sampling, demonstration, summary
from megarl.rollout.rewards import MEND
from megarl.run_log import Record, RunLog
from megarl.snapshots import Snapshot
from megarl.types import GroupSummary, Prompt, UserFault


def train(recipe: Recipe, inputs: Inputs, log: RunLog, start: Snapshot | None = None) -> None:
    """Run a checked recipe, from a checkpoint on where one is given.

    Raises WorkerFailed when a process of the run fails, UserFault when the reward does.
    """
    with Cluster(recipe.placement.gpus) as cluster:
        log.say("starting training ranks and engines side by side")
        fleet, saver = begin(recipe, inputs, cluster, log, start)
        try:
            take_steps(recipe, inputs, fleet, saver, log, first=start.step + 1 if start else 1)
        except Exception:
            with suppress(Exception):
                saver.rescue()  # a failure does not cost the checkpoint that was being written
            raise
        fleet.shutdown()


def take_steps(recipe: Recipe, inputs: Inputs, fleet: Fleet, saver: Saver, log: RunLog, first: int) -> None:
    """All training steps from the first on, with their evaluations and checkpoints."""
    for step in range(first, recipe.run.steps + 1):
        with log.step(step) as record:
            train_step(recipe, inputs, fleet, saver, record)
            if step % recipe.evaluation.every == 0 or step == recipe.run.steps:
                evaluate(recipe, inputs, fleet, record)
        saver.settle(step)


def begin(
    recipe: Recipe, inputs: Inputs, cluster: Cluster, log: RunLog, start: Snapshot | None
) -> tuple[Fleet, Saver]:
    """Everything that comes before the first step: of the run, or after a checkpoint."""
    with log.start(is_new=start is None) as record:
        with record.phase("start"):
            fleet = Fleet(cluster, recipe, log.say)
        saver = Saver(recipe, fleet, inputs.prompts, log.folder, log.say)
        if start:
            resume.go_on(start, fleet, inputs.prompts)
        publish(fleet, record)  # engines start empty: every weight they ever have comes through the reshard
        if not start:
            evaluate(recipe, inputs, fleet, record)
    if recipe.warm_start.steps and not start:
        warm_start(recipe, inputs, fleet, saver, log)
    return fleet, saver


def train_step(recipe: Recipe, inputs: Inputs, fleet: Fleet, saver: Saver, record: Record) -> None:
    """Rollout -> reward -> advantage -> train -> reshard; every phase waits for the one before (synchronous)."""
    rules = rules_of(recipe.algorithm.name, recipe.algorithm)

    sampled: list[GroupSummary] = []

    def sample(prompts: Sequence[Prompt], number: int) -> Rollout:
        found = fleet.engines.sample(prompts, sampling_of(recipe, record.step, number))
        sampled.extend(found.summaries)
        return found

    with record.phase("rollout"):
        groups, fleet.carried, done = collect(recipe, rules, inputs.prompts.take, sample, fleet.carried)
    record.add(done)
    groups = score(fleet, groups, record)
    learn(recipe, fleet.trainers, fleet.critic, groups, record, fleet.memory.lend, fleet.version)
    record.add({"reward/failed": failed_share(sampled)})  # also of groups that the step does not train on
    record.failed(sampled)
    with record.phase("save"):
        saver.begin(record.step)
    publish(fleet, record)
    record.add(fleet.trainers.take_speed())


def score(fleet: Fleet, groups: Rollout, record: Record) -> Rollout:
    """With the reward model's word, where there is one."""
    if fleet.reward_model is None:
        return groups
    with record.phase("score"):
        fleet.memory.lend("score")
        return fleet.reward_model.score(groups)


def learn(
    recipe: Recipe,
    trainers: TrainingRanks,
    critic: CriticRanks | None,
    groups: Rollout,
    record: Record,
    lend: Callable[[Phase], None],
    version: int = -1,
) -> None:
    """The updates of one step: the critic values its samples, then learns from what came of them, as the policy does.

    lend: gives the memory to who is next. version: of the policy; samples of earlier ones are stale.
    """
    name = recipe.algorithm.name
    rules = rules_of(name, recipe.algorithm)
    groups = shaped(groups, rules, recipe.rollout.max_response_tokens)
    samples = samples_of(groups.summaries, name, only_finished=rules.overlong_filter, version=version)
    if not samples:
        mend = "raise it, or set algorithm.overlong_filter to false"
        raise UserFault("rollout.max_response_tokens", "every response of the step was cut", mend)
    if critic:
        with record.phase("critic"):
            lend("critic")
            critic.values(samples, groups.refs, trainers.plan_of(name, samples))
            train = critic.recipe.train
            record.add(critic_metrics(critic.train(warmed_up(train.lr, train.warmup_steps, record.step))))
    record.add(rollout_metrics(groups.summaries))
    record.samples(groups.summaries)
    before = rules.critic_warmup_steps if critic else 0
    if record.step <= before:
        return
    with record.phase("train"):
        lend("train")
        lr = warmed_up(recipe.train.lr, recipe.train.warmup_steps, record.step - before)
        metrics = trainers.train(name, samples, groups.refs, lr, critic)
    record.add(train_metrics(metrics))


def publish(fleet: Fleet, record: Record) -> None:
    """Trained weights into the engines, which then hold the GPUs' memory again."""
    with record.phase("reshard"):
        moved = fleet.publish()
    record.add({f"reshard/{name}": value for name, value in asdict(moved).items()})
    record.add({"reshard/version": fleet.version, "reshard/attempts": fleet.attempts})
    record.add(fleet.memory.readings())


def evaluate(recipe: Recipe, inputs: Inputs, fleet: Fleet, record: Record) -> None:
    """One greedy answer to each prompt of every evaluation set."""
    greedy = Sampling(1, recipe.rollout.max_response_tokens, temperature=0.0)
    with record.phase("eval"):
        answered = {name: fleet.engines.sample(prompts, greedy) for name, prompts in inputs.eval_sets.items()}
    for name, groups in answered.items():
        record.failed(groups.summaries)
        if not any(len(group.rewards_G) for group in groups.summaries):
            problem = f"every verdict of data.eval.{name} failed, the first: {groups.summaries[0].failures[0]}"
            raise UserFault("reward.function", problem, MEND)
    record.add(eval_metrics({name: groups.summaries for name, groups in answered.items()}))


def warm_start(recipe: Recipe, inputs: Inputs, fleet: Fleet, saver: Saver, log: RunLog) -> None:
    """Supervised steps on the training answers; the engines get the weights once, after the last."""
    warm = recipe.warm_start
    fleet.memory.lend("train")
    for step in range(1, warm.steps + 1):
        with log.warm_step(step) as record:
            with record.phase("train"):
                prompts = inputs.prompts.take(warm.sequences_per_step)
                groups = [demonstration(prompt, inputs.tokenizer) for prompt in prompts]
                samples = samples_of([summary(group) for group in groups], "sft")
                lr = warmed_up(warm.lr, warm.warmup_steps, step)
                metrics = fleet.trainers.train("sft", samples, fleet.put(groups), lr)
            record.add(train_metrics(metrics))
            if step == warm.steps:
                saver.begin(0)
                publish(fleet, record)
                evaluate(recipe, inputs, fleet, record)
    saver.settle(0)


def sampling_of(recipe: Recipe, step: int, number: int = 0) -> Sampling:
    """How the responses of a training step's round, counted from 0, are sampled."""
    rollout = recipe.rollout
    return Sampling(
        rollout.samples_per_prompt,
        rollout.max_response_tokens,
        rollout.temperature,
        rollout.top_p,
        stream=(recipe.run.seed, step, number) if number else (recipe.run.seed, step),
    )


def samples_of(
    groups: Sequence[GroupSummary], algorithm: str, *, only_finished: bool = False, version: int = -1
) -> list[SampleRef]:
    """Every sample of every group with its advantage, or those alone that were not cut; version: the policy's."""
    samples = []
    for index, group in enumerate(groups):
        advantage_G = ALGORITHMS[algorithm].advantage(torch.tensor(group.rewards_G))
        for sample, (length, advantage) in enumerate(zip(group.response_lengths_G, advantage_G, strict=True)):
            response = int(length)
            if only_finished and not group.finished_G[sample]:
                continue
            is_correct = bool(group.correct_G[sample])
            length = group.prompt_length + response
            is_stale = group.version < version
            samples.append(SampleRef(index, sample, length, response, float(advantage), is_correct, is_stale))
    return samples


def warmed_up(lr: float, warmup_steps: int, step: int) -> float:
    """Linear warm-up over the first steps, counted from 1; constant afterwards."""
    return lr * min(1.0, step / max(1, warmup_steps))
