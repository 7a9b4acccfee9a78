"""Sets the attributes of a rank's parameters by which Megatron counts gradient norms and sums gradients over TP.

These are `tensor_model_parallel` and `sequence_parallel`. They follow from the weight map alone, whatever the layers'
library has set: TransformerEngine 2.14 leaves `tensor_model_parallel` unset on grouped experts, so that the gradient
norm would miss them on all TP ranks but the first, and sets it on latent attention's duplicated down projections, so
that each rank would count them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megarl.model.lora_pairs import is_factor
from megarl.parallel.param_names import named_parameters
from megarl.types.tensors import ModelChunks


def set_tp_attributes(
    chunks: ModelChunks, tp_split_params: Collection[str], sequence_parallel: bool
) -> None:
    """Set the attributes of a rank's weights, not of the factors of adapters; call it before DDP wraps the chunks.

    tp_split_params: the weights that are split over the TP ranks, by the names of the weight map. The norm counts them
    on each of these ranks (`tensor_model_parallel`), the others on the first one. With sequence_parallel each TP rank
    has a part of the tokens, and Megatron sums the gradients of the other weights over TP (`sequence_parallel`).
    """
    for name, param in named_parameters(chunks):
        if is_factor(name):
            continue
        weight: Any = param
        weight.tensor_model_parallel = name in tp_split_params
        weight.sequence_parallel = sequence_parallel and name not in tp_split_params
