"""A step's seconds with whole responses, in phases and ahead, seen on real engines and predicted by the plan.

Two SGLang engines on this machine's CPU sample responses of planted log-normal lengths; each forward pass is preceded
by a planted pause, because on a CPU a step costs what its sequences do. Training is a planted pause, too. The arms take
turns, step by step. docs/bench/overlap.md says what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.plan.engine_simulation import SimulatedRequest
from megarl.plan.phase_simulation import LengthsOf, OpenGroup, PhasedStep, PhaseSizes, phased_steps
from megarl.rollout.load_balancing import CompletedSample, RequestBalancer
from megarl.rollout.sglang.engine import Engine
from megarl.types import IntArray
from scripts.bench.balancing import assigned
from scripts.bench.balancing_real import Prompts, cpu_engines, planted_prompt, sampled_phase
from scripts.bench.balancing_simulation import Machine

ENGINES, SLOTS, CACHE, PROMPT_TOKENS = 2, 64, 10**9, 12
PROMPTS, SAMPLES = 8, 4  # of a step
POOL = 4096  # drawn lengths
CALIBRATED = (2, 24)  # sequences of each engine
CALIBRATED_STEPS = 16  # further tokens of the responses that measure a step
READ_TOKENS = 64  # further tokens of the prompts that measure reading

# tokens of prompt and response of the samples whose responses a phase ends
Final = set[tuple[int, int]]
Ends = Sequence[tuple[float, CompletedSample | SimulatedRequest]]
# (requests, those that end, whether training is beside them) -> seconds until all of it has ended
PhaseSeconds = Callable[[Prompts, Final, bool], float]


@dataclass(frozen=True)
class Planted:
    """Seconds of a step's training, and from the end of a response to its verdict."""

    train_s: float
    reward_s: float


@dataclass(frozen=True)
class PhaseSeen:
    """Seconds of a phase, or until it and the training beside it end; tokens of earlier phases that it read again."""

    seconds: float
    read_again: int


@dataclass(frozen=True)
class Fit:
    """Seconds of an engine: of a step of no sequence, of each sequence in it, and of a token that is read."""

    floor_s: float
    sequence_s: float
    read_s: float


def arms_of(longest: int, phase: int, in_flight: float) -> dict[str, PhaseSizes]:
    """Each arm's buffer. in_flight: of the arms with phases, over the prompts of a step."""
    more = round(in_flight * PROMPTS)
    return {
        "sync": PhaseSizes(PROMPTS, PROMPTS, SAMPLES, longest),
        "phases": PhaseSizes(PROMPTS, more, SAMPLES, phase),
        "ahead": PhaseSizes(PROMPTS, more, SAMPLES, phase, ahead=1),
    }


def planted_lengths(
    longest: int, mean_share: float, sigma: float, seed: int, samples: int = SAMPLES
) -> LengthsOf:
    """Log-normal lengths, cut at the longest, whose mean is `mean_share` of it; of each ticket the same in all arms."""
    spread = np.exp(sigma * np.random.default_rng(seed).standard_normal(POOL))
    low, high = 0.0, 1e6 * longest
    for _ in range(100):
        middle = (low + high) / 2
        is_longer = np.minimum(spread * middle, longest).mean() > mean_share * longest
        low, high = (low, middle) if is_longer else (middle, high)
    pool = np.minimum(spread * high, longest).clip(2).astype(np.int64)

    @cache
    def of_drawn(prompt_index: int) -> IntArray:
        return pool[np.arange(prompt_index * samples, (prompt_index + 1) * samples) % POOL]

    return of_drawn


def phase_of(
    seconds: PhaseSeconds, lengths_of: LengthsOf, groups: Sequence[OpenGroup], beside_training: bool
) -> PhaseSeen:
    """A phase as one round of requests, each with what it has already as its prompt."""
    prompts = [planted_prompt(PROMPT_TOKENS + group.done, group.new) for group in groups]
    final: Final = set()
    for group in groups:
        lengths = lengths_of(group.prompt_index)
        ended = lengths[lengths > group.done] - group.done == group.new
        final |= {(PROMPT_TOKENS + group.done, new) for new in group.new[ended].tolist()}
    read_again = sum(group.done * len(group.new) for group in groups)
    return PhaseSeen(seconds(prompts, final, beside_training), read_again)


def with_rewards_s(ends: Ends, final: Final, reward_s: float) -> float:
    """When a phase ends: after the last sample, and after the verdict on the last response that has ended."""
    judged = [
        end_s for end_s, sample in ends if (sample.prompt_tokens, sample.response_tokens) in final
    ]
    return max(ends[-1][0], max(judged, default=0.0) + reward_s)


def simulated_s(fit: Fit, longest: int, planted: Planted) -> PhaseSeconds:
    """Phases of the plan's engines with fitted seconds; requests are dealt to them as in a run."""
    machine = Machine(
        ENGINES, 1, SLOTS, CACHE, longest, fit.floor_s, fit.sequence_s, 0.0, fit.read_s
    )

    def seconds(prompts: Prompts, final: Final, beside_training: bool) -> float:
        ends = assigned(machine, prompts, RequestBalancer, prompts).ends
        return max(
            with_rewards_s(ends, final, planted.reward_s),
            planted.train_s if beside_training else 0.0,
        )

    return seconds


def real_s(engines: Sequence[Engine], longest: int, planted: Planted) -> PhaseSeconds:
    def seconds(prompts: Prompts, final: Final, beside_training: bool) -> float:
        async def sampled() -> None:
            ends, _ = await sampled_phase(engines, RequestBalancer, prompts, longest)
            await asyncio.sleep(with_rewards_s(ends, final, planted.reward_s) - ends[-1][0])

        async def both() -> None:
            await asyncio.gather(
                sampled(), asyncio.sleep(planted.train_s if beside_training else 0.0)
            )

        began_s = time.monotonic()
        asyncio.run(both())
        return time.monotonic() - began_s

    return seconds


def calibrated(engines: Sequence[Engine]) -> list[float]:
    """Seconds: of a step of each of CALIBRATED sequences, and of reading a token.

    All engines run at once, because they share the machine. Two rounds whose responses differ in length differ by their
    steps alone, and two whose prompts do by what is read.
    """
    short = 2

    def equal_s(count: int, prompt_tokens: int, length: int) -> float:
        prompts = [planted_prompt(prompt_tokens, [length] * count) for _ in engines]
        return asyncio.run(sampled_phase(engines, RequestBalancer, prompts, CALIBRATED_STEPS))[0][
            -1
        ][0]

    shorts = [equal_s(count, PROMPT_TOKENS, short) for count in CALIBRATED]
    longs = [equal_s(count, PROMPT_TOKENS, short + CALIBRATED_STEPS) for count in CALIBRATED]
    steps = [
        (long - short_s) / CALIBRATED_STEPS for long, short_s in zip(longs, shorts, strict=True)
    ]
    most = CALIBRATED[-1]
    return [
        *steps,
        (equal_s(most, PROMPT_TOKENS + READ_TOKENS, short) - shorts[-1]) / (most * READ_TOKENS),
    ]


def fitted(seen: Sequence[Sequence[float]]) -> Fit:
    """Of the means of calibrations, by least squares."""
    *steps, read_s = np.mean(seen, 0)
    sequence_s, floor_s = np.polyfit(CALIBRATED, steps, 1)
    return Fit(float(floor_s), max(0.0, float(sequence_s)), max(0.0, float(read_s)))


def figures(steps: Sequence[PhasedStep[PhaseSeen]], train_s: float) -> dict[str, float]:
    """Means over steps, and how old the tokens are that were trained on. waits: seconds in which the ranks wait."""
    tokens_by_age = np.zeros(1 + max(step.oldest for step in steps))
    for step in steps:
        tokens_by_age[: step.oldest + 1] += step.tokens_by_age
    tokens = float(tokens_by_age.sum())
    before_s = fmean(sum(phase.seconds for phase in step.results) for step in steps)
    seconds = before_s + fmean(step.beside.seconds if step.beside else train_s for step in steps)
    return {
        "seconds": seconds,
        "waits": seconds - train_s,
        "phases": fmean(len(step.all_results) for step in steps),
        "stale_mean": float(tokens_by_age @ np.arange(len(tokens_by_age))) / tokens,
        "stale_max": len(tokens_by_age) - 1,
        "read_again": sum(phase.read_again for step in steps for phase in step.all_results)
        / tokens,
    }


def compared(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """arm -> figures: seen, and predicted by the fit that was made between the steps."""
    arms = arms_of(args.longest, args.longest // args.phases, args.in_flight)
    lengths_of = planted_lengths(args.longest, args.mean, args.sigma, args.seed)
    planted, count = Planted(args.train_s, args.reward_s), args.before + args.steps
    context = 2 * (PROMPT_TOKENS + args.longest + READ_TOKENS)
    with cpu_engines(ENGINES, 1, SLOTS, context, disable_radix_cache=True) as engines:
        for engine in engines:
            asyncio.run(engine._host.run(_pause(engine, args.floor_ms / 1e3)))
        seconds = {
            name: real_s(engines, sizes.phase_tokens, planted) for name, sizes in arms.items()
        }
        runs = {name: steps_of(sizes, lengths_of, seconds[name]) for name, sizes in arms.items()}
        calibrations, seen = [], {name: list[PhasedStep[PhaseSeen]]() for name in arms}
        for _ in range(count):
            calibrations.append(calibrated(engines))
            for name, run in runs.items():
                seen[name].append(next(run))
    fit = fitted(calibrations[args.before :])
    measured = {
        name: figures(steps[args.before :], planted.train_s) for name, steps in seen.items()
    }
    predicted = {
        name: figures(steps[args.before :], planted.train_s)
        for name, steps in predicted_steps(arms, fit, lengths_of, planted, count).items()
    }
    return {"fit": asdict(fit)} | with_ratios(measured, predicted)


def steps_of(
    sizes: PhaseSizes, lengths_of: LengthsOf, seconds: PhaseSeconds
) -> Iterator[PhasedStep[PhaseSeen]]:
    return phased_steps(sizes, lengths_of, partial(phase_of, seconds, lengths_of))


def predicted_steps(
    arms: Mapping[str, PhaseSizes], fit: Fit, lengths_of: LengthsOf, planted: Planted, count: int
) -> dict[str, list[PhasedStep[PhaseSeen]]]:
    """The first steps of each arm as the plan's engines take them."""
    seconds = {name: simulated_s(fit, sizes.phase_tokens, planted) for name, sizes in arms.items()}
    return {
        name: list(islice(steps_of(sizes, lengths_of, seconds[name]), count))
        for name, sizes in arms.items()
    }


def with_ratios(
    measured: Mapping[str, dict[str, float]], predicted: Mapping[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Each arm with its prediction, and times fewer seconds a step than the arm `sync`."""
    return {
        name: row
        | {
            "predicted_s": predicted[name]["seconds"],
            "ratio": measured["sync"]["seconds"] / row["seconds"],
            "predicted_ratio": predicted["sync"]["seconds"] / predicted[name]["seconds"],
        }
        for name, row in measured.items()
    }


async def _pause(engine: Engine, seconds: float) -> None:
    """Before each forward pass from now on."""
    from sglang.srt.managers.io_struct import SlowDownReqInput

    await engine._manager.slow_down(SlowDownReqInput(forward_sleep_time=seconds))


def table() -> dict[str, dict[str, float]]:
    """Times fewer seconds than whole responses by lengths, samples of a prompt, prompts in flight and phases.

    Of an engine with 256 samples in a step, and room for all; reading is free.
    """
    gains_by_case: dict[str, dict[str, float]] = {}
    for sigma, share in ((0.7, 0.4), (1.0, 0.25)):
        for samples in (16, 4):
            lengths_of = planted_lengths(1024, share, sigma, seed=0, samples=samples)
            seconds = partial(table_s, lengths_of, samples)
            whole = seconds(1, 1)
            gains_by_case[f"sigma {sigma:g}, mean {share:g}, {samples} samples"] = {
                f"{times:g}x, {phases}": whole / seconds(times, phases)
                for times in (1.5, 2, 3, 4)
                for phases in (2, 4, 8)
            }
    return gains_by_case


def table_s(lengths_of: LengthsOf, samples: int, times: float, phases: int) -> float:
    """Mean seconds of 24 steps after 12 in which the buffer fills; phases: of the longest response.

    A step of the engine takes 1 s, and as much again for each 128 sequences.
    """

    def phase_s(groups: Sequence[OpenGroup], beside_training: bool) -> float:
        new = np.sort(np.concatenate([group.new for group in groups]))
        running = len(new) - np.searchsorted(new, np.arange(new[-1]), side="right")
        return float((1 + running / 128).sum())

    sizes = PhaseSizes(256 // samples, int(times * 256 // samples), samples, 1024 // phases)
    return fmean(
        sum(step.results) for step in islice(phased_steps(sizes, lengths_of, phase_s), 12, 36)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="that are counted, of each arm")
    parser.add_argument(
        "--before", type=int, default=3, help="steps before them, in which the buffer fills"
    )
    parser.add_argument("--longest", type=int, default=64, help="tokens")
    parser.add_argument("--phases", type=int, default=4, help="of the longest response")
    parser.add_argument(
        "--in-flight", type=float, default=2.0, help="prompts, over those of a step"
    )
    parser.add_argument("--mean", type=float, default=0.25, help="of the longest response")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    parser.add_argument(
        "--floor-ms", type=float, default=100.0, help="the pause before each forward pass"
    )
    parser.add_argument(
        "--train-s", type=float, default=3.0, help="planted seconds of a step's training"
    )
    parser.add_argument(
        "--reward-s",
        type=float,
        default=0.0,
        help="planted seconds until the verdict on a response",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: arm or case, figure"
    )
    parser.add_argument(
        "--table", action="store_true", help="simulated gains of other sizes; starts no engine"
    )
    args = parser.parse_args()
    rows_by_name = table() if args.table else compared(args)
    if args.json:
        print(json.dumps(rows_by_name))
        return
    for name, row in rows_by_name.items():
        print(name, *(f"{figure} {value:.4g}" for figure, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()
