"""Bitwise reproducible samples, whatever other requests are in the batch.

A sample depends on its batch in two ways. Random numbers: SGLang draws them for the whole batch; here each sample has a
seed of its own. Arithmetic: a kernel that is chosen by the batch size changes the order of addition. On a GPU SGLang's
deterministic inference has batch-invariant kernels; for CPU this module has them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megarl.device import DEVICE
from megarl.types.sampling import sample_seed

_BLOCK = 16  # rows of every matrix product on CPU
# a row's width is a multiple: it starts on a cache line and fills whole vector registers
_LINE = 32
_LOW = 0xFFFFFFFF


def server_arguments(room: int, device: str) -> dict[str, Any]:
    """SGLang's server arguments. On CPU they rule out shared prefixes, chunked prefills and retraction.

    room: tokens that the KV cache needs.
    """
    if device != "cpu":
        return {"enable_deterministic_inference": True}
    return {"disable_radix_cache": True, "chunked_prefill_size": room, "max_total_tokens": room}


def generator_seed(seed: int, index: int) -> int:
    """A 32-bit seed (NumPy's range) of generator `index`; generators of one `seed` are independent of each other."""
    return sample_seed((seed,), index) >> 31


def patch_sglang() -> None:
    """Apply all patches; run in a scheduler before its model is built."""
    sample_by_seed()
    if DEVICE == "cpu":
        pass_on_seeds()
        hash_without_kernels()
        use_log_softmax()
        use_batch_invariant_kernels()
        reduce_in_rank_order()


def sample_by_seed() -> None:
    """Make the random number of a token depend on its id alone, so that other requests cannot change a sample.

    SGLang's seeded sampler uses a token's rank in the sorted row instead if any request of the batch uses top-p.
    """
    from sglang.srt.layers import sampler

    def choose(
        self: Any,
        probs: Tensor,
        info: Any,
        positions: Tensor,
        simple_sampling_case: bool,
    ) -> tuple[Tensor, None]:
        if simple_sampling_case:
            kept = probs
        else:
            kept = truncated(probs, info.top_ks, info.top_ps)
        chosen = sampler.multinomial_with_seed(torch.log(kept), info.sampling_seed, positions)
        return chosen.view(-1).to(torch.int32), None

    sampler_class: Any = sampler.Sampler
    sampler_class._sample_from_probs = choose


def truncated(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """probs [rows, vocabulary], with 0 for all but each row's top-k and top-p tokens; not renormalised."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    limit = top_ps[:, None]
    drop = (ranks >= top_ks[:, None]) | ((before > limit) & (limit < 1))
    return probs.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), 0.0)


def pass_on_seeds() -> None:
    """Pass the requests' seeds to the sampler: SGLang does so only in deterministic inference, which CPU cannot use."""
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
    """Compute SGLang's random numbers in torch; its own implementation is a CUDA kernel."""
    from sglang.srt.layers import sampler

    sampler.murmur_hash32 = murmur_hash  # type: ignore[assignment]


def use_log_softmax() -> None:
    """Compute logprobs as log_softmax always: SGLang uses log(softmax) unless a batch is greedy or deterministic."""
    from sglang.srt.layers import sampler

    class Sampler(sampler.Sampler):
        def __init__(self) -> None:
            super().__init__()
            self.enable_deterministic = True

    sampler.Sampler = Sampler


def murmur_hash(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bits) of the words (seed low, seed high, position, column): int64 [rows, columns] below 2^32.

    seeds: uint64 [rows]; positions: [rows]; columns: [columns]. Int64 products wrap, but their low 32 bits are exact.
    """
    seeds = seeds.view(torch.int64)
    mixed = torch.zeros_like(seeds)
    for word in (seeds & _LOW, (seeds >> 32) & _LOW, positions.to(torch.int64)):
        mixed = _mix(mixed, word)
    mixed = _mix(mixed[:, None], columns.to(torch.int64)[None]) ^ 16
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _LOW
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _LOW
    return mixed ^ (mixed >> 16)


def _mix(mixed: Tensor, word: Tensor) -> Tensor:
    word = (_rotated((word * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
    return (_rotated(mixed ^ word, 13) * 5 + 0xE6546B64) & _LOW


def _rotated(word: Tensor, by: int) -> Tensor:
    return ((word << by) | (word >> (32 - by))) & _LOW


def use_batch_invariant_kernels() -> None:
    """Replace the CPU operators of torch whose result for a row depends on the other rows; models use no others.

    Matrix products: torch multiplies few rows in another order than many. Here all products are computed in blocks of
    the same height, padded with zeros: one kernel, in which a row's position does not matter. sigmoid and silu: torch
    rounds the last elements, which do not fill a vector register, differently. Here rows are padded with zeros.
    """
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the kernels that are replaced
        library.impl("mm", product)
        library.impl("addmm", sum_with_product)
        library.impl("bmm", batched_product)
        library.impl("bmm.out", lambda left, right, *, out: out.copy_(batched_product(left, right)))
        library.impl("sigmoid", lambda tensor: _in_whole_vectors(tensor, torch.sigmoid))
        library.impl("silu", lambda tensor: _in_whole_vectors(tensor, torch.ops.aten.silu.out))
    _KEPT_LIBRARIES.append(library)


# a Library that is garbage collected removes its kernels
_KEPT_LIBRARIES: list[torch.library.Library] = []


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [rows, inner] x right [inner, columns]"""
    (rows, inner) = left.shape
    width = right.shape[1]
    height = _up(rows, _BLOCK)
    padded = left.new_zeros(height, _up(inner, _LINE))[:, :inner]
    padded[:rows] = left
    out = left.new_empty(height, _up(width, _LINE))[:, :width]
    for start in range(0, height, _BLOCK):
        torch.mm(padded[start : start + _BLOCK], right, out=out[start : start + _BLOCK])
    return out[:rows].contiguous()


def sum_with_product(
    addend: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """beta addend + alpha left x right"""
    return product(left, right) * alpha + addend * beta


def batched_product(left: Tensor, right: Tensor) -> Tensor:
    """left [batch, rows, inner] x right [batch, inner, columns]"""
    if not len(left):
        return left.new_empty(0, left.shape[1], right.shape[2])
    return torch.stack([product(*matrices) for matrices in zip(left, right, strict=True)])


def _in_whole_vectors(tensor: Tensor, function: Callable[..., Tensor]) -> Tensor:
    """Apply an elementwise function to a tensor of at least one dimension, with rows padded to whole vectors."""
    width = tensor.shape[-1]
    padded = F.pad(tensor, (0, _up(width, _LINE) - width))
    return function(padded, out=torch.empty_like(padded))[..., :width].contiguous()


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def reduce_in_rank_order() -> None:
    """All-reduce in rank order: gloo's order of addition depends on the tensor's size and on the element's place."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    def all_reduce(self: Any, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self.device_group)
        return tensor.copy_(sum(parts[1:], start=parts[0]))

    coordinator: Any = GroupCoordinator
    coordinator.all_reduce = all_reduce
