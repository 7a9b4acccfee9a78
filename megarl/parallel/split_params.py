"""What a sharded checkpoint says of parameters that tensor-parallel ranks split in modules of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

Offsets = Sequence[tuple[int, int, int]]


def split_params(
    params: Mapping[str, Tensor],
    prefix: str,
    offsets: Offsets,
    metadata: dict[str, Any] | None,
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """The shards of parameters whose first dimension the ranks of `group` split.

    Megatron takes those of a module that does not say it for copies, of which it saves the first rank's.
    """
    return make_sharded_tensors_for_checkpoint(
        dict(params),
        prefix,
        tensor_parallel_layers_axis_map=dict.fromkeys(params, 0),
        sharded_offsets=tuple(offsets),
        tp_group=group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )
