"""How long sampling takes: the events of the engine with the most prompts, as SGLang and the balancer let them run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megarl.plan.batch import Samples
from megarl.plan.decode_step import EngineSpeed
from megarl.plan.engine_simulation import (
    GroupLimits,
    OfGroups,
    SimulatedEngine,
    SimulatedRequest,
    Speed,
    observe_lengths,
    simulate,
)
from megarl.plan.turns import TURN_S
from megarl.rollout.load_balancing import Capacity, RequestBalancer

_LONG = 1_000_000  # tokens of a context, to divide out what each costs


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of the engine with the most prompts. tail_s: when at most half as many are left as once ran together.

    running: sequences at once, at most. tokens_per_s: sampled by all engines together, over the whole rollout.

    retracted: how often a sequence lost its cache in that engine. again_share: tokens that it read once more for that,
    over those of its responses.

    longest: sampled tokens of its longest response, which follow one another. alone_s: their seconds in an engine that
    runs nothing else: no engine of this layout has a shorter rollout.

    turns_s: between the turns of the longest episode, in which it is not sampled; 0 without episodes.

    beside_s: of these seconds, those that are sampled while the ranks learn (`rollout.ahead`), of each simulated step.
    """

    prefill_s: float
    decode_s: float
    tail_s: float
    running: int
    tokens_per_s: float
    retracted: int
    again_share: float
    longest: int
    alone_s: float
    beside_s: tuple[float, ...] = ()
    turns_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s + self.turns_s

    def longest_s(self, engines: int) -> float:
        """At most about how long the longest episode takes, beside as many others as run at once in `engines` engines.

        Its steps are as long as the whole rollout's in the mean; 0 where nothing is sampled.
        """
        if not self.tokens_per_s:
            return 0.0
        step_s = self.running * engines / self.tokens_per_s
        return min(self.total_s, self.longest * step_s + self.turns_s)

    @property
    def mean_beside_s(self) -> float:
        """Seconds of a step in which engines sample while the ranks learn, or would, did these not end before."""
        if self.beside_s:
            return fmean(self.beside_s)
        return 0.0

    @property
    def before_s(self) -> float:
        """Seconds of a step in which its training waits for samples."""
        left = self.total_s - self.mean_beside_s
        # 0 and not what rounding leaves
        if left > 1e-9 * self.total_s:
            return left
        return 0.0

    def waited_s(self, learning_s: float) -> float:
        """Mean seconds of a step in which ranks that learn for so long wait for what is sampled meanwhile."""
        if self.beside_s:
            return fmean(max(0.0, sampling_s - learning_s) for sampling_s in self.beside_s)
        return 0.0


NO_ROLLOUT = RolloutTime(0.0, 0.0, 0.0, 0, 0.0, 0, 0.0, 0, 0.0)


class SimulatedSpeed:
    """An engine's seconds for the simulation. A step's are linear in the cached tokens, whatever runs.

    Where a part of the engine is simulated, `groups` x `of_group` parts run the same: so many of its groups are of
    other parts for each that is simulated, and each of its groups has so many times the sequences and tokens.
    """

    def __init__(self, speed: EngineSpeed, groups: int = 1, of_group: int = 1) -> None:
        self._speed = speed
        self._groups = groups
        self._of_group = of_group
        self._without_cache: dict[int, float] = {}  # by sequences
        self._token_s = (speed.step_s(1, _LONG) - speed.step_s(1, 0)) / _LONG

    def step_s(self, running: OfGroups, held: OfGroups) -> float:
        """All groups wait for the one with the fullest cache."""
        sequences = self._groups * self._of_group * int(running.sum())
        if sequences not in self._without_cache:
            self._without_cache[sequences] = self._speed.step_s(sequences, 0)
        fullest = self._of_group * float(held.max())
        return self._without_cache[sequences] + self._token_s * (self._groups * len(held)) * fullest

    def prefill_s(self, tokens: int) -> tuple[float, float]:
        of_group, of_all = self._speed.prefill_s(tokens)
        return self._of_group * of_group, self._groups * self._of_group * of_all


def rollout_time(speed: EngineSpeed, samples: Samples, limits: GroupLimits) -> RolloutTime:
    """limits: of each engine's groups. The balancer has seen a round of such samples before."""
    requests = whole_requests(samples, speed.layout.count, limits.groups)
    engine, ends = sampled(requests, SimulatedSpeed(speed), limits)
    lengths = [request.response_tokens for request in requests]
    longest = max(lengths)
    turns_s = TURN_S * (max(request.turns for request in requests) - 1)
    return RolloutTime(
        prefill_s=engine.prefill_s,
        decode_s=ends[-1] - engine.prefill_s,
        tail_s=ends[-1] - ends[-1 - engine.most_running // 2],
        running=engine.most_running,
        tokens_per_s=samples.sampled_tokens / (ends[-1] + turns_s),
        retracted=engine.retracted,
        again_share=engine.tokens_again / sum(lengths),
        longest=longest,
        alone_s=longest * speed.step_s(1, samples.prompt_tokens + longest / 2) + turns_s,
        turns_s=turns_s,
    )


def rough_rollout_s(speed: EngineSpeed, samples: Samples, room: int) -> float:
    """About the seconds of `rollout_time` without a simulation; room: sequences of all ages that an engine holds.

    All room is in use until the mean response has passed, and the longest response ends alone.
    """
    responses = samples.responses
    engines = speed.layout.count
    running = max(1, min(room, math.ceil(len(responses) / engines)))
    full_s = (
        samples.sampled_tokens / engines / running * speed.step_s(running, samples.running_tokens)
    )
    longest = int(responses.max())
    sampled_share = 1 - samples.turns.observed_share
    left = sampled_share * (longest - float(responses.mean()))
    turns_s = TURN_S * (samples.turns.turns_of(longest) - 1)
    return full_s + left * speed.step_s(1, samples.prompt_tokens + longest / 2) + turns_s


def sampled(
    requests: Sequence[SimulatedRequest], speed: Speed, limits: GroupLimits
) -> tuple[SimulatedEngine, list[float]]:
    """(an engine that has sampled all of the requests, the seconds at which each was done)."""
    engine = SimulatedEngine(limits, speed)
    balancer = RequestBalancer(
        [Capacity(limits.slots, limits.cache)] * limits.groups, limits.longest
    )
    observe_lengths(balancer, [request.added_tokens for request in requests])
    waiting = deque(requests)

    def send() -> None:
        while waiting and (group := balancer.assign(waiting[0].prompt_tokens)) is not None:
            engine.submit(waiting.popleft(), group)

    def finished(_: int, group: int, request: SimulatedRequest) -> None:
        balancer.finish(group, request.prompt_tokens, request.added_tokens)
        send()

    send()
    return engine, simulate([engine], finished)


def whole_requests(samples: Samples, engines: int, groups: int) -> list[SimulatedRequest]:
    """Of the engine with the most prompts; each group reads a prompt once, and its samples are spread evenly."""
    per_prompt = samples.num_drawn // samples.drawn_prompts
    prompts = -(-samples.drawn_prompts // engines)
    count = prompts * per_prompt
    lengths = samples.responses[:: max(1, len(samples.responses) // count)][:count]
    requests = []
    for place, length in enumerate(map(int, lengths)):
        observed = samples.turns.observed_of(length)
        request = SimulatedRequest(
            samples.prompt_tokens,
            length - observed,
            shares_prompt=place % per_prompt >= groups,
            observed_tokens=observed,
            turns=samples.turns.turns_of(length),
        )
        requests.append(request)
    return requests
