"""What a run pays in every step to be seen: the watch for hangs, the log of calls, the differences by row.

    python scripts/bench/watching.py [--tokens N] [--metrics FILE]

It prints seconds of one processor and, beside a run's own metrics (runs/NAME/metrics.jsonl), their share of its mean
step: each controller looks for hangs twice a second, each worker notes its calls (some tens a step), and each rank that
reports compares its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.algos.ratios import LOG_RATIO_BOUND
from megarl.cluster.call_log import CallLog
from megarl.cluster.hang_watch import _POLL_S
from megarl.config.loading import load_recipe
from megarl.diagnosis.phases import PhaseClock
from megarl.training.row_diffs import ShownSamples, row_diffs
from megarl.types import Prompt, Row, Sample, SampleGroup, SamplePart, TrainSequence

_REPEATS = 5
_LOOKS = 20_000
_ROW_TOKENS = 8_192
_CALLS_OF_A_STEP = 100
_RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def seconds_of(work: Callable[[], None]) -> float:
    """The quickest of some repetitions, because other processes can only slow it down."""
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def look_s() -> float:
    """Of one look whether a phase is overdue."""
    clock = PhaseClock(None, first_s=3600.0)

    def look() -> None:
        with clock.phase(1, "rollout"):
            for _ in range(_LOOKS):
                clock.overdue()

    return seconds_of(look) / _LOOKS


def call_s() -> float:
    """Of noting one call of a worker."""

    async def note() -> None:
        log = CallLog()
        for _ in range(_LOOKS):
            with log.open("train"):
                pass

    return seconds_of(lambda: asyncio.run(note())) / _LOOKS


def rows_s(num_tokens: int) -> float:
    """Of the differences of so many tokens in rows of `_ROW_TOKENS`, of two versions each."""
    count = max(1, num_tokens // _ROW_TOKENS)
    rng = np.random.default_rng(0)
    logp_T = rng.uniform(-LOG_RATIO_BOUND, 0, _ROW_TOKENS).astype(np.float32)
    ids_T = rng.integers(0, 1000, _ROW_TOKENS)
    parts = (SamplePart(1, _ROW_TOKENS // 2), SamplePart(2, _ROW_TOKENS // 2))
    samples = (Sample((Row.response((), ids_T, logp_T, parts),), "", finished=True),) * count
    rewards_G = np.zeros(count, np.float32)
    group = SampleGroup(Prompt("", "", (), ""), samples, rewards_G, rewards_G > 0)
    mask_T = np.ones(_ROW_TOKENS, np.bool_)
    weight_T = np.ones(_ROW_TOKENS, np.float32)
    sequences = [
        TrainSequence(ids_T, mask_T, weight_T, logp_T, key=(0, number, 0))
        for number in range(count)
    ]
    old_logp = [logp_T + np.float32(0.01)] * count
    shown = ShownSamples(load_recipe(_RECIPE))
    seconds = seconds_of(lambda: _discarded(row_diffs(sequences, old_logp, {0: group}, shown)))
    return seconds * num_tokens / (count * _ROW_TOKENS)


def _discarded(result: object) -> None:
    del result


def mean_step_s(metrics: Path) -> float:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return fmean(record["time/step_s"] for record in records if record["step"] > 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2**20, help="of a step, of one rank")
    parser.add_argument("--metrics", type=Path, help="of a run, for its mean step")
    args = parser.parse_args()
    step_s = mean_step_s(args.metrics) if args.metrics else None
    looks_s = look_s() / _POLL_S * (step_s or 1.0)
    costs = {
        f"looks for hangs in {step_s or 1.0:.1f} s": looks_s,
        f"{_CALLS_OF_A_STEP} calls of a worker": _CALLS_OF_A_STEP * call_s(),
        f"differences of {args.tokens:,} tokens": rows_s(args.tokens),
    }
    print("| what | ms of a processor | share of the step |\n|---|---|---|")
    for what, seconds in costs.items():
        share = f"{seconds / step_s:.4%}" if step_s else "-"
        print(f"| {what} | {1000 * seconds:.3f} | {share} |")


if __name__ == "__main__":
    main()
