"""How long a step's rollout takes in phases, how old its tokens are, and what is read again: by simulated steps.

All engines have an even share of the buffer, which is what an even load of them comes to; one of them is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from statistics import fmean

import numpy as np

from megarl.algos import hyperparameters_of
from megarl.config import Recipe
from megarl.placement.train_layout import divisors
from megarl.plan.batch import Samples
from megarl.plan.decode_step import EngineSpeed
from megarl.plan.engine_simulation import GroupLimits, SimulatedRequest, Speed
from megarl.plan.phase_simulation import LengthsOf, OpenGroup, PhasedStep, PhaseSizes, phased_steps
from megarl.plan.rollout_time import RolloutTime, SimulatedSpeed, sampled, whole_requests
from megarl.samples.buffer import num_phases, staleness_bound
from megarl.types import IntArray

_SEQUENCES = 256  # of a step that are simulated: of an engine with more, a part
# Over fewer steps the figures depend on whether the last one began with many open samples or with few: phases and steps
# take turns.
_STEPS = 24
# prompts of a step of a part, and longest responses that its cache holds
_LEAST_PROMPTS = 16
_LEAST_LONGEST = 8


@dataclass(frozen=True)
class PhasedRollout:
    """Means over steps, once as many groups are in flight as the recipe allows; of one engine, unless it says else.

    time: its seconds and tokens are those of a step, with the phase beside training; `longest` and `alone_s` are of a
    phase. phases: of a step.
    again_s: the seconds of `time.prefill_s` in which tokens of earlier phases are read; again_share: those tokens over
    the tokens of a step's responses. token_mean, token_max: age of trained tokens in versions; bound: the age that no
    token exceeds. open_sequences, open_tokens: of a phase, at most; the tokens with those that the phase adds.
    """

    phase_tokens: int
    prompts_in_flight: int
    phases: float
    again_s: float
    again_share: float
    token_mean: float
    token_max: int
    bound: int
    open_sequences: int
    open_tokens: int
    time: RolloutTime


@dataclass(frozen=True)
class _Part:
    """One of `groups` x `of_group` equal parts of an engine: some of its groups, and of these some slots and tokens."""

    groups: int = 1
    of_group: int = 1

    @property
    def divisor(self) -> int:
        return self.groups * self.of_group

    def limits(self, whole: GroupLimits) -> GroupLimits:
        share = self.of_group
        return replace(
            whole,
            groups=whole.groups // self.groups,
            slots=-(-whole.slots // share),
            cache=whole.cache // share,
            chunk=max(1, whole.chunk // share),
        )


@dataclass(frozen=True)
class _Phase:
    """What a phase took. sequences, tokens: of all open samples, the tokens with those that the phase adds.

    longest: the most tokens that it adds to a sample. most: the tokens of the longest response at its end.
    """

    total_s: float
    prefill_s: float
    tail_s: float
    running: int
    retracted: int
    retracted_tokens: float
    again_s: float
    again_tokens: int
    sequences: int
    tokens: int
    longest: int
    most: int


@dataclass(frozen=True)
class _Engine:
    """A part of an engine, and how it runs a phase. samples: of each prompt.

    engines: that share the open groups evenly. beside: of these, those that sample while the ranks learn.
    """

    speed: Speed
    limits: GroupLimits
    prompt_tokens: int
    samples: int
    engines: int
    beside: int

    def run(self, groups: Sequence[OpenGroup], beside_training: bool) -> _Phase:
        """groups: its share of those that are open; fewer engines beside training have more each."""
        assigned = self._assigned(groups, self.beside if beside_training else self.engines)
        requests = [request for group in assigned for request in self._requests(group)]
        engine, ends = sampled(requests, self.speed, self.limits)
        again_s = sum(len(group.new) * self._read_s(group.done) for group in assigned if group.done)
        fresh = sum(not group.done for group in assigned) * min(self.samples, self.limits.groups)
        prompts_s = fresh * self._read_s(0)
        return _Phase(
            total_s=ends[-1],
            prefill_s=engine.prefill_s,
            tail_s=ends[-1] - ends[-1 - engine.most_running // 2],
            running=engine.most_running,
            retracted=engine.retracted,
            retracted_tokens=engine.tokens_again * len(groups) / len(assigned),
            again_s=engine.prefill_s * again_s / (again_s + prompts_s),
            again_tokens=sum(len(group.new) * group.done for group in groups),
            sequences=len(requests),
            tokens=sum(request.prompt_tokens + request.response_tokens for request in requests),
            longest=max(request.response_tokens for request in requests),
            most=max(group.done + int(group.new.max()) for group in groups),
        )

    def _assigned(self, groups: Sequence[OpenGroup], engines: int) -> list[OpenGroup]:
        """What each of so many engines has, in the same order: some of the groups several times."""
        count = -(-len(groups) * self.engines // engines)
        return [groups[place * engines // self.engines] for place in range(count)]

    def _requests(self, group: OpenGroup) -> list[SimulatedRequest]:
        """Each attention group reads a prompt once; what earlier phases have sampled differs from sample to sample."""
        return [
            SimulatedRequest(
                self.prompt_tokens + group.done,
                int(new),
                shares_prompt=not group.done and place >= self.limits.groups,
            )
            for place, new in enumerate(group.new)
        ]

    def _read_s(self, done: int) -> float:
        """Seconds to read the prompt and `done` tokens of a sample's response."""
        return sum(self.speed.prefill_s(self.prompt_tokens + done))


def phased_rollout(
    recipe: Recipe,
    speed: EngineSpeed,
    samples: Samples,
    limits: GroupLimits,
    *,
    beside: int = 0,
) -> PhasedRollout:
    """limits: of the groups of each of the recipe's engines.

    beside: engines that sample while the ranks learn; 0: all of them.
    """
    rollout = recipe.rollout
    engines = speed.layout.count
    per_prompt = samples.num_drawn // samples.drawn_prompts
    prompts = -(-samples.drawn_prompts // engines)
    part = _part(prompts, per_prompt, limits)
    phase_tokens = min(rollout.phase_tokens or limits.longest, limits.longest)
    in_flight = hyperparameters_of(recipe.algorithm.name, recipe.algorithm).num_drawn(
        rollout.in_flight
    )
    part_prompts = -(-prompts // part.divisor)
    in_flight = -(-in_flight // (engines * part.divisor))
    sizes = PhaseSizes(part_prompts, in_flight, per_prompt, phase_tokens, rollout.ahead)
    requests = whole_requests(samples, engines, limits.groups)
    lengths = np.array([request.response_tokens for request in requests], np.int64)
    of_part = replace(part.limits(limits), longest=phase_tokens)
    of_parts = SimulatedSpeed(speed, part.groups, part.of_group)
    engine = _Engine(
        of_parts, of_part, samples.prompt_tokens, per_prompt, engines, beside or engines
    )
    # Steps until the first of all ages is trained on.
    before = num_phases(recipe) - 1 + -(-in_flight // part_prompts) - 1 + rollout.ahead
    steps = phased_steps(sizes, _lengths_of(lengths, part, per_prompt), engine.run)
    # all steps are alike where nothing is carried from one to the next
    num_steps = _STEPS if before else 1
    return _figures(recipe, speed, samples, list(islice(steps, before, before + num_steps)), part)


def _part(prompts: int, per_prompt: int, limits: GroupLimits) -> _Part:
    """The smallest part with `_SEQUENCES`, of whole groups as far as possible."""
    most = max(1, min(prompts * per_prompt // _SEQUENCES, prompts // _LEAST_PROMPTS))
    groups = max(divisor for divisor in divisors(limits.groups) if divisor <= most)
    return _Part(
        groups, max(1, min(most // groups, limits.cache // (_LEAST_LONGEST * limits.longest)))
    )


def _lengths_of(lengths: IntArray, part: _Part, per_prompt: int) -> LengthsOf:
    """Tickets have the lengths of an engine's step in their order, then again and again in others.

    A part has as many short and as many long ones as the engine.
    """
    if part.divisor > 1:
        lengths = np.random.default_rng(0).permutation(
            np.sort(lengths)[part.divisor // 2 :: part.divisor]
        )

    @cache
    def turn(number: int) -> IntArray:
        if number:
            return np.random.default_rng(number).permutation(lengths)
        return lengths

    @cache
    def of_drawn(prompt_index: int) -> IntArray:
        places = range(prompt_index * per_prompt, (prompt_index + 1) * per_prompt)
        return np.array(
            [turn(place // len(lengths))[place % len(lengths)] for place in places], np.int64
        )

    return of_drawn


def _figures(
    recipe: Recipe,
    speed: EngineSpeed,
    samples: Samples,
    steps: Sequence[PhasedStep[_Phase]],
    part: _Part,
) -> PhasedRollout:
    phases = [phase for step in steps for phase in step.all_results]
    tokens_by_age = np.zeros(1 + max(step.oldest for step in steps))
    for step in steps:
        tokens_by_age[: step.oldest + 1] += step.tokens_by_age
    tokens = float(tokens_by_age.sum()) / len(steps)

    def of_step(name: str) -> float:
        """The mean over steps of what their phases have together."""
        return fmean(sum(getattr(phase, name) for phase in step.all_results) for step in steps)

    def most(name: str) -> int:
        return max(getattr(phase, name) for phase in phases)

    prefill_s = of_step("prefill_s")
    total_s = of_step("total_s")
    longest = most("longest")
    alone = speed.step_s(1, samples.prompt_tokens + most("most") - longest / 2)
    beside_s: tuple[float, ...] = ()
    if recipe.rollout.ahead:
        beside_s = tuple(step.beside.total_s if step.beside else 0.0 for step in steps)
    time = RolloutTime(
        prefill_s=prefill_s,
        decode_s=total_s - prefill_s,
        tail_s=of_step("tail_s"),
        running=part.divisor * most("running"),
        tokens_per_s=float(samples.responses.sum()) / total_s,
        retracted=round(part.divisor * of_step("retracted")),
        again_share=of_step("retracted_tokens") / tokens,
        longest=longest,
        alone_s=longest * alone,
        beside_s=beside_s,
    )
    hyperparameters = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
    return PhasedRollout(
        phase_tokens=recipe.rollout.phase_tokens or recipe.longest_sample,
        prompts_in_flight=recipe.rollout.in_flight,
        phases=fmean(len(step.all_results) for step in steps),
        again_s=of_step("again_s"),
        again_share=of_step("again_tokens") / tokens,
        token_mean=float(tokens_by_age @ np.arange(len(tokens_by_age)))
        / float(tokens_by_age.sum()),
        token_max=len(tokens_by_age) - 1,
        bound=staleness_bound(recipe, hyperparameters),
        open_sequences=part.divisor * most("sequences"),
        open_tokens=part.divisor * most("tokens"),
        time=time,
    )
