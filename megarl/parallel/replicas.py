"""The tensors of a rank that other ranks hold too, by the kinds of placement/replicas.py."""

from __future__ import annotations

from typing import Any

import torch

from megarl.parallel.model import ROUTER_BIAS
from megarl.parallel.param_names import named_buffers, named_parameters
from megarl.placement.replicas import (
    DENSE,
    DENSE_WHOLE,
    EXPERT_GRADIENTS,
    EXPERTS,
    EXPERTS_WHOLE,
    GRADIENTS,
)
from megarl.types.tensors import ModelChunks

Replicated = dict[str, dict[str, torch.Tensor]]


def replicated_weights(chunks: ModelChunks, *, only_trained: bool) -> Replicated:
    """By kind and name, the weights of a rank's unwrapped model chunks, with the factors of adapters.

    only_trained: without frozen weights, which are no copies of each other where each rank adds its adapters to them.
    """
    weights: Replicated = {DENSE: {}, DENSE_WHOLE: {}, EXPERTS: {}, EXPERTS_WHOLE: {}}
    for name, param in named_parameters(chunks):
        if param.requires_grad or not only_trained:
            weights[_kind(param)][name] = param.detach()
    for name, buffer in named_buffers(chunks):
        if name.endswith(ROUTER_BIAS):
            weights[DENSE_WHOLE][name] = buffer.detach()
    return weights


def replicated_gradients(chunks: ModelChunks) -> Replicated:
    """By kind and name, the gradients that Megatron has summed over TP, or megarl over ETP, after a backward pass."""
    gradients: Replicated = {GRADIENTS: {}, EXPERT_GRADIENTS: {}}
    for name, param in named_parameters(chunks):
        trained: Any = param
        if not param.requires_grad:
            continue
        if getattr(param, "sum_over_etp", False):
            gradients[EXPERT_GRADIENTS][name] = trained.main_grad
        elif getattr(param, "sequence_parallel", False):
            gradients[GRADIENTS][name] = trained.main_grad
    return gradients


def _kind(param: Any) -> str:
    if not getattr(param, "allreduce", True):
        return EXPERTS_WHOLE if getattr(param, "sum_over_etp", False) else EXPERTS
    return DENSE if param.tensor_model_parallel else DENSE_WHOLE
