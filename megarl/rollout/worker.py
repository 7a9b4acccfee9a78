"""From a prompt to a group of scored samples: an engine, the reward functions, and a summary for the controller."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.config import Recipe, RewardConfig
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.runtimes import AgentRuntime, EnvironmentRuntime, Runner, episode_runtime
from megarl.episodes.transcript import failed_calls
from megarl.rollout.engine_settings import engine_settings
from megarl.rollout.load_balancing import Capacity, CompletedSample
from megarl.rollout.reward_workers.by_source import Scorers
from megarl.rollout.rewards import WHERE, describe_failure
from megarl.rollout.sglang.arguments import NodeSpan
from megarl.rollout.sglang.engine import Engine, Schedulers
from megarl.samples.buffer import PartialGroup, PartialSummary
from megarl.samples.summaries import partial_summary, summary
from megarl.types import GroupSummary, Prompt, Sample, SampleGroup, UserError
from megarl.types.reward_result import HINT, Failure, Verdict
from megarl.types.sampling import Sampling


@dataclass(frozen=True)
class Generated:
    """The samples of a prompt.

    verdicts: of each sample the one that is known, of an earlier phase or of an environment; None: not yet.
    refused_fields: how often agents were refused each field of their requests.
    """

    samples: Sequence[Sample]
    verdicts: Sequence[Verdict | Failure | None]
    refused_fields: Mapping[str, int] = field(default_factory=dict)


class RolloutWorker:
    """The process of one engine, which samples and scores. The engine has no weights before the first reshard."""

    def __init__(self, recipe: Recipe, index: int, span: NodeSpan | None = None) -> None:
        """span: the engine's first node, where the engine spans several."""
        self._reward = recipe.reward
        self._rewarding = "agent" if recipe.episode and recipe.episode.agent else "environment"
        self._num_transcripts = -(-recipe.run.sample_log_count // recipe.rollout.prompts_per_step)
        self._scorers = Scorers(recipe.reward, recipe.run.timeout_s)
        self._runtime: EnvironmentRuntime | AgentRuntime | None = None
        try:
            self._runtime = episode_runtime(recipe)
            self._engine = Engine(engine_settings(recipe, index, span))
        except BaseException:
            self._shut_down_workers()
            raise
        try:
            self._episodes = self._runtime.runner(self._engine) if self._runtime else None
        except BaseException:
            self.shutdown()
            raise
        gc.collect()
        gc.freeze()  # later collections pass over what was imported, which takes a third of a second each time

    async def sample(
        self, prompt: Prompt, sampling: Sampling, begun: PartialGroup | None = None
    ) -> tuple[GroupSummary, SampleGroup] | tuple[PartialSummary, PartialGroup]:
        """Sample one group, or continue its open samples (`begun`), and score the samples that have ended.

        Raises EngineError; UserError(reward.function) when every verdict has failed, unless sampling.may_lose_all, or
        with reward.on_failure "stop" when any has.
        """
        generated = await self._generate(prompt, sampling, begun)
        samples, verdicts = generated.samples, list(generated.verdicts)
        ended = [place for place, sample in enumerate(samples) if verdicts[place] is None and not sample.is_open]
        new = await self._judged(prompt, [samples[place] for place in ended])
        for place, verdict in zip(ended, new, strict=True):
            verdicts[place] = verdict
        if self._reward.on_failure == "stop":  # at once, not when the group is complete
            scored(prompt, [samples[place] for place in ended], new, self._reward, may_lose_all=True)
        known = [verdict for verdict in verdicts if verdict is not None]
        if len(known) == len(samples):
            short, whole = scored(prompt, samples, known, self._reward, may_lose_all=sampling.may_lose_all)
            transcripts = short.transcripts[: self._num_transcripts]
            return replace(short, transcripts=transcripts, refused_fields=generated.refused_fields), whole
        group = PartialGroup(prompt, tuple(samples), tuple(verdicts))
        return partial_summary(group), group

    async def _judged(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Verdict | Failure]:
        """The verdicts of the reward functions; without any, an environment or an agent was to give them."""
        if not (self._reward.function or self._reward.by_source):
            ends = [sample.facts.end for sample in samples if sample.facts]
            return [Failure(f"the {self._rewarding} gave no reward (its episode ended as {end})") for end in ends]
        episodes = [sample.episode for sample in samples]
        return await self._scorers.verdicts(prompt.answer, prompt.row, [sample.text for sample in samples], episodes)

    def capacity(self) -> Capacity:
        """What the engine can run at once."""
        return self._engine.capacity

    async def take_completed(self) -> list[CompletedSample]:
        """The samples that the engine has finished since the last call, before their verdicts; waits for the first."""
        return await self._engine.take_completed()

    async def _generate(self, prompt: Prompt, sampling: Sampling, begun: PartialGroup | None) -> Generated:
        if self._episodes:
            return await self._play(self._episodes, prompt, sampling, begun)
        if begun:
            return Generated(await self._engine.generate(prompt.token_ids, sampling, begun.samples), begun.verdicts)
        calls = [self._engine.generate(prompt.token_ids, sampling)]
        if sampling.with_baseline:
            calls.append(self._engine.generate(prompt.token_ids, replace(sampling, num_samples=1, temperature=0.0)))
        drawn, *greedy = await asyncio.gather(*calls)
        samples = drawn + [replace(sample, is_baseline=True) for (sample,) in greedy]
        return Generated(samples, [None] * len(samples))

    async def _play(
        self, episodes: Runner, prompt: Prompt, sampling: Sampling, begun: PartialGroup | None
    ) -> Generated:
        if begun:
            assert isinstance(episodes, EpisodeRunner), "agents have no phases"
            return await _continued(episodes, prompt, sampling, begun)
        ways = [sampling] * sampling.num_samples
        if sampling.with_baseline:
            ways.append(replace(sampling, temperature=0.0))
        played = await asyncio.gather(*(episodes.run(prompt, way, place) for place, way in enumerate(ways)))
        samples = [replace(one.sample, is_baseline=place == sampling.num_samples) for place, one in enumerate(played)]
        refused = sum((Counter(one.refused_fields) for one in played), Counter[str]())
        return Generated(samples, [one.verdict for one in played], dict(refused))

    async def reshard(self, message: Mapping[str, Any], version: int) -> None:
        await self._engine.reshard(message, version)

    async def check(self) -> None:
        """Raises EngineError with the cause when a process of the engine has died."""
        await self._engine.check()

    async def release_memory(self) -> None:
        await self._engine.release_memory()

    async def resume_weights(self) -> None:
        await self._engine.resume_memory(["weights"])

    async def resume_cache(self) -> None:
        await self._engine.resume_memory(["kv_cache"])

    def version(self) -> int:
        return self._engine.version

    def shutdown(self) -> None:
        self._shut_down_workers()
        self._engine.shutdown()

    def _shut_down_workers(self) -> None:
        self._scorers.shutdown()
        if self._runtime:
            self._runtime.shutdown()


class EnginePart(Schedulers):
    """The schedulers of an engine on a node other than its first, where the RolloutWorker runs."""

    def __init__(self, recipe: Recipe, index: int, span: NodeSpan) -> None:
        super().__init__(engine_settings(recipe, index, span))


async def _continued(episodes: EpisodeRunner, prompt: Prompt, sampling: Sampling, begun: PartialGroup) -> Generated:
    """The episodes of a group after a further phase of the open ones."""
    samples, verdicts = list(begun.samples), list(begun.verdicts)
    places, dealt = [place for place, one in enumerate(samples) if one.is_open], partial_summary(begun).context_tokens
    going = [episodes.run(prompt, sampling, place, samples[place], dealt) for place in places]
    for place, one in zip(places, await asyncio.gather(*going), strict=True):
        samples[place], verdicts[place] = one.sample, one.verdict
    return Generated(samples, verdicts)


def scored(
    prompt: Prompt,
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict | Failure],
    reward: RewardConfig,
    *,
    may_lose_all: bool = False,
) -> tuple[GroupSummary, SampleGroup]:
    """The group of samples with their verdicts; reward.on_failure decides about failed ones. Raises as `sample`."""
    pairs = list(zip(samples, verdicts, strict=True))
    failed = [(sample, verdict) for sample, verdict in pairs if isinstance(verdict, Failure)]
    failures = tuple(describe_failure(failure, sample.text, prompt.answer, prompt.id) for sample, failure in failed)
    if reward.on_failure == "penalise":  # an episode whose environment failed at once has no tokens to train on
        penalty = Verdict(reward.penalty, False)
        pairs = [
            (sample, penalty if isinstance(verdict, Failure) and len(sample.response_ids_T) else verdict)
            for sample, verdict in pairs
        ]
    kept = [(sample, verdict) for sample, verdict in pairs if isinstance(verdict, Verdict)]
    num_dropped = len(samples) - len(kept)
    is_lost = not may_lose_all and all(sample.is_baseline for sample, _ in kept)
    if num_dropped and (reward.on_failure == "stop" or is_lost):
        many = "" if reward.on_failure == "stop" else ", as did all of the group"
        where = WHERE if reward.function or reward.by_source else "episode"
        raise UserError(where, f"{failures[0]}{many}", f"{HINT}, or see reward.on_failure")
    group = SampleGroup(
        prompt=prompt,
        samples=tuple(sample for sample, _ in kept),
        rewards_G=np.asarray([verdict.reward for _, verdict in kept], dtype=np.float32),
        correct_G=np.asarray([verdict.correct for _, verdict in kept], dtype=np.bool_),
        given_answers=tuple(
            sample.text.strip() if verdict.answer is None else verdict.answer for sample, verdict in kept
        ),
    )
    facts = {"failures": failures, "num_dropped": num_dropped, "failed_calls": failed_calls(samples)}
    return replace(summary(group), **facts), group
