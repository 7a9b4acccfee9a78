"""How a step's responses are sampled, and what of them is trained on, with which advantage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megarl.algos import ALGORITHMS
from megarl.config import Recipe
from megarl.rollout.episodes import Sampling
from megarl.rollout.rewards import MEND
from megarl.training.batching import SampleRef
from megarl.types import GroupSummary, UserFault


def sampling_of(recipe: Recipe, step: int, number: int = 0) -> Sampling:
    """How the responses of a training step are sampled in round `number`, from 0, of dynamic sampling."""
    rollout = recipe.rollout
    return Sampling(
        rollout.samples_per_prompt,
        rollout.max_response_tokens,
        rollout.temperature,
        rollout.top_p,
        stream=(recipe.run.seed, step, number) if number else (recipe.run.seed, step),
        with_baseline=ALGORITHMS[recipe.algorithm.name].greedy_baseline,
    )


def samples_of(
    groups: Sequence[GroupSummary], algorithm: str, *, only_finished: bool = False, version: int = -1
) -> list[SampleRef]:
    """Every drawn sample with its advantage. version: of the policy; samples of earlier versions are stale.

    only_finished: without responses that were cut. Where the algorithm compares with a greedy sample, groups without a
    greedy sample are left out.
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


def refuse_empty(samples: Sequence[SampleRef], groups: Sequence[GroupSummary]) -> None:
    """Raises UserFault where a step has no sample to train on."""
    if samples:
        return
    if not any(group.finished_G.any() for group in groups):
        mend = "raise it, or set algorithm.overlong_filter to false"
        raise UserFault("rollout.max_response_tokens", "every response of the step was cut", mend)
    raise UserFault("reward.function", "the verdict on every greedy sample of the step failed", MEND)
