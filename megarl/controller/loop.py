"""The loop. It knows the order of the phases and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import torch

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.checkpoints.snapshots import Snapshot
from megarl.cluster.session import Cluster
from megarl.config import Recipe
from megarl.controller.dynamic_sampling import collect, shaped
from megarl.controller.saver import Saver, resume
from megarl.fleet.fleet import Fleet
from megarl.fleet.memory import Phase
from megarl.fleet.rank_groups import AuxiliaryRanks, RolloutBatch, TrainingRanks
from megarl.preflight.check import Inputs
from megarl.rollout.episodes import Sampling, demonstration, summary
from megarl.rollout.rewards import MEND
from megarl.tracking.metrics import critic_metrics, eval_metrics, failed_share, rollout_metrics, train_metrics
from megarl.tracking.run_log import Record, RunLog
from megarl.training.batching import SampleRef
from megarl.training.learning_rate import learning_rate
from megarl.types import EndedEarly, GroupSummary, Metrics, Prompt, UserFault

_EVAL_STREAMS = 1_000_000  # beyond the rounds of a step, whose samples have streams of their own


def train(recipe: Recipe, inputs: Inputs, log: RunLog, start: Snapshot | None = None) -> None:
    """Run a checked recipe, from a checkpoint on where one is given.

    Raises WorkerFailed when a process of the run fails, UserFault when the reward does, EndedEarly after a SIGUSR1.
    """
    with Cluster(recipe.placement.gpus, recipe.placement.node_gpus, recipe.run.timeout_s, log.say) as cluster:
        log.say("starting training ranks and engines")
        fleet, saver = begin(recipe, inputs, cluster, log, start)
        try:
            take_steps(recipe, inputs, fleet, saver, log, first=start.step + 1 if start else 1)
        except EndedEarly:
            fleet.shutdown()
            raise
        except Exception:
            with suppress(Exception):
                saver.rescue()  # a failure does not cost the checkpoint that was being written
            raise
        fleet.shutdown()


def take_steps(recipe: Recipe, inputs: Inputs, fleet: Fleet, saver: Saver, log: RunLog, first: int) -> None:
    """All training steps from the first on, with their evaluations and checkpoints."""
    for step in range(first, recipe.run.steps + 1):
        saver.leave_if_wanted()
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
        record.add(inputs.metrics)
        with record.phase("start"):
            fleet = Fleet(cluster, recipe, log.say)
        log.options(fleet.options())
        saver = Saver(recipe, fleet, inputs.prompts, log.folder, log.say)
        saver.leave_if_wanted()
        if start:
            resume(start, fleet, inputs.prompts)
        publish(fleet, record)  # engines start empty: every weight they ever have comes through the reshard
        if not start and recipe.evaluation.at_start:
            evaluate(recipe, inputs, fleet, record)
    if recipe.warm_start.steps and not start:
        warm_start(recipe, inputs, fleet, saver, log)
    return fleet, saver


def train_step(recipe: Recipe, inputs: Inputs, fleet: Fleet, saver: Saver, record: Record) -> None:
    """Rollout -> reward -> advantage -> train -> reshard; every phase waits for the one before (synchronous)."""
    groups = gather(recipe, inputs, fleet, record)
    speed = learn(recipe, fleet.trainers, fleet.critic, groups, record, fleet.memory.hand_over, fleet.version)
    with record.phase("save"):
        saver.begin(record.step)
    publish(fleet, record)
    record.add(speed)


def gather(recipe: Recipe, inputs: Inputs, fleet: Fleet, record: Record) -> RolloutBatch:
    """What a step learns from: scored samples, or demonstrations for algorithms that have no rewards."""
    rules = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
    if ALGORITHMS[recipe.algorithm.name].learns_from == "demonstrations":
        return demonstrations(inputs, fleet, recipe.rollout.prompts_per_step)

    sampled: list[GroupSummary] = []

    def sample(prompts: Sequence[Prompt], number: int) -> RolloutBatch:
        found = fleet.engines.sample(prompts, sampling_of(recipe, record.step, number))
        sampled.extend(found.summaries)
        return found

    with record.phase("rollout"):
        groups, fleet.carried, done = collect(recipe, rules, inputs.prompts.take, sample, fleet.carried)
    record.add(done)
    groups = shaped(score(fleet, groups, record), rules, recipe.rollout.max_response_tokens)
    record.add(rollout_metrics(groups.summaries))
    record.add({"reward/failed": failed_share(sampled)})  # also of groups that the step does not train on
    record.failed(sampled)
    record.samples(groups.summaries)
    return groups


def score(fleet: Fleet, groups: RolloutBatch, record: Record) -> RolloutBatch:
    """With the reward model's word, where there is one."""
    if fleet.reward_model is None:
        return groups
    with record.phase("score"):
        fleet.memory.hand_over("score")
        return fleet.reward_model.score(groups)


def learn(
    recipe: Recipe,
    trainers: TrainingRanks,
    critic: AuxiliaryRanks | None,
    groups: RolloutBatch,
    record: Record,
    hand_over: Callable[[Phase], None],
    version: int = -1,
) -> Metrics:
    """The updates of one step: the critic values its samples, then learns from what came of them, as the policy does.

    Returns the speed of the policy's updates, nothing where only the critic learns.

    lend: gives the memory to who is next. version: of the policy; samples of earlier ones are stale.
    """
    name = recipe.algorithm.name
    rules = hyperparameters_of(name, recipe.algorithm)
    samples = samples_of(groups.summaries, name, only_finished=rules.overlong_filter, version=version)
    if not samples and not any(group.finished_G.any() for group in groups.summaries):
        mend = "raise it, or set algorithm.overlong_filter to false"
        raise UserFault("rollout.max_response_tokens", "every response of the step was cut", mend)
    if not samples:
        raise UserFault("reward.function", "the verdict on every greedy sample of the step failed", MEND)
    before = rules.critic_warmup_steps if critic else 0
    observation = token_values = None
    if critic:
        if rules.pays_kl:
            with record.phase("observe"):
                hand_over("train")
                observation = trainers.observe(name, samples, groups.refs, critic.plan_of(samples))
        with record.phase("critic"):
            hand_over("critic")
            token_values = critic.values(samples, groups.refs, trainers.plan_of(name, samples))
            lr = learning_rate(critic.recipe.train, record.step, recipe.run.steps)
            record.add({"critic/lr": lr, **critic_metrics(critic.train(token_values, lr, observation))})
    if record.step <= before:
        return {}
    with record.phase("train"):
        hand_over("train")
        lr = learning_rate(recipe.train, record.step - before, recipe.run.steps - before)
        trained = trainers.train(name, samples, groups.refs, lr, token_values=token_values, observation=observation)
    record.add({"train/lr": lr, **train_metrics(trained.updates)})
    return trained.speed


def publish(fleet: Fleet, record: Record) -> None:
    """Trained weights into the engines, which then hold the GPUs' memory again."""
    with record.phase("reshard"):
        moved = fleet.publish()
    record.add({f"reshard/{name}": value for name, value in asdict(moved).items()})
    record.add({"reshard/version": fleet.version, "reshard/attempts": fleet.attempts})
    record.add(fleet.memory.readings())


def evaluate(recipe: Recipe, inputs: Inputs, fleet: Fleet, record: Record) -> None:
    """Answers to the prompts of every evaluation set, each sampled and judged in its own way."""
    with record.phase("eval"):
        answered = {
            name: fleet.engines.sample(prompts, eval_sampling(recipe, name, record.step, number)).summaries
            for number, (name, prompts) in enumerate(inputs.eval_sets.items())
        }
    for name, groups in answered.items():
        record.failed(groups)
        if not any(len(group.rewards_G) for group in groups):
            problem = f"every verdict of data.eval.{name} failed, the first: {groups[0].failures[0]}"
            raise UserFault("reward.function", problem, MEND)
    record.add(eval_metrics(answered))


def warm_start(recipe: Recipe, inputs: Inputs, fleet: Fleet, saver: Saver, log: RunLog) -> None:
    """Supervised steps on the training answers; the engines get the weights once, after the last."""
    warm = recipe.warm_start
    fleet.memory.hand_over("train")
    for step in range(1, warm.steps + 1):
        saver.leave_if_wanted()
        with log.warm_step(step) as record:
            with record.phase("train"):
                groups = demonstrations(inputs, fleet, warm.sequences_per_step)
                lr = warm.lr * min(1.0, step / max(1, warm.warmup_steps))
                trained = fleet.trainers.train("sft", samples_of(groups.summaries, "sft"), groups.refs, lr)
            record.add(train_metrics(trained.updates))
            if step == warm.steps:
                saver.begin(0)
                publish(fleet, record)
                evaluate(recipe, inputs, fleet, record)
    saver.settle(0)


def demonstrations(inputs: Inputs, fleet: Fleet, count: int) -> RolloutBatch:
    """The next prompts' own answers in the place of samples."""
    groups = [demonstration(prompt, inputs.tokenizer) for prompt in inputs.prompts.take(count)]
    return RolloutBatch([summary(group) for group in groups], fleet.put(groups))


def sampling_of(recipe: Recipe, step: int, number: int = 0) -> Sampling:
    """How the responses of a training step's round, counted from 0, are sampled."""
    rollout = recipe.rollout
    return Sampling(
        rollout.samples_per_prompt,
        rollout.max_response_tokens,
        rollout.temperature,
        rollout.top_p,
        stream=(recipe.run.seed, step, number) if number else (recipe.run.seed, step),
        with_baseline=ALGORITHMS[recipe.algorithm.name].greedy_baseline,
    )


def eval_sampling(recipe: Recipe, name: str, step: int, number: int) -> Sampling:
    """How the answers to an evaluation set, number `number` of them, are sampled."""
    own = recipe.evaluation.of(name)
    longest = own.max_response_tokens or recipe.rollout.max_response_tokens
    stream = (recipe.run.seed, step, _EVAL_STREAMS + number)
    return Sampling(own.samples, longest, own.temperature, own.top_p, stream=stream, may_lose_all=True)


def samples_of(
    groups: Sequence[GroupSummary], algorithm: str, *, only_finished: bool = False, version: int = -1
) -> list[SampleRef]:
    """Every drawn sample with its advantage, or those alone that were not cut; version: the policy's.

    Where the algorithm compares with a greedy sample, groups without one are left out.
    """
    samples, row = [], ALGORITHMS[algorithm]
    for index, group in enumerate(groups):
        rewards_G = torch.tensor(group.rewards_G)
        if row.greedy_baseline:
            if group.baseline is None:
                continue
            rewards_G = rewards_G - rewards_G[group.baseline]
        drawn = np.flatnonzero(group.drawn_G)
        for sample, advantage in zip(drawn.tolist(), row.sample_advantages(rewards_G[drawn]), strict=True):
            if only_finished and not group.finished_G[sample]:
                continue
            is_correct, response = bool(group.correct_G[sample]), int(group.response_lengths_G[sample])
            length, is_stale = group.prompt_length + response, group.version < version
            own = {"reward": float(group.rewards_G[sample]), "advantage": advantage}
            samples.append(
                SampleRef(index, sample, length, response, **own, is_correct=is_correct, is_stale=is_stale)
            )
    return samples
