"""How even and how full micro-batches are: megarl's planner against the published rules of verl and slime.

All plan the same samples, in the same order, for the same ranks and token budget, and are measured by the FLOPs of one
model. docs/bench/batching.md says what the rules are and what the columns mean.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.model.shape import ModelShape
from megarl.training.batching import SampleRef, plan_updates
from megarl.training.flops import train_work

QWEN3_30B = ModelShape(
    num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
    experts_per_token=8, moe_ffn_size=768,
)  # fmt: skip
LIMIT = 32768
# of a sample's tokens: parameters of the logarithm's normal distribution, cut at LIMIT
DISTRIBUTIONS = {
    "lognormal": (7.5, 0.8),
    "tail32k": (8.5, 1.2),  # about 5 % of the samples are cut
}
# the peers' work of a sequence: 24576 x tokens + tokens^2, whatever the model
TOKENS_OF_LINEAR = 24576
ROW = 128  # slime pads a packed row to a multiple of this x TP

Plan = list[list[list[int]]]  # [dp][micro-batches] -> samples


def peer_work(length: int) -> int:
    """What a sequence costs to verl and slime."""
    return TOKENS_OF_LINEAR * length + length * length


def differencing(weights: Sequence[int], count: int, equal_size: bool) -> list[list[int]]:
    """Split into `count` sets of nearly equal weight by the largest differencing method (Karmarkar and Karp, 1982).

    Partial splits, largest spread first, are merged in pairs: heaviest sets of one with lightest of the other. Equal
    sizes come from starting with splits of `count` neighbours in weight, one in each set.
    """
    order = sorted(range(len(weights)), key=lambda index: (weights[index], index))
    size = count if equal_size else 1
    heap = []
    for number, start in enumerate(range(0, len(order), size)):
        sets = [(weights[index], [index]) for index in reversed(order[start : start + size])]
        sets += [(0, [])] * (count - len(sets))
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], number, sets))
    while len(heap) > 1:
        _, number, split = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        pairs = zip(split, reversed(other), strict=True)
        merged = sorted(
            ((a + b, x + y) for (a, x), (b, y) in pairs), key=lambda weighed: -weighed[0]
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [members for _, members in heap[0][2]]


def ours(lengths: Sequence[int], dp: int, budget: int, work: Callable[[int], float]) -> Plan:
    """megarl.training.batching, as a run uses it."""
    samples = [SampleRef(0, index, length, length) for index, length in enumerate(lengths)]
    (plan,) = plan_updates(
        samples, updates=1, dp=dp, token_budget=budget, aggregation="token_mean", work=work
    )
    return [[[ref.sample for ref in batch] for batch in rank] for rank in plan.micro_batches]


def verl(
    lengths: Sequence[int], dp: int, budget: int, weigh: Callable[[int], int] = peer_work
) -> Plan:
    """Ranks by differencing with as many samples each, then each rank's own micro-batches by differencing.

    Their number is what the fullest rank's tokens need; nothing checks that each keeps the budget. Light ones are put
    at both ends.
    """
    weights = [weigh(length) for length in lengths]
    ranks = differencing(weights, dp, equal_size=True)
    count = max(-(-sum(lengths[index] for index in rank) // budget) for rank in ranks)
    plan = []
    for rank in ranks:
        rank_weights = [weights[index] for index in rank]
        batches = [
            [rank[place] for place in batch]
            for batch in differencing(rank_weights, count, equal_size=False)
        ]
        batches.sort(key=lambda batch: -sum(weights[index] for index in batch))
        plan.append(batches[::2][::-1] + batches[1::2])
    return plan


def verl_tokens(lengths: Sequence[int], dp: int, budget: int) -> Plan:
    """verl's rule before it weighed attention: the same with token counts."""
    return verl(lengths, dp, budget, weigh=int)


def slime(lengths: Sequence[int], dp: int, budget: int) -> Plan:
    """All ranks' micro-batches by first fit in order of arrival; the fullest are halved until dp divides their number.

    Ranks get as many each by differencing on the micro-batches' work.
    """
    batches, room = [], np.full(len(lengths), budget)
    for index, length in enumerate(lengths):
        place = int((room >= length).argmax())
        if place == len(batches):
            batches.append([])
        batches[place].append(index)
        room[place] -= length
    while len(batches) % dp:
        batches += _halves(batches.pop(_fullest(batches, lengths)), lengths)
    weights = [sum(peer_work(lengths[index]) for index in batch) for batch in batches]
    return [
        [batches[place] for place in rank] for rank in differencing(weights, dp, equal_size=True)
    ]


def _fullest(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    tokens = [(len(batch) > 1, sum(lengths[index] for index in batch)) for batch in batches]
    return max(range(len(batches)), key=lambda place: tokens[place])


def _halves(batch: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Longest first, each to the half with fewer tokens."""
    halves: list[list[int]] = [[], []]
    tokens = [0, 0]
    for index in sorted(batch, key=lambda sample: -lengths[sample]):
        half = int(tokens[1] < tokens[0])
        halves[half].append(index)
        tokens[half] += lengths[index]
    return halves


def _up(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def row_tokens(method: str, batch: Sequence[int], tp: int) -> int:
    """Tokens that a packed row is computed with: rows are padded to TP, slime's to 128 x TP, verl's by sequence."""
    if method.startswith("verl"):
        return sum(_up(length, tp) for length in batch)
    return max(_up(sum(batch), ROW * tp if method == "slime" else tp), tp)


def measure(
    method: str,
    plan: Plan,
    lengths: Sequence[int],
    work: Callable[[int], float],
    budget: int,
    tp: int,
) -> dict[str, float]:
    """A plan's figures; raises AssertionError for one that loses or repeats a sample."""
    placed = [index for rank in plan for batch in rank for index in batch]
    assert sorted(placed) == list(range(len(lengths))), f"{method} does not place every sample once"
    by_length = {length: work(length) for length in set(lengths)}
    works = np.array(
        [[sum(by_length[lengths[index]] for index in batch) for batch in rank] for rank in plan]
    )
    batches = [[lengths[index] for index in batch] for rank in plan for batch in rank]
    mean = works.sum() / len(plan)
    longest_first = sorted(lengths, reverse=True)
    fit = int(np.searchsorted(np.cumsum(longest_first), len(plan) * budget)) + 1
    beside_longest = sum(by_length[length] for length in longest_first[:fit]) / len(plan)
    return {
        "rank_imbalance": float(works.sum(1).max() / mean),
        "step_imbalance": float(works.max(0).sum() / mean),
        "least_rank": max(1.0, max(by_length.values()) / float(mean)),
        "least_step": max(1.0, 1 + (max(by_length.values()) - beside_longest) / float(mean)),
        "padding": 1 - sum(lengths) / sum(row_tokens(method, batch, tp) for batch in batches),
        "padded_batch": 1
        - sum(lengths) / sum(len(batch) * max(batch) for batch in batches if batch),
        "micro_batches": works.shape[1],
        "fullest_over_budget": max(map(sum, batches)) / budget,
    }


def compare(
    name: str, count: int, dp: int, budget: int, tp: int, seed: int
) -> dict[str, dict[str, float]]:
    """Every method's figures on one distribution; they all get the same samples."""
    mean, sigma = DISTRIBUTIONS[name]
    drawn = np.random.default_rng(seed).lognormal(mean, sigma, count)
    lengths = [int(length) for length in drawn.clip(2, LIMIT)]
    work = train_work(QWEN3_30B)
    methods: dict[str, Callable[[], Plan]] = {
        "megarl": lambda: ours(lengths, dp, budget, work),
        "verl": lambda: verl(lengths, dp, budget),
        "verl_tokens": lambda: verl_tokens(lengths, dp, budget),
        "slime": lambda: slime(lengths, dp, budget),
    }
    figures_by_method = {}
    for method, plan in methods.items():
        started = time.perf_counter()
        new_plan = plan()
        seconds = time.perf_counter() - started
        figures_by_method[method] = measure(method, new_plan, lengths, work, budget, tp) | {
            "plan_s": seconds
        }
    return figures_by_method


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=8192,
        help="of one update; verl's rule wants a multiple of --dp",
    )
    parser.add_argument(
        "--dp", type=int, nargs="+", default=[8, 64, 512], help="data-parallel ranks"
    )
    parser.add_argument(
        "--budget", type=int, default=LIMIT, help=f"tokens of a micro-batch, at least {LIMIT}"
    )
    parser.add_argument(
        "--tp", type=int, default=4, help="tensor-parallel ranks, which rows are padded for"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: distribution, dp, method, figure",
    )
    args = parser.parse_args()
    if args.budget < LIMIT:
        parser.error(f"--budget {args.budget} is less than the longest sample, {LIMIT}")
    if any(args.samples % dp for dp in args.dp):
        parser.error(f"--samples {args.samples} is not a multiple of every --dp {args.dp}")
    figures_by_distribution = {
        name: {
            str(dp): compare(name, args.samples, dp, args.budget, args.tp, args.seed)
            for dp in args.dp
        }
        for name in DISTRIBUTIONS
    }
    if args.json:
        print(json.dumps(figures_by_distribution))
        return
    for name, by_dp in figures_by_distribution.items():
        for dp, rows in by_dp.items():
            print(f"\n{name}, {args.samples} samples, dp {dp}")
            print(" " * 12, *(f"{figure:>19}" for figure in rows["megarl"]))
            for method, row in rows.items():
                print(f"{method:12}", *(f"{value:19.4g}" for value in row.values()))


if __name__ == "__main__":
    main()
