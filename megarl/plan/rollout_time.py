"""How long sampling takes: a roofline of one decoding step, and the steps that a set of lengths needs. An estimate."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megarl.config.hardware import Hardware
from megarl.parallel.engine_layout import EngineLayout
from megarl.plan.batch import Samples
from megarl.resharding.routes import item_bytes
from megarl.training.flops import forward_flops
from megarl.types import ModelShape

_REDUCES_PER_LAYER = 2  # one behind attention, one behind the MLP or the experts
_ACTIVATION_BYTES = 2  # of a number between layers


@dataclass(frozen=True)
class EngineSpeed:
    """One engine's decoding. weight_bytes: of all weights on a GPU; kv_bytes: of one token in a GPU's cache."""

    shape: ModelShape
    layout: EngineLayout
    hardware: Hardware
    gpus_per_node: int
    dtype: str
    weight_bytes: float
    kv_bytes: float

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of the routed experts' weights on a GPU."""
        shape, item = self.shape, 1 if self.layout.fp8 else item_bytes(self.dtype)
        experts = (shape.num_layers - shape.num_dense_layers) * shape.num_experts * 3
        return experts * shape.hidden_size * shape.moe_ffn_size * item / self.layout.tp

    @property
    def other_bytes(self) -> float:
        """Bytes of all other weights on a GPU."""
        return max(0.0, self.weight_bytes - self.expert_bytes)

    def step_s(self, running: int, context: float) -> float:
        """Seconds of one token for each of `running` sequences of `context` tokens in the mean.

        The slower of memory and products (Williams et al. 2009, the roofline), then the all-reduces. Each token
        chooses its experts evenly and by itself, so the share of experts that are read is 1 - (1 - k / E) ^ tokens.
        """
        shape, layout, card = self.shape, self.layout, self.hardware
        read = self.other_bytes + self.kv_bytes * running / layout.dp * context
        if shape.num_experts:
            read += self.expert_bytes * (1 - (1 - shape.experts_per_token / shape.num_experts) ** running)
        in_memory = read / (card.hbm_bytes_per_s * card.hbm_share)
        one_token = forward_flops(shape, math.ceil(context)) - forward_flops(shape, math.ceil(context) - 1)
        in_products = running * one_token / (layout.tp * self._flops_per_s)
        return max(in_memory, in_products) + self._reduces_s(running)

    def prefill_s(self, prompts: int, length: int) -> float:
        """Seconds to read the prompts, each once for all of its samples (SGLang's prefix cache)."""
        return prompts * forward_flops(self.shape, length) / (self.layout.tp * self._flops_per_s)

    @property
    def _flops_per_s(self) -> float:
        card = self.hardware
        peak = card.fp8_flops if self.layout.fp8 and card.fp8_flops else card.bf16_flops
        return peak * card.prefill_share

    def _reduces_s(self, running: int) -> float:
        """A ring brings and takes 2 (n - 1) / n of a message; over nodes each GPU has its share of it on the wire."""
        card, tp = self.hardware, self.layout.tp
        if tp == 1:
            return 0.0
        message = running * self.shape.hidden_size * _ACTIVATION_BYTES
        inside = min(tp, self.gpus_per_node)
        seconds = 2 * (inside - 1) / inside * message / (card.nvlink_bytes_per_s * card.nvlink_share)
        latency = card.nvlink_latency_s
        if tp > inside:
            nodes = tp // inside
            seconds += 2 * (nodes - 1) / nodes * message / inside / (card.nic_bytes_per_s * card.nic_share)
            latency = card.nic_latency_s
        return _REDUCES_PER_LAYER * self.shape.num_layers * (latency + seconds)


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of the engine with the most prompts. tail_s: from when no sequence waits and half of the slots are empty.

    running: sequences at once, at most. tokens_per_s: of all engines together, over the whole rollout.
    """

    prefill_s: float
    decode_s: float
    tail_s: float
    running: int
    tokens_per_s: float

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
    decode, tail = decode_s(lengths, slots, lambda running, age: speed.step_s(running, samples.prompt_tokens + age))
    prefill = speed.prefill_s(prompts, samples.prompt_tokens)
    return RolloutTime(prefill, decode, tail, slots, float(samples.responses.sum()) / (prefill + decode))


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
