"""Samples that repeat to the last bit, whatever else the engine computes at the same time.

Two things make a sample depend on its neighbours. The random numbers: SGLang draws them for a whole batch; here each
sample draws by a seed of its own. And the arithmetic: a kernel that is chosen by the batch's size adds up in another
order. On a GPU SGLang's deterministic inference has kernels that do not; on CPU they are given here.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from megarl.device import DEVICE

_BLOCK = 16  # rows of every matrix product on CPU
_LINE = 32  # columns to whose multiple a row is laid out: it starts on a cache line and is whole vector registers
_LOW = 0xFFFFFFFF


def server_arguments(context_tokens: int, concurrency: int, device: str) -> dict[str, Any]:
    """SGLang's server arguments. On CPU a prompt is computed once and whole: no shared prefix, chunk or retreat."""
    if device != "cpu":
        return {"enable_deterministic_inference": True}
    room = context_tokens * concurrency
    return {"disable_radix_cache": True, "chunked_prefill_size": room, "max_total_tokens": room}


def sample_seed(stream: Sequence[int], index: int) -> int:
    """The seed of sample `index` of a prompt that `stream` names (run seed, step, prompt...); 63 bits."""
    name = ",".join(str(number) for number in (*stream, index))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def generator_seed(seed: int, index: int) -> int:
    """A seed of 32 bits (as NumPy takes it) for generator `index` of those that share `seed` and draw independently."""
    return sample_seed((seed,), index) >> 31


def patch_sglang() -> None:
    """Run in a scheduler before its model is built."""
    choose_by_seed()
    if DEVICE == "cpu":
        hand_on_seeds()
        hash_without_kernels()
        round_logprobs_alike()
        compute_rows_alike()
        add_in_rank_order()


def choose_by_seed() -> None:
    """SGLang's seeded sampler draws by a token's rank in the sorted row if any request of the batch wants top-p.

    Here a token's random number is always that of its id, so that a request draws the same in any company.
    """
    from sglang.srt.layers import sampler

    def choose(
        self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        kept = probs if simple_sampling_case else truncated(probs, info.top_ks, info.top_ps)
        chosen = sampler.multinomial_with_seed(torch.log(kept), info.sampling_seed, positions)
        return chosen.view(-1).to(torch.int32), None

    sampler_class: Any = sampler.Sampler
    sampler_class._sample_from_probs = choose


def truncated(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """probs [rows, vocabulary] with 0 for all but each row's top-k and top-p tokens; not normalised again."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    limit = top_ps[:, None]
    drop = (ranks >= top_ks[:, None]) | ((before > limit) & (limit < 1))
    return probs.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), 0.0)


def hand_on_seeds() -> None:
    """SGLang's sampler learns of requests' seeds only in its deterministic inference, which refuses CPU's attention."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    info_class: Any = SamplingBatchInfo
    original = info_class.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return info

    info_class.from_schedule_batch = classmethod(from_schedule_batch)


def hash_without_kernels() -> None:
    """SGLang's random numbers come from a kernel of its own; the same ones from torch."""
    from sglang.srt.layers import sampler

    sampler.murmur_hash32 = murmur_hash  # type: ignore[assignment]


def round_logprobs_alike() -> None:
    """SGLang's logprobs are log_softmax where a whole batch is greedy or deterministic, and log(softmax) elsewhere."""
    from sglang.srt.layers import sampler

    class Sampler(sampler.Sampler):
        def __init__(self) -> None:
            super().__init__()
            self.enable_deterministic = True

    sampler.Sampler = Sampler


def murmur_hash(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits) of the words (seed low, seed high, position, column): int64 [rows, columns] below 2^32.

    seeds: uint64 [rows]; positions: [rows]; columns: [columns]. Int64 products wrap, but their low 32 bits are right.
    """
    seeds = seeds.view(torch.int64)
    mixed = torch.zeros_like(seeds)
    for word in (seeds & _LOW, (seeds >> 32) & _LOW, positions.to(torch.int64)):
        mixed = _mix(mixed, word)
    mixed = _mix(mixed[:, None], columns.to(torch.int64)[None]) ^ 16
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _LOW
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _LOW
    return mixed ^ (mixed >> 16)


def _mix(mixed: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (_rotated((word * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
    return (_rotated(mixed ^ word, 13) * 5 + 0xE6546B64) & _LOW


def _rotated(word: torch.Tensor, by: int) -> torch.Tensor:
    return ((word << by) | (word >> (32 - by))) & _LOW


def compute_rows_alike() -> None:
    """Where torch's CPU operators treat a row by its company, others take their places; a model has no more of them.

    Products: few rows are multiplied in another order than many. They are computed in blocks of one height, the last
    filled up with zeros: one kernel for all, in which a row's place makes no difference. sigmoid and silu: a tensor's
    last elements, which fill no vector register, are rounded otherwise. Rows are filled up with zeros.
    """
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is the intention
        library.impl("mm", product)
        library.impl("addmm", sum_with_product)
        library.impl("bmm", batched_product)
        library.impl("bmm.out", lambda left, right, *, out: out.copy_(batched_product(left, right)))
        library.impl("sigmoid", lambda tensor: _in_whole_vectors(tensor, torch.sigmoid))
        library.impl("silu", lambda tensor: _in_whole_vectors(tensor, torch.ops.aten.silu.out))
    _KEPT_LIBRARIES.append(library)


_KEPT_LIBRARIES: list[torch.library.Library] = []  # a Library that is collected takes its kernels away


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [rows, inner] x right [inner, columns]"""
    return _in_blocks(left, right.shape[1], lambda block, out: torch.mm(block, right, out=out))


def sum_with_product(
    addend: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """beta addend + alpha left x right"""
    return product(left, right) * alpha + addend * beta


def batched_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [batch, rows, inner] x right [batch, inner, columns]"""
    if not len(left):
        return left.new_empty(0, left.shape[1], right.shape[2])
    return torch.stack([product(one, other) for one, other in zip(left, right, strict=True)])


def _in_blocks(
    left: torch.Tensor, width: int, multiply: Callable[[torch.Tensor, torch.Tensor], Any]
) -> torch.Tensor:
    rows, inner = left.shape
    height = _up(rows, _BLOCK)
    padded = left.new_zeros(height, _up(inner, _LINE))[:, :inner]
    padded[:rows] = left
    out = left.new_empty(height, _up(width, _LINE))[:, :width]
    for start in range(0, height, _BLOCK):
        multiply(padded[start : start + _BLOCK], out[start : start + _BLOCK])
    return out[:rows].contiguous()


def _in_whole_vectors(tensor: torch.Tensor, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """An elementwise function of a tensor that has at least one dimension."""
    width = tensor.shape[-1]
    padded = F.pad(tensor, (0, _up(width, _LINE) - width))
    return function(padded, out=torch.empty_like(padded))[..., :width].contiguous()


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def add_in_rank_order() -> None:
    """gloo adds up a tensor's parts in different orders of ranks, and cuts it into parts by its size."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    def all_reduce(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self.device_group)
        return tensor.copy_(sum(parts[1:], start=parts[0]))

    coordinator: Any = GroupCoordinator
    coordinator.all_reduce = all_reduce
