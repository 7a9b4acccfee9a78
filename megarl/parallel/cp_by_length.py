"""Context parallelism by length: each micro-batch has a group of ranks of its own, which Megatron's modules follow."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer


def follow_rows(chunk: torch.nn.Module) -> None:
    """Have attention and multi-token prediction of a chunk use the group of the row that they are given.

    Megatron 0.16.1 reads `PackedSeqParams.cp_group` in TransformerEngine's attention alone; its rotary embeddings and
    the shift of multi-token prediction read the module's own group, and latent attention refuses `local_cp_size`.
    """
    modules: Iterator[Any] = chunk.modules()
    for module in modules:
        if isinstance(module, Attention | MultiTokenPredictionLayer):
            setattr(module, "forward", partial(_forward, module))  # noqa: B010


def _forward(module: Any, *args: Any, packed_seq_params: PackedSeqParams, **kwargs: Any) -> Any:
    """The module's forward pass, computed by a copy of it with the row's group.

    A copy, because what is computed again in the backward pass, when the module has seen other rows, reads the group
    from the module that the forward pass had. It shares all parameters and submodules.
    """
    view = copy.copy(module)
    del view.forward
    if isinstance(module, MultiTokenPredictionLayer):
        view.cp_group = packed_seq_params.cp_group
    else:
        view.pg_collection = copy.copy(module.pg_collection)
        view.pg_collection.cp = packed_seq_params.cp_group
    return view.forward(*args, packed_seq_params=packed_seq_params, **kwargs)
