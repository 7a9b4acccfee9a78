"""How evenly requests are dealt to engines and attention groups: megarl, round-robin and the power of two choices.

On simulated engines with planted log-normal lengths, and with --real on two SGLang engines of this machine's CPU.
docs/bench/balancing.md says what the cases and columns are.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.plan.engine_simulation import SimulatedRequest, observe_lengths
from megarl.rollout.load_balancing import Capacity, RequestBalancer
from scripts.bench.balancing_simulation import Machine, Outcome, least_s, outcome

LONGEST, MEDIAN, SIGMA = 20480, 1800, 0.8
PROMPT_TOKENS, NUM_PROMPTS, SAMPLES = 512, 128, 16
UNLIMITED = 10**12
CASES: dict[str, tuple[Machine, float]] = {  # with the sigma of the prompts' lengths
    "all fit": (Machine(4, 1, 512, UNLIMITED, LONGEST), 0.0),
    "all fit, prompts differ": (Machine(4, 1, 512, UNLIMITED, LONGEST), 1.0),
    "half fit": (Machine(4, 1, 256, UNLIMITED, LONGEST), 0.0),
    "an eighth fits": (Machine(4, 1, 64, UNLIMITED, LONGEST), 0.0),
    "groups, all fit": (Machine(4, 8, 64, UNLIMITED, LONGEST), 0.0),
    "groups, half fit": (Machine(4, 8, 32, UNLIMITED, LONGEST), 0.0),
    "groups, an eighth fits": (Machine(4, 8, 8, UNLIMITED, LONGEST), 0.0),
    "groups, cache for half": (Machine(4, 8, 64, 96_000, LONGEST), 0.0),
    "groups, cache for a quarter": (Machine(4, 8, 64, 48_000, LONGEST), 0.0),
    "groups, cache for an eighth": (Machine(4, 8, 64, 24_000, LONGEST), 0.0),
    "groups, quarter, prompts differ": (Machine(4, 8, 64, 48_000, LONGEST), 1.0),
}

Prompts = Sequence[Sequence[SimulatedRequest]]


class RoundRobin(RequestBalancer):
    """Each receiver in turn, everything at once."""

    def assign(self, prompt_tokens: int, samples: int = 1) -> int | None:
        self._last = (self._last + 1) % len(self._capacities)
        self._book(self._last, samples, samples * prompt_tokens)
        return self._last


class TwoChoices(RequestBalancer):
    """Of two receivers drawn by chance the one with fewer expected tokens, everything at once (Mitzenmacher 2001)."""

    def __init__(self, capacities: Sequence[Capacity], longest_response: int) -> None:
        super().__init__(capacities, longest_response)
        self._random = random.Random(0)

    def assign(self, prompt_tokens: int, samples: int = 1) -> int | None:
        receivers = range(len(self._capacities))
        receiver = min(
            self._random.sample(receivers, min(2, len(receivers))), key=self.expected_tokens
        )
        self._book(receiver, samples, samples * prompt_tokens)
        return receiver


DEALERS: dict[str, type[RequestBalancer]] = {
    "round_robin": RoundRobin,
    "two_choices": TwoChoices,
    "megarl": RequestBalancer,
}


def planted(
    count: int, samples: int, seed: int, prompt_sigma: float
) -> list[list[SimulatedRequest]]:
    """The samples of each prompt, with log-normal lengths of responses and, where they differ, of prompts."""
    generator = np.random.default_rng(seed)
    lengths = (
        generator.lognormal(np.log(MEDIAN), SIGMA, (count, samples))
        .clip(2, LONGEST)
        .astype(int)
        .tolist()
    )
    prompts = (
        (PROMPT_TOKENS * generator.lognormal(0, prompt_sigma, count))
        .clip(16, 8192)
        .astype(int)
        .tolist()
    )
    return [
        [SimulatedRequest(prompts[index], length) for length in row]
        for index, row in enumerate(lengths)
    ]


def assigned(
    machine: Machine, prompts: Prompts, kind: type[RequestBalancer], before: Prompts = ()
) -> Outcome:
    """Both levels as a run has them: prompts to engines, and their samples to attention groups.

    before: the samples of a round before, which the dealers have seen finish.
    """
    engines = machine.start()
    capacity = Capacity(machine.slots, machine.cache)
    of_engine = Capacity(machine.slots * machine.groups, machine.cache * machine.groups)
    top = kind([of_engine] * machine.engines, LONGEST)
    inner = [kind([capacity] * machine.groups, LONGEST) for _ in engines]
    seen = [sample.response_tokens for samples in before for sample in samples]
    for balancer, share in (
        [(top, 1), *((balancer, machine.engines) for balancer in inner)] if seen else []
    ):
        observe_lengths(balancer, seen[::share])
    waiting = deque(sorted(prompts, key=lambda samples: -samples[0].prompt_tokens))
    queues: list[deque[SimulatedRequest]] = [deque() for _ in engines]

    def send() -> None:
        while (
            waiting
            and (engine := top.assign(waiting[0][0].prompt_tokens, len(waiting[0]))) is not None
        ):
            queues[engine].extend(waiting.popleft())
        for engine, queue, balancer in zip(engines, queues, inner, strict=True):
            while queue and (group := balancer.assign(queue[0].prompt_tokens)) is not None:
                engine.submit(queue.popleft(), group)

    def finished(engine: int, group: int, sample: SimulatedRequest) -> None:
        top.finish(engine, sample.prompt_tokens, sample.response_tokens)
        inner[engine].finish(group, sample.prompt_tokens, sample.response_tokens)
        send()

    send()
    return outcome(engines, finished)


def known(machine: Machine, prompts: Prompts, *, longest_first: bool) -> Outcome:
    """Each sample to the group with the least left of those with room, by its true length.

    As many tokens as a group's cache are held at once in the mean: half of each response. longest_first: or in the
    order of the prompts, in which no dealer can know more than this one.
    """
    engines = machine.start()
    waiting = [sample for samples in prompts for sample in samples]
    if longest_first:
        waiting.sort(key=lambda sample: -sample.response_tokens)
    queue = deque(waiting)
    places = [
        (engine, group) for engine in range(machine.engines) for group in range(machine.groups)
    ]
    held, count = dict.fromkeys(places, 0.0), dict.fromkeys(places, 0)

    def half(sample: SimulatedRequest) -> float:
        return (sample.prompt_tokens + sample.response_tokens) / 2

    def send() -> None:
        while queue:
            needed = half(queue[0])
            free = [
                place
                for place in places
                if count[place] < machine.slots
                and held[place] + needed <= machine.cache
                or not count[place]
            ]
            if not free:
                return
            place = min(free, key=held.__getitem__)
            held[place] += needed
            count[place] += 1
            engines[place[0]].submit(queue.popleft(), place[1])

    def finished(engine: int, group: int, sample: SimulatedRequest) -> None:
        held[engine, group] -= half(sample)
        count[engine, group] -= 1
        send()

    send()
    return outcome(engines, finished)


def compare(machine: Machine, prompt_sigma: float, seed: int) -> dict[str, dict[str, float]]:
    """Every method on the same samples. best: seconds over the bound's; same_order: over `known` in the same order."""
    prompts = planted(NUM_PROMPTS, SAMPLES, seed, prompt_sigma)
    before = planted(NUM_PROMPTS, SAMPLES, seed + 1000, prompt_sigma)
    methods: dict[str, Callable[[], Outcome]] = {
        name: lambda kind=kind: assigned(machine, prompts, kind, before)
        for name, kind in DEALERS.items()
    }
    methods["megarl, first step"] = lambda: assigned(machine, prompts, RequestBalancer)
    methods["known, same order"] = lambda: known(machine, prompts, longest_first=False)
    methods["known, longest first"] = lambda: known(machine, prompts, longest_first=True)
    least = least_s([sample for samples in prompts for sample in samples], machine)
    outcomes_by_name = {name: method() for name, method in methods.items()}
    same_order = outcomes_by_name["known, same order"].total_s
    return {
        name: {
            "seconds": result.total_s,
            "of_bound": result.total_s / least,
            "of_same_order": result.total_s / same_order,
            "tail_s": result.tail_s,
            "imbalance": result.imbalance,
            "retracted": result.retracted,
        }
        for name, result in outcomes_by_name.items()
    }


def mean_of(rows: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            figure: float(np.mean([row[name][figure] for row in rows])) for figure in rows[0][name]
        }
        for name in rows[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=4, help="draws of all lengths; figures are means over them"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--real", action="store_true", help="two SGLang engines on CPU in place of simulated ones"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: case, method, figure"
    )
    args = parser.parse_args()
    if args.real:
        from scripts.bench.balancing_real import compare_real

        rows_by_case = {"two CPU engines": mean_of(compare_real(DEALERS, args.seeds))}
    else:
        rows_by_case = {
            name: mean_of([compare(*CASES[name], seed) for seed in range(args.seeds)])
            for name in args.cases
        }
    if args.json:
        print(json.dumps(rows_by_case))
        return
    for name, rows in rows_by_case.items():
        print(f"\n{name}")
        print(" " * 22, *(f"{figure:>13}" for figure in next(iter(rows.values()))))
        for method, row in rows.items():
            print(f"{method:22}", *(f"{value:13.4g}" for value in row.values()))


if __name__ == "__main__":
    main()
