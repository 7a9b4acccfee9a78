"""A rank's groups: all of them are open before anything else takes a GPU's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.device import DEVICE
from megarl.placement.train_layout import TrainLayout
from tests.parallel.worlds import recipe, run_world

LAYOUTS = {
    "tp2 pp2 vpp2": TrainLayout(4, 2, 2, 1, vpp=2),
    "pp4 dp2": TrainLayout(8, 1, 4, 1),
    "cp2 ep2": TrainLayout(4, 1, 1, 2, cp=2),
    "cp auto": TrainLayout(8, 2, 1, 1, max_cp=4),
}


def opened(trainer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of every group of this rank that has others in it, and those of the groups that a message went over."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from megarl.parallel import groups

    used, reduce = [], dist.all_reduce

    def heard(tensor: Any, *args: Any, group: Any = None, **more: Any) -> Any:
        used.append(dist.get_process_group_ranks(group))
        return reduce(tensor, *args, group=group, **more)

    dist.all_reduce = heard
    taken = groups.open_communicators()
    assert DEVICE != "cpu" or taken == 0, "there is no GPU, of which memory could go"
    known = [dist.get_process_group_ranks(group) for group in _world.pg_map]
    return [ranks for ranks in known if len(ranks) > 1], used


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_message_goes_over_every_group(checkpoint_path: Path, layout: TrainLayout) -> None:
    """Unverified on a GPU.

    parallel/groups.py open_communicators, device.py used_gpu_bytes: every communicator of training opened before
    engines size their caches; the bytes of each are told at the start, as `communicator_bytes` of a hardware file.
    To check first: device memory after the start equals that after ten steps.
    """
    for known, used in run_world(recipe(checkpoint_path, layout), opened):
        assert sorted(used) == sorted(known)
