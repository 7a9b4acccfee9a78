"""From a prompt to a group of scored samples: an engine, the reward functions, and a summary for the controller."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.config import Recipe, RewardConfig
from megarl.device import DEVICE
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.runtimes import AgentRuntime, EnvironmentRuntime, Runner, episode_runtime
from megarl.episodes.transcript import failed_calls
from megarl.rollout.engine_settings import engine_settings
from megarl.rollout.external.engine import ExternalEngine
from megarl.rollout.external.server_checks import WantedServer
from megarl.rollout.external.weight_files import WeightFiles
from megarl.rollout.load_balancing import Capacity, CompletedSample
from megarl.rollout.reward_workers.by_source import RewardWorkers
from megarl.rollout.rewards import WHERE, describe_failure
from megarl.rollout.sglang.arguments import NodeSpan
from megarl.rollout.sglang.engine import Engine, Schedulers
from megarl.samples.buffer import PartialGroup, PartialSummary
from megarl.samples.summaries import partial_summary, summary
from megarl.timeline.recorder import concurrent, concurrent_call
from megarl.types import GroupSummary, Prompt, Sample, SampleGroup, UserError
from megarl.types.conditions import WorkLoad
from megarl.types.reward_result import REWARD_HINT, Failure, RewardResult
from megarl.types.sampling import Sampling
from megarl.types.worker_faults import WorkerFaults


@dataclass(frozen=True)
class Generated:
    """The samples of a prompt.

    verdicts: of each sample the one that is known, of an earlier phase or of an environment; None: not yet.
    refused_fields: how often agents were refused each field of their requests.
    """

    samples: Sequence[Sample]
    reward_results: Sequence[RewardResult | Failure | None]
    refused_fields: Mapping[str, int] = field(default_factory=dict)


class RolloutWorker:
    """The process of one engine, which samples and scores. The engine has no weights before the first reshard.

    Or the process that stands for an external engine.
    """

    def __init__(
        self, recipe: Recipe, index: int, span: NodeSpan | None = None, wait_s: float = 0.0
    ) -> None:
        """span: the engine's first node, where the engine spans several. wait_s: before an external engine is asked."""
        self._reward = recipe.reward
        self._num_transcripts = recipe.samples_logged_of_a_group
        self._reward_workers = RewardWorkers(recipe.reward, recipe.run.timeout_s)
        self._runtime: EnvironmentRuntime | AgentRuntime | None = None
        try:
            self._runtime = episode_runtime(recipe)
            self._engine = _new_engine(recipe, index, span, wait_s)
        except BaseException:
            self._shut_down_workers()
            raise
        try:
            self._episodes = self._runtime.runner(self._engine) if self._runtime else None
        except BaseException:
            self.shutdown()
            raise
        gc.collect()
        # later collections pass over what was imported, which takes a third of a second each time
        gc.freeze()

    async def sample(
        self, prompt: Prompt, sampling: Sampling, begun: PartialGroup | None = None
    ) -> tuple[GroupSummary, SampleGroup] | tuple[PartialSummary, PartialGroup]:
        """Sample one group, or continue its open samples (`begun`), and score the samples that have ended.

        Raises EngineError; UserError(reward.function) when every verdict has failed, unless sampling.may_lose_all, or
        with reward.on_failure "stop" when any has.
        """
        with concurrent("groups", f"prompt {prompt.id}"):
            return await self._sampled(prompt, sampling, begun)

    async def _sampled(
        self, prompt: Prompt, sampling: Sampling, begun: PartialGroup | None
    ) -> tuple[GroupSummary, SampleGroup] | tuple[PartialSummary, PartialGroup]:
        generated = await self._generate(prompt, sampling, begun)
        samples = generated.samples
        reward_results = list(generated.reward_results)
        ended = [
            place
            for place, sample in enumerate(samples)
            if reward_results[place] is None and not sample.is_open
        ]
        ended_samples = [samples[place] for place in ended]
        new = await self._judged(prompt, ended_samples)
        for place, reward_result in zip(ended, new, strict=True):
            reward_results[place] = reward_result
        if self._reward.on_failure == "stop":  # at once, not when the group is complete
            scored(prompt, ended_samples, new, self._reward, may_lose_all=True)
        known = [reward_result for reward_result in reward_results if reward_result is not None]
        if len(known) == len(samples):
            short, whole = scored(
                prompt, samples, known, self._reward, may_lose_all=sampling.may_lose_all
            )
            transcripts = short.transcripts[: self._num_transcripts]
            return replace(
                short,
                transcripts=transcripts,
                refused_fields=generated.refused_fields,
                faults=self._take_faults(),
                reward_worker_s=self._reward_workers.take_worked_s(),
            ), whole
        group = PartialGroup(prompt, tuple(samples), tuple(reward_results))
        return partial_summary(group), group

    async def _judged(
        self, prompt: Prompt, samples: Sequence[Sample]
    ) -> Sequence[RewardResult | Failure]:
        """The verdicts of the reward functions; without any, an environment or an agent was to give them."""
        if not (self._reward.function or self._reward.by_source):
            author = "agent" if isinstance(self._runtime, AgentRuntime) else "environment"
            return [
                Failure(f"the {author} gave no reward (its episode ended as {sample.facts.end})")
                for sample in samples
                if sample.facts
            ]
        episodes = [sample.episode for sample in samples]
        return await self._reward_workers.reward_results(
            prompt.answer, prompt.row, [sample.text for sample in samples], episodes
        )

    def _take_faults(self) -> dict[str, WorkerFaults]:
        """What went wrong in the worker processes since the last group, by the room of its metrics."""
        faults = {"reward": self._reward_workers.take_faults()}
        if self._runtime:
            faults["episode"] = self._runtime.take_faults()
        return {room: of_room for room, of_room in faults.items() if of_room}

    def capacity(self) -> Capacity:
        """What the engine can run at once."""
        return self._engine.capacity

    async def take_completed(self) -> list[CompletedSample]:
        """The samples that the engine has finished since the last call, before their verdicts; waits for the first."""
        return await self._engine.take_completed()

    def take_expert_load(self) -> npt.NDArray[np.int64]:
        """How many tokens chose each expert since the last call, [layers, experts]; empty where routes are unknown."""
        return self._engine.expert_load.take()

    async def _generate(
        self, prompt: Prompt, sampling: Sampling, begun: PartialGroup | None
    ) -> Generated:
        if self._episodes:
            return await self._play(self._episodes, prompt, sampling, begun)
        if begun:
            return Generated(
                await self._engine.generate(prompt.token_ids, sampling, begun.samples),
                begun.reward_results,
            )
        ways = [sampling]
        if sampling.with_baseline:
            ways.append(replace(sampling, num_samples=1, temperature=0.0))
        drawn, *greedy = await asyncio.gather(
            *(self._engine.generate(prompt.token_ids, way) for way in ways)
        )
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
        played = await asyncio.gather(
            *(episodes.run(prompt, way, place) for place, way in enumerate(ways))
        )
        samples = [episode.sample for episode in played]
        if sampling.with_baseline:
            samples[-1] = replace(samples[-1], is_baseline=True)
        refused: Counter[str] = Counter()
        for episode in played:
            refused.update(episode.refused_fields)
        return Generated(samples, [episode.reward_result for episode in played], dict(refused))

    @concurrent_call
    async def reshard(self, message: Mapping[str, Any], version: int) -> None:
        await self._own_engine.reshard(message, version)

    @concurrent_call
    async def take_files(self, weights: WeightFiles) -> None:
        """Have an external engine load weights; raises EngineError where it does not."""
        await self._external_engine.take_files(weights)

    async def weights_checksum(self) -> str:
        """Of an external engine: equal for equal weights in one layout; "" where it cannot compute it."""
        return await self._external_engine.weights_checksum()

    @property
    def _own_engine(self) -> Engine:
        engine = self._engine
        assert not isinstance(engine, ExternalEngine), "it is no member of an exchange"
        return engine

    @property
    def _external_engine(self) -> ExternalEngine:
        assert isinstance(self._engine, ExternalEngine)
        return self._engine

    @concurrent_call
    async def forget_ranks(self) -> None:
        """Unmap the parameters of training ranks that are gone; raises EngineError where that fails."""
        await self._own_engine.forget_ranks()

    async def record_layers(
        self, folder: Path, sequences: Sequence[Sequence[int]], num_terms: int = 1
    ) -> list[list[float]]:
        """Have the engine's ranks write what their layers give for these tokens; as of `Engine`."""
        return await self._own_engine.record_layers(folder, sequences, num_terms)

    @concurrent_call
    async def send_copy(self, message: Mapping[str, Any]) -> None:
        """Send the weights to a new engine while this one samples; message: a source's of `copy_messages`.

        Raises EngineError where the copy fails, which changes nothing in this engine.
        """
        await self._own_engine.send_copy(message)

    @concurrent_call
    async def receive_copy(self, message: Mapping[str, Any], version: int) -> None:
        """Take the weights of engines that sample; message: the target's of `copy_messages`. Raises as `reshard`."""
        await self._own_engine.receive_copy(message, version)

    async def fail(self) -> None:
        """Raises EngineLost with the cause when a process of the engine has died or hangs; does not return."""
        await self._engine.fail()

    @concurrent_call
    async def release_memory(self) -> None:
        await self._own_engine.release_memory()

    @concurrent_call
    async def resume_weights(self) -> None:
        await self._own_engine.resume_memory(["weights"])

    @concurrent_call
    async def resume_cache(self) -> None:
        await self._own_engine.resume_memory(["kv_cache"])

    def still_s(self) -> float:
        """For how long the engine has stood still in an exchange; whatever else it waits for has limits of its own."""
        # a GPU moves bytes without this node's processors
        if DEVICE == "cuda" or isinstance(self._engine, ExternalEngine):
            return 0.0
        return self._engine.exchange_still_s

    async def work_load(self) -> WorkLoad:
        """The requests that the engine has, and the jobs of users' functions."""
        jobs = await self._reward_workers.running()
        if self._runtime:
            jobs += await self._runtime.running()
        queue = self._engine.queue
        return WorkLoad(queue.num_placed, queue.num_waiting, tuple(jobs))

    def version(self) -> int:
        return self._engine.version

    def shutdown(self) -> None:
        self._shut_down_workers()
        self._engine.shutdown()

    def _shut_down_workers(self) -> None:
        self._reward_workers.shutdown()
        if self._runtime:
            self._runtime.shutdown()


def _new_engine(
    recipe: Recipe, index: int, span: NodeSpan | None, wait_s: float
) -> Engine | ExternalEngine:
    settings = engine_settings(recipe, index, span)
    if not recipe.rollout.engine.external:
        return Engine(settings)
    key_variable = recipe.rollout.engine.external_key_env
    return ExternalEngine(settings, WantedServer.of(recipe), key_variable, wait_s)


class EnginePart(Schedulers):
    """The schedulers of an engine on a node other than its first, where the RolloutWorker runs."""

    def __init__(self, recipe: Recipe, index: int, span: NodeSpan) -> None:
        super().__init__(engine_settings(recipe, index, span))


async def _continued(
    episodes: EpisodeRunner, prompt: Prompt, sampling: Sampling, begun: PartialGroup
) -> Generated:
    """The episodes of a group after a further phase of the open ones."""
    samples = list(begun.samples)
    reward_results = list(begun.reward_results)
    places = [place for place, sample in enumerate(samples) if sample.is_open]
    assigned = partial_summary(begun).context_tokens
    going = [episodes.run(prompt, sampling, place, samples[place], assigned) for place in places]
    for place, episode in zip(places, await asyncio.gather(*going), strict=True):
        samples[place] = episode.sample
        reward_results[place] = episode.reward_result
    return Generated(samples, reward_results)


def scored(
    prompt: Prompt,
    samples: Sequence[Sample],
    reward_results: Sequence[RewardResult | Failure],
    reward: RewardConfig,
    *,
    may_lose_all: bool = False,
) -> tuple[GroupSummary, SampleGroup]:
    """The group of samples with their verdicts; reward.on_failure decides about failed ones. Raises as `sample`."""
    kept: list[tuple[Sample, RewardResult]] = []
    failures: list[str] = []
    for sample, result in zip(samples, reward_results, strict=True):
        if isinstance(result, Failure):
            failures.append(describe_failure(result, sample.text, prompt.answer, prompt.id))
            # an episode whose environment failed at once has no tokens to train on
            if reward.on_failure != "penalise" or not sample.num_trained:
                continue
            result = RewardResult(reward.penalty, False)
        kept.append((sample, result))
    num_dropped = len(samples) - len(kept)
    is_lost = not may_lose_all and all(sample.is_baseline for sample, _ in kept)
    if num_dropped and (reward.on_failure == "stop" or is_lost):
        problem = failures[0]
        if reward.on_failure != "stop":
            problem += ", as did all of the group"
        where = WHERE if reward.function or reward.by_source else "episode"
        raise UserError(where, problem, f"{REWARD_HINT}, or see reward.on_failure")
    group = SampleGroup(
        prompt=prompt,
        samples=tuple(sample for sample, _ in kept),
        rewards_G=np.asarray([result.reward for _, result in kept], dtype=np.float32),
        correct_G=np.asarray([result.correct for _, result in kept], dtype=np.bool_),
        given_answers=tuple(
            sample.text.strip() if result.answer is None else result.answer
            for sample, result in kept
        ),
    )
    short = replace(
        summary(group, reward.source),
        failures=tuple(failures),
        num_dropped=num_dropped,
        failed_calls=failed_calls(samples),
    )
    return short, group
