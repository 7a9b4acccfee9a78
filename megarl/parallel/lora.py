"""Adapters (LoRA, arXiv 2106.09685) of a rank's frozen model, equal in every layout to those of one rank.

Rule of placement: the delta B A x of a linear layer is in the parallel state of the layer's output.

| layer | A | B | messages, `rank` wide |
|---|---|---|---|
| split by columns | whole, on this rank's own tokens | cut as the weight's rows | A x gathered over the sequence |
| split by rows | cut as the weight's columns | whole, on this rank's own tokens | A x reduced and scattered |
| duplicated (MLA's down projections) | whole | whole | none |
| of a routed expert | as above | as above | none: the dispatcher gathers tokens and sums outputs over ETP |

TransformerEngine's layers have the same parallel states. One that fuses the norm before it does not return the
normalised input, so the adapter's hook computes the norm again; a grouped layer has an adapter for each local expert.

Where the weights are the sums with the adapters (training/merged_weights.py) the hook adds 0 to the layer's output and
gives the factors their gradient.

A factor that several ranks hold gets a part of its gradient on each of them. Which group sums it is marked on the
parameter: Megatron sums `sequence_parallel` over TP, and `sum_over_etp` sums the others over ETP.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megarl.device import DEVICE
from megarl.model.lora_pairs import CHILD, LoraPair, LoraSize
from megarl.parallel import groups
from megarl.parallel.local_spec import DuplicatedLinear
from megarl.parallel.param_names import named_modules
from megarl.parallel.shared_weights import heads
from megarl.types import UserError
from megarl.types.tensors import ModelChunks

_HINT = "leave lora out, or its layer out of lora.targets"
# elements between the starts of two weights of a flat buffer: kernels want 16 bytes at least
_ALIGNED = 64
Cut = Literal["columns", "rows", "nothing"]
TE_CUTS: dict[str, Cut] = {  # by the names of Megatron's classes, which need TransformerEngine
    "TELayerNormColumnParallelLinear": "columns",
    "TEColumnParallelLinear": "columns",
    "TERowParallelLinear": "rows",
    "TELinear": "nothing",
    "TEColumnParallelGroupedLinear": "columns",
    "TERowParallelGroupedLinear": "rows",
}
CUTS: dict[type[torch.nn.Module], Cut] = {
    ColumnParallelLinear: "columns",
    RowParallelLinear: "rows",
    DuplicatedLinear: "nothing",
    **({getattr(te, name): cut for name, cut in TE_CUTS.items()} if te.HAVE_TE else {}),
}


@dataclass
class Adapters:
    """All adapters of a rank, which `without` switches off together.

    are_in_weights: the weights are the sums with the adapters, so that these add their gradient alone.
    """

    is_on: bool = True
    are_in_weights: bool = False

    @contextmanager
    def without(self) -> Iterator[None]:
        """Compute with the frozen model alone inside the block."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class FactorPair(torch.nn.Module):
    """The factors A [rank, this rank's columns] and B [this rank's rows, rank] of one tensor; B is 0.

    Where this rank has none of the tensor's rows, B is empty and no parameter.
    """

    def __init__(self, pair: LoraPair, rank: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.held = pair
        a = torch.from_numpy(_drawn(pair, rank, seed)[:, slice(*pair.cols)].copy())
        # a copy: the storage of an array of NumPy's cannot be freed while an engine has the memory
        self.A = torch.nn.Parameter(a.to(DEVICE, dtype, copy=True))
        (start, end) = pair.rows
        b = torch.zeros(end - start, rank, dtype=dtype, device=DEVICE)
        self.B = torch.nn.Parameter(b) if len(b) else b


def _drawn(pair: LoraPair, rank: int, seed: int) -> np.ndarray:
    """The whole factor A of a tensor, which the seed and the tensor's name decide.

    Uniform between +-1 / sqrt(fan-in), as PEFT's.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed} {pair.name}".encode()).digest()[:16], "big")
    fan_in = pair.size[1]
    uniform = np.random.Generator(np.random.Philox(key=key)).random((rank, fan_in), np.float32)
    return (2 * uniform - 1) / np.float32(math.sqrt(fan_in))


class Adapter(torch.nn.Module):
    """The adapter of one weight of a linear layer: a pair of factors for each tensor of the checkpoint that it has."""

    def __init__(
        self, weight: Any, pairs: Sequence[LoraPair], size: LoraSize, cut: Cut, seed: int
    ) -> None:
        super().__init__()
        self._cut = cut
        self._is_expert = pairs[0].is_expert
        self._rank = size.rank_of(self._is_expert)
        self._scale = size.scale_of(self._is_expert)
        self._is_parallel = not self._is_expert and groups.tp_group().size() > 1
        self._num_rows = len(weight)
        self._places = sorted(
            (place, index) for index, pair in enumerate(pairs) for place in pair.places
        )
        for pair in pairs:
            factor_pair = FactorPair(pair, self._rank, weight.dtype, seed)
            self._mark(factor_pair, getattr(weight, "allreduce", True))
            self.add_module(pair.leaf, factor_pair)

    @property
    def pairs(self) -> list[FactorPair]:
        """In the order in which their A are stacked."""
        return [pair for pair in self.children() if isinstance(pair, FactorPair)]

    def _mark(self, pair: FactorPair, is_in_dense_group: bool) -> None:
        """Say which part of the factors this rank holds, as Megatron's sums, norms and buffers read it."""
        for factor, is_cut in ((pair.A, self._cut == "rows"), (pair.B, self._cut == "columns")):
            marked: Any = factor
            marked.allreduce = is_in_dense_group
            if self._is_expert:
                etp = groups.etp_group()
                # else the norm counts it on the first rank of TP alone
                marked.tensor_model_parallel = True
                marked.sum_over_etp = not is_cut and etp.size() > 1
                # the norm counts it once over ETP
                marked.shared = marked.sum_over_etp and etp.rank() > 0
            else:
                marked.tensor_model_parallel = is_cut
                marked.sequence_parallel = not is_cut and self._is_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """The delta, in the parallel state of the linear layer's output; hidden: the layer's input."""
        pairs = self.pairs
        narrow = F.linear(hidden, torch.cat([pair.A for pair in pairs]))
        if self._is_parallel and self._cut == "columns":
            narrow = gather_from_sequence_parallel_region(narrow, group=groups.tp_group())
        elif self._is_parallel and self._cut == "rows":
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=groups.tp_group())
        narrow = narrow * self._scale
        deltas = [
            F.linear(part, pair.B)
            for part, pair in zip(narrow.split(self._rank, -1), pairs, strict=True)
        ]
        return self._assembled(deltas)

    def _assembled(self, deltas: Sequence[Tensor]) -> Tensor:
        """The deltas of the tensors in the order of the layer's output, and 0 in rows without an adapter."""
        if len(deltas) == 1 and deltas[0].shape[-1] == self._num_rows:
            return deltas[0]
        zeros = deltas[0].new_zeros(()).expand(*deltas[0].shape[:-1], self._num_rows)
        # also of tensors without rows here, for the backward pass
        parts = [delta[..., :0] for delta in deltas]
        end = 0
        for (row, start, number), index in self._places:
            parts += [zeros[..., end:row], deltas[index][..., start : start + number]]
            end = row + number
        return torch.cat([*parts, zeros[..., end:]], -1)


class GroupedAdapter(torch.nn.ModuleList):
    """The adapters of a layer with a weight for each of this rank's experts; its input is sorted by expert."""

    def forward(self, hidden: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """[tokens, the layer's output]: each expert's delta of its own tokens."""
        parts = hidden.split([*tokens_per_expert])
        return torch.cat([adapter(part) for adapter, part in zip(self, parts, strict=True)])


def attach(chunks: ModelChunks, pairs: Sequence[LoraPair], size: LoraSize, seed: int) -> Adapters:
    """Freeze this rank's model chunks and give their linear layers adapters; call it before DDP wraps the chunks.

    pairs: of this rank, in the order of the layers. The weights may still be undefined. Raises UserError, with its
    name, for a layer of a type whose parallel state is not known.
    """
    adapters = Adapters()
    for module in chunks:
        chunk: Any = module
        chunk.requires_grad_(False)
        chunk.has_adapters = True
        _join_storages(chunk)
        if hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(_require_gradient)
    # by the layer's path, then by the name of its weight
    layers: dict[str, dict[str, list[LoraPair]]] = {}
    for pair in pairs:
        path, _, weight = pair.param.rpartition(".")
        layers.setdefault(path, {}).setdefault(weight, []).append(pair)
    modules = named_modules(chunks)
    for path, of_weights in layers.items():
        if path not in modules:
            raise UserError("lora", f"the model has no layer {path}", _HINT)
        linear = modules[path]
        cut = CUTS.get(type(linear))
        if cut is None:
            known = ", ".join(kind.__name__ for kind in CUTS)
            problem = f"{path} is a {type(linear).__name__}, and adapters are for {known}"
            raise UserError("lora", problem, _HINT)
        layer_adapters = [
            Adapter(getattr(linear, weight), held, size, cut, seed)
            for weight, held in of_weights.items()
        ]
        if "weight" in of_weights:
            of_layer = layer_adapters[0]
        else:
            of_layer = GroupedAdapter(layer_adapters)
        linear.add_module(CHILD, of_layer)
        linear.register_forward_hook(_adding(of_layer, adapters))
    return adapters


def sum_over_etp(chunks: ModelChunks) -> None:
    """Sum the gradients of factors that the ranks of one expert hold alike; after those over data-parallel ranks."""
    marked: Any = [
        param
        for chunk in chunks
        for param in chunk.parameters()
        if getattr(param, "sum_over_etp", False)
    ]
    if not marked:
        return
    flat = torch.cat([param.main_grad.flatten() for param in marked])
    dist.all_reduce(flat, group=groups.etp_group())
    for param, summed in zip(marked, flat.split([param.numel() for param in marked]), strict=True):
        param.main_grad.copy_(summed.view_as(param))


def _adding(adapter: torch.nn.Module, adapters: Adapters) -> Any:
    def add(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if not adapters.is_on or (adapters.are_in_weights and not torch.is_grad_enabled()):
            return output
        (hidden, *others) = inputs
        (base_output, bias) = output
        if adapters.are_in_weights:
            hidden = hidden.detach()  # its gradient comes by the weights
        if hasattr(linear, "layer_norm_weight"):
            hidden = F.rms_norm(hidden, hidden.shape[-1:], linear.layer_norm_weight, linear.eps)
        delta = adapter(hidden, *others)
        return base_output + (delta - delta.detach() if adapters.are_in_weights else delta), bias

    return add


def _require_gradient(embedding: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Let the gradient reach the first layers.

    The embedding is frozen, and Megatron's recomputation runs no backward pass for an input without a gradient.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        return output.requires_grad_()
    return output


def _join_storages(chunk: torch.nn.Module) -> None:
    """Move the frozen parameters of each layer into one flat buffer, as DDP does with trained parameters.

    Engines map storages, and a storage for each expert's weight would be too many handles. A score head, which is not
    frozen, stays where it is.
    """
    decoder: Any = chunk.decoder
    joined = {id(head) for head in heads([chunk])}
    for layer in decoder.layers:
        params = [*layer.parameters()]
        _join(params)
        joined |= set(map(id, params))
    _join([param for param in chunk.parameters() if id(param) not in joined])


def _join(params: Sequence[torch.nn.Parameter]) -> None:
    for dtype in {param.dtype for param in params}:
        alike = [param for param in params if param.dtype == dtype]
        sizes = [-(-param.numel() // _ALIGNED) * _ALIGNED for param in alike]
        flat = torch.empty(sum(sizes), dtype=dtype, device=alike[0].device)
        for param, place in zip(alike, flat.split(sizes), strict=True):
            place[: param.numel()].copy_(param.data.flatten())
            param.data = place[: param.numel()].view(param.shape)
