"""A prompt becomes a group of scored samples: an engine, a reward, and what the controller is told of both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.rollout.arguments import EngineSettings, Sampling
from megarl.rollout.engine import Engine
from megarl.rollout.rewards import Verdict, judge, load_reward
from megarl.types import GroupSummary, Prompt, Sample, SampleGroup

__all__ = ["RolloutWorker", "Sampling", "demonstration", "engine_settings", "summary"]


def engine_settings(recipe: Recipe, index: int) -> EngineSettings:
    """Engine `index` of a run: its slots, its share of a step's samples, and a seed of its own."""
    rollout, engine = recipe.rollout, recipe.rollout.engine
    return EngineSettings(
        model_path=recipe.model.path,
        tp=engine.tp,
        ep=engine.ep,
        dtype=recipe.model.dtype,
        seed=recipe.run.seed + index,
        context_tokens=recipe.data.max_prompt_tokens + recipe.longest_response,
        concurrency=math.ceil(rollout.prompts_per_step / engine.count) * rollout.samples_per_prompt,
        first_gpu=recipe.placement.first_engine_gpu + index * engine.tp,
        load_weights=False,
        sglang=engine.sglang,
        dp=engine.dp,
        fp8=engine.fp8,
        seeded=rollout.seeded,
        routed_experts=recipe.train.replay == "r3",
    )


class RolloutWorker:
    """One engine's process: samples and scores. Its engine has no weights before the first reshard."""

    def __init__(self, recipe: Recipe, index: int) -> None:
        self._reward = load_reward(recipe.reward.function)
        self._engine = Engine(engine_settings(recipe, index))

    async def sample(self, prompt: Prompt, sampling: Sampling) -> tuple[GroupSummary, SampleGroup]:
        """A scored group. Raises UserFault(reward.function) and EngineFault."""
        samples = await self._generate(prompt.token_ids, sampling)
        verdicts = await asyncio.to_thread(self._judge, prompt, samples)  # a slow reward holds up no other prompt
        group = SampleGroup(
            prompt=prompt,
            samples=tuple(samples),
            rewards_G=np.asarray([verdict.reward for verdict in verdicts], dtype=np.float32),
            correct_G=np.asarray([verdict.correct for verdict in verdicts], dtype=np.bool_),
        )
        return summary(group), group

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Sample]:
        calls = [self._engine.generate(prompt_ids, sampling)]
        if sampling.with_baseline:
            calls.append(self._engine.generate(prompt_ids, replace(sampling, num_samples=1, temperature=0.0)))
        drawn, *greedy = await asyncio.gather(*calls)
        return drawn + [replace(one, is_baseline=True) for (one,) in greedy]

    async def reshard(self, message: Mapping[str, Any], version: int) -> None:
        await self._engine.reshard(message, version)

    async def check(self) -> None:
        """Raises EngineFault with what killed one of the engine's processes, if any is gone."""
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
        self._engine.shutdown()

    def _judge(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        return [judge(self._reward, sample.text, prompt.answer, prompt.row) for sample in samples]


def summary(group: SampleGroup) -> GroupSummary:
    """What the controller keeps of a group."""
    samples = group.samples
    return GroupSummary(
        prompt_text=group.prompt.text,
        answer=group.prompt.answer,
        responses=tuple(sample.text for sample in samples),
        prompt_length=len(group.prompt.token_ids),
        response_lengths_G=np.asarray([len(sample.response_ids_T) for sample in samples], dtype=np.int64),
        finished_G=np.asarray([sample.finished for sample in samples], dtype=np.bool_),
        rewards_G=group.rewards_G,
        correct_G=group.correct_G,
        version=samples[0].version,
        said=group.said,
        baseline=next((index for index, sample in enumerate(samples) if sample.is_baseline), None),
    )


def demonstration(prompt: Prompt, tokenizer: Any) -> SampleGroup:
    """The prompt's own answer as a group of one, for supervised steps: nobody sampled it, so its logprobs are 0."""
    token_ids = [*tokenizer(prompt.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    sample = Sample(
        response_ids_T=np.asarray(token_ids, dtype=np.int64),
        engine_logp_T=np.zeros(len(token_ids), dtype=np.float32),
        text=prompt.answer,
        finished=True,
        version=0,
    )
    return SampleGroup(prompt, (sample,), np.ones(1, dtype=np.float32), np.ones(1, dtype=np.bool_))
