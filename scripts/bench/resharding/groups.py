"""Process groups of a Megatron layout, from the layout's own arithmetic."""

from __future__ import annotations

import torch.distributed as dist

from megarl.placement.train_layout import TrainLayout

FIXED_AXES = {
    "tp": ("pp", "dp", "cp"),
    "dp": ("pp", "tp", "cp"),
    "pp": ("tp", "dp", "cp"),
    "ep": ("pp", "etp", "edp"),
    "etp": ("pp", "ep", "edp"),
}


def axis_ranks(layout: TrainLayout, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that differ from `rank` along one axis alone, and itself; rising."""
    at, everyone = layout.coords(rank), map(layout.coords, range(layout.world_size))
    fixed = FIXED_AXES[axis]
    return tuple(
        coords.rank
        for coords in everyone
        if all(getattr(coords, other) == getattr(at, other) for other in fixed)
    )


def axis_group(layout: TrainLayout, axis: str) -> dist.ProcessGroup:
    """A gloo group of the ranks along an axis; every rank of the world must call this."""
    lists = sorted({axis_ranks(layout, rank, axis) for rank in range(layout.world_size)})
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists], backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
