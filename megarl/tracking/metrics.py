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
    """Means over all samples of a step that were drawn; `truncated` is the share that was cut at the length limit."""
    rewards = np.concatenate([group.rewards_G[group.drawn_G] for group in groups])
    lengths = np.concatenate([group.response_lengths_G[group.drawn_G] for group in groups])
    finished = np.concatenate([group.finished_G[group.drawn_G] for group in groups])
    correct = np.concatenate([group.correct_G[group.drawn_G] for group in groups])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/accuracy": float(correct.mean()),
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
    """Of a critic's updates, by `value_loss`'s sums, or of an implicit reward model's, by those of `outcome_loss`.

    What is explained is by the values before the step: 1 - Var(return - value) / Var(return); 0 where all returns are
    the same. right: the share of tokens in responses whose reward's sign says the outcome.
    """
    stats = _over_updates(updates)
    tokens = stats["tokens"]
    if "right" in stats:
        return {
            "critic/loss": stats["loss"],
            "critic/grad_norm": stats["grad_norm"],
            "critic/right": stats["right"] / tokens,
            "critic/reward_mean": stats["reward"] / tokens,
        }
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
    """Of each evaluation set; `eval/accuracy`, their mean: every set weighs the same, whatever its size.

    With k > 1 samples of each prompt `accuracy` is avg@k, the mean over all of them; pass@k: the share of prompts of
    which any is right; maj@k: of which the answer that most of them give is right.
    """
    found: Metrics = {}
    for name, asked in sets.items():
        groups = [group for group in asked if len(group.rewards_G)]  # others' verdicts failed
        found[f"eval/{name}/accuracy"] = _mean([group.correct_G for group in groups])
        found[f"eval/{name}/response_length_mean"] = _mean([group.response_lengths_G for group in groups])
        found[f"eval/{name}/truncated"] = 1.0 - _mean([group.finished_G for group in groups])
        k = max(len(group.responses) + group.num_dropped for group in groups)
        if k > 1:
            found[f"eval/{name}/avg@{k}"] = found[f"eval/{name}/accuracy"]
            found[f"eval/{name}/pass@{k}"] = float(np.mean([group.correct_G.any() for group in groups]))
            found[f"eval/{name}/maj@{k}"] = float(np.mean([_majority(group) for group in groups]))
    accuracy = [found[f"eval/{name}/accuracy"] for name in sets]
    if not sets:
        return {}
    failed = failed_share([group for groups in sets.values() for group in groups])
    return {**found, "eval/accuracy": sum(accuracy) / len(accuracy), "eval/failed": failed}


def _mean(arrays: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(arrays).mean())


def _majority(group: GroupSummary) -> float:
    """Whether the answer given most often is right; among equally many, the share of them that are."""
    votes: dict[str, list[bool]] = {}
    for said, is_correct in zip(group.said or group.responses, group.correct_G, strict=True):
        if said:
            votes.setdefault(said, []).append(bool(is_correct))
    most = max(map(len, votes.values()), default=0)
    ahead = [any(verdicts) for verdicts in votes.values() if len(verdicts) == most]
    return sum(ahead) / len(ahead) if ahead else 0.0


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
