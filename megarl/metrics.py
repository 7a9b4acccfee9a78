"""One flat `room/name` record: what ranks and engines say of a step, as means and shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from megarl.types import GroupSummary, Metrics

_MEANS = ("loss", "grad_norm", "aux_loss", "z_loss", "mtp_loss")
_REPLAY = ("replay_gap", "replay_gap_without", "replay_gap_tokens", "differing_choices", "replayed_choices")
_NOT_PER_TOKEN = ("tokens", "gap", "gap_max", "mismatch_weight_square", *_REPLAY)


def rollout_metrics(groups: Sequence[GroupSummary]) -> Metrics:
    """Means over all samples of a step; `truncated` is the share that was cut at the length limit."""
    rewards = np.concatenate([group.rewards_G for group in groups])
    lengths = np.concatenate([group.response_lengths_G for group in groups])
    finished = np.concatenate([group.finished_G for group in groups])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/accuracy": float(np.concatenate([group.correct_G for group in groups]).mean()),
        "reward/failed": failed_share(groups),
        "rollout/samples": float(len(rewards)),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated": float(1.0 - finished.mean()),
    }


def failed_share(groups: Sequence[GroupSummary]) -> float:
    """Of all samples, those whose verdict failed, in the groups or dropped from them."""
    asked = sum(len(group.rewards_G) + group.num_dropped for group in groups)
    return sum(len(group.failures) for group in groups) / max(asked, 1)


def train_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Statistics of a step's updates as means; `gap` is |engine - trainer| logprob.

    Losses and the gradient norm are means over the updates, everything else is a sum over masked tokens. With several
    updates those three and the tokens are also there of each, as `train/loss/1`...
    """
    stats = _over_updates(updates)
    tokens = stats["tokens"]
    metrics = {f"train/{name}": stats[name] for name in (*_MEANS, "tokens") if name in stats}
    if "gap" in stats:
        metrics["rollout/logprob_gap_mean"] = stats["gap"] / tokens
        metrics["rollout/logprob_gap_max"] = stats["gap_max"]
    if "replayed_choices" in stats:
        metrics["replay/differing_share"] = stats.get("differing_choices", 0.0) / stats["replayed_choices"]
    if stats.get("replay_gap_tokens"):
        metrics["replay/logprob_gap"] = stats["replay_gap"] / stats["replay_gap_tokens"]
        metrics["replay/logprob_gap_without"] = stats["replay_gap_without"] / stats["replay_gap_tokens"]
    if "mismatch_weight" in stats:  # effective sample size, as a share of the tokens (Kish, 1965)
        metrics["train/mismatch_ess"] = stats["mismatch_weight"] ** 2 / max(
            tokens * stats["mismatch_weight_square"], 1e-30
        )
    sums = stats.keys() - {*_MEANS, *_NOT_PER_TOKEN}
    metrics |= {f"train/{name}": stats[name] / tokens for name in sorted(sums)}
    if len(updates) > 1:
        each = [(name, number) for name in ("loss", "grad_norm", "tokens") for number in range(1, len(updates) + 1)]
        metrics |= {f"train/{name}/{number}": updates[number - 1][name] for name, number in each}
    return metrics


def critic_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Of a critic's updates, by `value_loss`'s sums; what is explained is by the values before the step.

    Explained variance: 1 - Var(return - value) / Var(return); 0 where all returns are the same.
    """
    stats = _over_updates(updates)
    tokens = stats["tokens"]
    means = {name: stats[name] / tokens for name in ("return", "return_square", "error", "error_square")}
    variance = means["return_square"] - means["return"] ** 2
    unexplained = means["error_square"] - means["error"] ** 2
    return {
        "critic/loss": stats["loss"],
        "critic/grad_norm": stats["grad_norm"],
        "critic/value_mean": stats["value"] / tokens,
        "critic/return_mean": means["return"],
        "critic/explained_variance": 1.0 - unexplained / variance if variance > 1e-12 else 0.0,
        "critic/clipped": stats["clipped"] / tokens,
    }


def _over_updates(updates: Sequence[Metrics]) -> Metrics:
    """Losses and gradient norm as means, other statistics as sums, names ending in _max by maximum."""
    merged: Metrics = {}
    for name in {name: None for update in updates for name in update}:
        values = [update[name] for update in updates if name in update]
        merged[name] = max(values) if name.endswith("_max") else sum(values)
        if name in _MEANS:
            merged[name] /= len(values)
    return merged


def eval_metrics(sets: Mapping[str, Sequence[GroupSummary]]) -> Metrics:
    """Accuracy of each evaluation set, and their mean: every set weighs the same, whatever its size."""
    accuracy = {
        f"eval/{name}/accuracy": float(np.concatenate([group.correct_G for group in groups]).mean())
        for name, groups in sets.items()
    }
    if not accuracy:
        return {}
    failed = failed_share([group for groups in sets.values() for group in groups])
    return {**accuracy, "eval/accuracy": sum(accuracy.values()) / len(accuracy), "eval/failed": failed}


def pick_samples(groups: Sequence[GroupSummary], count: int) -> list[dict[str, Any]]:
    """The first sample of every group, then the second of every group... until there are `count`."""
    rounds = zip_longest(*([_sample(group, i) for i in range(len(group.responses))] for group in groups))
    return [sample for samples in rounds for sample in samples if sample is not None][:count]


def _sample(group: GroupSummary, index: int) -> dict[str, Any]:
    return {
        "prompt": group.prompt_text,
        "answer": group.answer,
        "response": group.responses[index],
        "reward": float(group.rewards_G[index]),
        "correct": bool(group.correct_G[index]),
        "length": int(group.response_lengths_G[index]),
        "finished": bool(group.finished_G[index]),
        "version": group.version,
    }
