"""The marks on parameters by which Megatron sums and counts gradients over the tensor-parallel ranks.

They follow from the weight map alone, whatever the layers' library has set: TransformerEngine 2.14 leaves grouped
experts unmarked, so that the gradient norm would miss them on all TP ranks but the first, and marks latent attention's
duplicated down projections as split, so that each rank would count them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from megarl.parallel.lora_pairs import is_factor
from megarl.parallel.param_names import named_parameters


def mark(chunks: Sequence[torch.nn.Module], split: Collection[str], sequence_parallel: bool) -> None:
    """Mark a rank's weights, not the factors of adapters; call it before DDP wraps the chunks.

    split: the weights that are split over the TP ranks, by the names of the weight map. The norm counts them on each of
    these ranks (`tensor_model_parallel`), the others on the first one. With sequence_parallel each TP rank has a part
    of the tokens, and Megatron sums the gradients of the other weights over TP (`sequence_parallel`).
    """
    for name, param in named_parameters(chunks):
        if is_factor(name):
            continue
        marked: Any = param
        marked.tensor_model_parallel = name in split
        marked.sequence_parallel = sequence_parallel and name not in split
