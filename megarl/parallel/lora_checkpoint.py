"""Models of frozen weights in a run's checkpoints: adapters (LoRA) and heads alone, as shards of whole tensors.

So layouts may change between runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megarl.model.lora_pairs import factor_name
from megarl.model.shape import SCORE
from megarl.parallel import groups
from megarl.parallel.lora import FactorPair
from megarl.parallel.shared_weights import heads


def has_adapters(chunk: torch.nn.Module) -> bool:
    """Whether a chunk's weights are frozen; its stage may be without adapters."""
    return getattr(chunk, "has_adapters", False)


def is_stored_factor(key: str) -> bool:
    """Whether a tensor of a checkpoint with this key is a factor, not the optimizer's state of one."""
    return key.startswith("model.layers.") and key.endswith((".lora_A.weight", ".lora_B.weight"))


def sharded_weights(chunk: torch.nn.Module) -> dict[str, ShardedTensor]:
    """What a model chunk trains, by the names in PEFT's files, as dist_checkpointing saves and loads it."""
    weights = {}
    for head in heads([chunk]):
        replica = 0, groups.tp_group().rank(), groups.dp_cp_group().rank()
        weights[SCORE] = ShardedTensor.from_rank_offsets(SCORE, head, replica_id=replica)
    for key, factor, pair in _factors(chunk):
        (rows, cols) = pair.held.size
        (row, _) = pair.held.rows
        (col, _) = pair.held.cols
        is_a = factor is pair.A
        weights[key] = ShardedTensor(
            key=key,
            data=factor,
            dtype=factor.dtype,
            local_shape=tuple(factor.shape),
            global_shape=(len(pair.A), cols) if is_a else (rows, len(pair.A)),
            global_offset=(0, col) if is_a else (row, 0),
            axis_fragmentations=None,  # a fused layer may cut its tensors into unequal parts
            replica_id=_replica(factor, pair.held.is_expert),
        )
    return weights


def _factors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, FactorPair]]:
    for pair in chunk.modules():
        if isinstance(pair, FactorPair):
            yield factor_name(pair.held.name, "A"), pair.A, pair
            if isinstance(pair.B, torch.nn.Parameter):
                yield factor_name(pair.held.name, "B"), pair.B, pair


def _replica(factor: Any, is_expert: bool) -> tuple[int, int, int]:
    """(0, number among the ranks that split the layer, among its data-parallel ranks): all 0 on one of its ranks."""
    if is_expert:
        return 0, groups.etp_group().rank() if factor.sum_over_etp else 0, groups.edp_group().rank()
    return (
        0,
        groups.tp_group().rank() if not factor.tensor_model_parallel else 0,
        groups.dp_cp_group().rank(),
    )
