"""How long sampling takes: the decoding steps that a set of lengths needs. An estimate."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.plan.batch import Samples
from megarl.plan.decode_step import EngineSpeed


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of the engine with the most prompts. tail_s: from when no sequence waits and half of the slots are empty.

    running: sequences at once, at most. tokens_per_s: of all engines together, over the whole rollout.

    longest: tokens of its longest response, which follow one another. alone_s: their seconds in an engine that runs
    nothing else: no engine of this layout has a shorter rollout.
    """

    prefill_s: float
    decode_s: float
    tail_s: float
    running: int
    tokens_per_s: float
    longest: int
    alone_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def rollout_time(speed: EngineSpeed, samples: Samples, concurrency: int) -> RolloutTime:
    """concurrency: sequences that an engine may run at once, by its KV cache and its settings."""
    per_prompt, engines = samples.num_drawn // samples.drawn_prompts, speed.layout.count
    prompts = -(-samples.drawn_prompts // engines)
    lengths = samples.responses[:: max(1, len(samples.responses) // (prompts * per_prompt))]
    lengths = [int(length) for length in lengths[: prompts * per_prompt]]
    slots = max(1, min(concurrency, len(lengths)))
    longest = max(lengths)

    def step_s(running: int, age: float) -> float:
        return speed.step_s(running, samples.prompt_tokens + age)

    decode, tail = decode_s(lengths, slots, step_s)
    alone, _ = decode_s([longest], 1, step_s)
    # Each attention group reads the prompts of its samples, which the groups share evenly.
    prefill = speed.prefill_s(prompts * min(per_prompt, speed.layout.dp), samples.prompt_tokens)
    tokens_per_s = float(samples.responses.sum()) / (prefill + decode)
    return RolloutTime(prefill, decode, tail, slots, tokens_per_s, longest, alone)


def decode_s(lengths: Sequence[int], slots: int, step_s: Callable[[int, float], float]) -> tuple[float, float]:
    """(all, the tail's) seconds of continuous batching: a sequence that ends gives its slot to the next.

    step_s(running, mean age in tokens). All that run get one token a step, so that between two ends nothing changes but
    ages, of which the middle is taken.
    """
    ends = [(length, 0) for length in lengths[:slots]]  # (step of its last token, step of its start)
    heapq.heapify(ends)
    starts, now, done, seconds, tail = 0, 0, len(ends), 0.0, 0.0
    while ends:
        end, start = ends[0]
        if end > now:
            running = len(ends)
            spent = (end - now) * step_s(running, (now + end) / 2 - starts / running)
            seconds += spent
            tail += spent if done == len(lengths) and running <= slots // 2 else 0.0
        now = end
        heapq.heappop(ends)
        starts -= start
        if done < len(lengths):
            heapq.heappush(ends, (now + lengths[done], now))
            starts, done = starts + now, done + 1
    return seconds, tail
