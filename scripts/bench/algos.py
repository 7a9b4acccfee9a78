"""Advantages and losses of one big batch: megarl's, on packed tokens, against loops over samples and padded batches.

All three get the same numbers in one run, and their results are compared before any time is printed.
docs/bench/algos.md says what the rows and columns mean.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.algos import ALGORITHMS
from megarl.algos.advantages import centred, gae, group_normalised, leave_one_out
from megarl.algos.losses import kl_T, policy_loss
from megarl.algos.targets import Targets
from megarl.training import credit
from megarl.types import Hyperparameters, TrainSequence
from scripts.bench.algos_loops import (
    GAMMA,
    LAMBDA,
    Pieces,
    Tokens,
    floats_gae,
    padded_gae,
    padded_whitened,
    plain_gae,
    plain_group,
    plain_loss,
    plain_whitened,
)

PER_GROUP, MICRO_BATCH = 16, 65_536
TOLERANCE = 1e-3  # of float32 sums; relative to the largest number


@dataclass(frozen=True)
class Batch:
    """Samples laid end to end: tokens [T], lengths [N], rewards [groups, PER_GROUP]."""

    tokens: Tokens
    lengths: list[int]
    longest: int
    rewards: torch.Tensor

    def samples(self, indices: Sequence[int]) -> list[Tokens]:
        """Each of them alone, in memory of its own."""
        split = self.tokens.map(lambda values: values.split(self.lengths))
        return [
            Tokens(**{name: parts[index].clone() for name, parts in split.items()})
            for index in indices
        ]

    def micro_batches(self) -> list[tuple[Tokens, Targets]]:
        """Samples in order, as many as MICRO_BATCH tokens hold."""
        micro_batches, start = [], 0
        while start < len(self.lengths):
            end, size = start + 1, self.lengths[start]
            while end < len(self.lengths) and size + self.lengths[end] <= MICRO_BATCH:
                end, size = end + 1, size + self.lengths[end]
            begin = sum(self.lengths[:start])
            part = Tokens(
                **self.tokens.map(lambda values, at=slice(begin, begin + size): values[at])
            )
            numbers = torch.repeat_interleave(
                torch.arange(end - start), torch.tensor(self.lengths[start:end])
            )
            nothing = dict.fromkeys(("outcome_T", "nll_weight_T"), torch.zeros(size))
            targets = Targets(
                loss_mask_T=part.mask, loss_weight_T=torch.ones(size), advantage_T=part.advantage,
                engine_logp_T=part.old_logp, sequence_T=numbers, is_stale_T=~torch.ones(size, dtype=torch.bool),
                **nothing,
            )  # fmt: skip
            micro_batches.append((part, targets))
            start = end
        return micro_batches


def drawn(count: int, longest: int, seed: int) -> Batch:
    """Samples of 1 to `longest` tokens, log-uniform, one of them the longest."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths = np.exp(rng.uniform(0, math.log(longest), count)).astype(np.int64)
    lengths[rng.integers(count)] = longest
    total, ends = int(lengths.sum()), torch.from_numpy(lengths).cumsum(0) - 1
    logp, noise, far, advantage, value = torch.randn(5, total, generator=generator)
    rewards = (torch.rand(count, generator=generator) < 0.4).float()
    reward = torch.zeros(total).index_put((ends,), rewards)
    of_samples = torch.repeat_interleave(
        torch.randn(count, generator=generator), torch.from_numpy(lengths)
    )
    logp, advantage = -logp.abs(), of_samples + advantage * 0.1
    tokens = Tokens(
        logp,
        logp + noise * 0.2,
        logp + far * 0.2,
        advantage,
        value * 0.5,
        reward,
        torch.ones(total, dtype=torch.bool),
    )
    return Batch(tokens, lengths.tolist(), longest, rewards.view(-1, PER_GROUP))


def packed_loss(
    name: str, rules: Hyperparameters, micro_batches: Sequence[tuple[Tokens, Targets]]
) -> Pieces:
    """The same of megarl's losses, micro-batch by micro-batch."""
    gradients = []
    for tokens, targets in micro_batches:
        logp_T = tokens.logp.detach().requires_grad_()
        if name == "kl":
            loss = kl_T(logp_T, tokens.reference_logp, "k3").sum()
        else:
            surrogate = ALGORITHMS[name].surrogate
            assert surrogate is not None
            loss, _ = policy_loss(surrogate, logp_T, tokens.logp, tokens.old_logp, targets, rules)
        loss.backward()
        assert logp_T.grad is not None
        gradients.append(logp_T.grad)
    return gradients


@dataclass(frozen=True)
class Case:
    """A row: megarl's way over all samples, a loop's over some of them, a padded batch's, if there is one."""

    ours: Callable[[], Pieces]  # laid end to end, all samples
    loop: Callable[[Sequence[Tokens]], Pieces]
    padded: Callable[[Tokens], torch.Tensor] | None = None
    padded_rows: int | None = None  # samples that are padded together; None: all


def cases(batch: Batch) -> dict[str, Case]:
    tokens, lengths, most = batch.tokens, batch.lengths, batch.longest
    is_last_T = torch.zeros(len(tokens.mask), dtype=torch.bool)
    is_last_T[torch.tensor(lengths).cumsum(0) - 1] = True
    advantages, rewards, values = (
        [piece.numpy() for piece in packed.split(lengths)]
        for packed in (tokens.advantage, tokens.reward, tokens.value)
    )
    ids_T, mask_T, zeros_T = (
        np.zeros(most, np.int64),
        np.ones(most, np.bool_),
        np.zeros(most, np.float32),
    )
    advantaged = [
        TrainSequence(ids_T[:n], mask_T[:n], zeros_T[:n], zeros_T[:n], advantage_T=one_T)
        for n, one_T in zip(lengths, advantages, strict=True)
    ]
    rewarded = [
        replace(sequence, reward=float(reward_T[-1]))
        for sequence, reward_T in zip(advantaged, rewards, strict=True)
    ]

    def packed_gae() -> Pieces:
        return [gae(tokens.reward, tokens.value, is_last_T, gamma=GAMMA, lam=LAMBDA)[0]]

    def ragged_gae() -> Pieces:
        return [
            torch.from_numpy(advantage_T)
            for advantage_T in credit.gae_advantages(rewarded, values, gamma=GAMMA, lam=LAMBDA)[0]
        ]

    def whitened() -> Pieces:
        return [
            torch.from_numpy(np.asarray(sequence.advantage_T))
            for sequence in credit.whitened(advantaged, lambda sums: sums)
        ]

    cases_by_name = {
        "gae": Case(
            packed_gae, lambda samples: [plain_gae(sample) for sample in samples], padded_gae
        ),
        "gae (loop of floats)": Case(
            packed_gae, lambda samples: [floats_gae(sample) for sample in samples]
        ),
        "gae (ragged arrays)": Case(
            ragged_gae, lambda samples: [plain_gae(sample) for sample in samples]
        ),
        "whitening": Case(whitened, plain_whitened, padded_whitened),
    }
    return cases_by_name | loss_cases(batch)


def loss_cases(batch: Batch) -> dict[str, Case]:
    micro_batches = batch.micro_batches()
    cases_by_name = {}
    for name in ("grpo", "gspo", "cispo", "kl"):
        rules = Hyperparameters()
        if name == "gspo":
            rules = Hyperparameters(clip_low=0.02, clip_high=0.03)
        cases_by_name[f"loss: {name}"] = Case(
            partial(packed_loss, name, rules, micro_batches),
            lambda samples, name=name, rules=rules: [
                plain_loss(name, sample, rules) for sample in samples
            ],
            partial(plain_loss, name, rules=rules),
            padded_rows=8,
        )
    return cases_by_name


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Of this process alone, so that what else the machine does is not measured."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def difference(ours: torch.Tensor, other: torch.Tensor) -> float:
    """The largest, relative to the largest number."""
    return float((ours - other).abs().max() / other.abs().max().clamp(min=1e-6))


def evenly(batch: Batch, count: int) -> list[int]:
    """So many samples, evenly spaced by length, the longest among them."""
    order = np.argsort(batch.lengths, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    return [int(order[place]) for place in places]


def measure(batch: Batch, case: Case, loop_samples: int, padded_samples: int) -> dict[str, float]:
    """A row's figures; loops and padded batches are timed on some samples and scaled, by tokens and by samples."""
    runs = [timed(case.ours) for _ in range(4)]
    ours = torch.cat(runs[0][0]).split(batch.lengths)
    figures = {
        "tokens": sum(batch.lengths),
        "ours_s": sorted(seconds for _, seconds in runs[1:])[1],
    }
    # What is whitened depends on all samples.
    count = len(batch.lengths) if case.loop is plain_whitened else loop_samples
    indices = evenly(batch, count)
    loop, seconds = timed(partial(case.loop, batch.samples(indices)))
    worst = max(difference(ours[index], piece) for index, piece in zip(indices, loop, strict=True))
    figures["loop_s"] = (
        seconds * sum(batch.lengths) / sum(batch.lengths[index] for index in indices)
    )
    figures["ratio"] = figures["loop_s"] / figures["ours_s"]
    if case.padded:
        indices = evenly(batch, padded_samples)
        rows, total = case.padded_rows or len(indices), 0.0
        for start in range(0, len(indices), rows):
            some = indices[start : start + rows]
            parts = batch.samples(some)
            widths = {
                name: [getattr(sample, name) for sample in parts] for name in vars(batch.tokens)
            }
            many = Tokens(
                **{name: _padded(columns, batch.longest) for name, columns in widths.items()}
            )
            padded, seconds = timed(partial(case.padded, many))
            total += seconds
            if case.padded is not padded_whitened:
                pairs = (
                    (ours[index], padded[row, : batch.lengths[index]])
                    for row, index in enumerate(some)
                )
                worst = max(worst, *(difference(*pair) for pair in pairs))
        figures["padded_s"] = total * len(batch.lengths) / len(indices)
        figures["padded_ratio"] = figures["padded_s"] / figures["ours_s"]
    return figures | {"difference": worst}


def _padded(columns: Pieces, longest: int) -> torch.Tensor:
    """[B, longest], filled with 0."""
    row = columns[0].new_zeros(len(columns), longest)
    for index, column in enumerate(columns):
        row[index, : len(column)] = column
    return row


def measure_groups(batch: Batch, name: str) -> dict[str, float]:
    """Of advantages that are of samples, all of which the loop is timed on, too."""
    advantage = {"grpo": group_normalised, "dr_grpo": centred, "rloo": leave_one_out}[name]
    ours, seconds = timed(lambda: [advantage(rewards_G) for rewards_G in batch.rewards])
    numbers = [index // PER_GROUP for index in range(batch.rewards.numel())]
    loop, loop_seconds = timed(lambda: plain_group(name, list(batch.rewards.flatten()), numbers))
    worst = difference(torch.cat(ours), torch.stack(loop))
    figures = {"tokens": batch.rewards.numel(), "ours_s": seconds, "loop_s": loop_seconds}
    return figures | {"ratio": loop_seconds / seconds, "difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=int, default=8192, help=f"of the batch, a multiple of {PER_GROUP}"
    )
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest sample")
    parser.add_argument(
        "--loop-samples", type=int, default=128, help="that loops over samples are timed on"
    )
    parser.add_argument(
        "--padded-samples", type=int, default=1024, help="that padded batches are timed on"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; processor seconds of all are added"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object: row, figure")
    args = parser.parse_args()
    if args.samples % PER_GROUP or args.samples < PER_GROUP:
        parser.error(f"--samples {args.samples} is not a multiple of {PER_GROUP}")
    torch.set_num_threads(args.threads)
    batch = drawn(args.samples, args.longest, args.seed)
    rows_by_name = {
        f"advantage: {name}": measure_groups(batch, name) for name in ("grpo", "dr_grpo", "rloo")
    }
    for name, case in cases(batch).items():
        rows_by_name[name] = measure(batch, case, args.loop_samples, args.padded_samples)
    wrong = [
        f"{name}: {row['difference']:.1e}"
        for name, row in rows_by_name.items()
        if not row["difference"] < TOLERANCE
    ]
    if wrong:
        sys.exit(
            f"megarl's numbers are not the loops', relative to the largest: {', '.join(wrong)}"
        )
    if args.json:
        print(json.dumps(rows_by_name))
        return
    print(
        f"{args.samples} samples, {args.threads} threads, processor seconds. Loops are timed on {args.loop_samples}"
    )
    print(
        f"samples and scaled by tokens, padded batches on {args.padded_samples} and scaled by samples.\n"
    )
    columns = ("tokens", "ours_s", "loop_s", "ratio", "padded_s", "padded_ratio", "difference")
    print(" " * 20, *(f"{column:>12}" for column in columns))
    for name, row in rows_by_name.items():
        print(
            f"{name:20}",
            *(f"{row[column]:12.4g}" if column in row else " " * 12 for column in columns),
        )


if __name__ == "__main__":
    main()
