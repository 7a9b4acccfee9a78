"""Which elements of a parameter a rank's distributed optimizer steps on, and the flat tensor that it steps on."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def shard_ranges(chained: Any) -> dict[Tensor, tuple[int, int]]:
    """By parameter, the first element that this rank steps on and the end; without parameters of which it has none."""
    buckets = [
        bucket
        for by_dtype in chained.gbuf_ranges
        for buckets_of_dtype in by_dtype.values()
        for bucket in buckets_of_dtype
    ]
    return {
        param: (ranges["param"].start, ranges["param"].end)
        for bucket in buckets
        for param, ranges in bucket["param_map"].items()
    }


def stepped(chained: Any, param: Tensor) -> Tensor:
    """What the inner optimizer steps on in the parameter's place, of which this rank has elements."""
    group, place = chained.model_param_group_index_map[param]
    return chained.optimizer.param_groups[group]["params"][place]
