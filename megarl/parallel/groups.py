"""The process groups of a training rank: the only reader of Megatron's global state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.testing._internal.distributed.fake_pg import FakeStore  # and the backend that needs no peers

from megarl import device
from megarl.algos.statistics import Statistic, Statistics
from megarl.parallel.layout import RankCoords, TrainLayout


def join(store: Store, rank: int, layout: TrainLayout, seed: int, timeout_s: float) -> None:
    """Enter the training world, build Megatron's groups and seed every generator; blocks until all ranks have come.

    Raises RuntimeError when Megatron's placement of this rank is not the layout's, which the weight maps rely on.
    """
    device.use_loopback()
    dist.init_process_group(
        device.BACKEND,
        store=PrefixStore("train", store),
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _take_places(layout, rank, timeout_s)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def connect() -> int:
    """Open every communicator of this rank; all ranks together. Bytes of the GPU that went for each, about; 0 on CPU.

    NCCL opens one at its first message, which could be when the memory it takes is lent. Groups come in the order in
    which all ranks made them. Single messages, as virtual stages send them, have one communicator for each pair.
    """
    taken = device.taken_bytes()
    opened: list[Any] = [one for one in parallel_state._global_process_group_list or [] if _size(one) > 1]
    for group in opened:
        dist.all_reduce(torch.zeros(1, device=device.DEVICE), group=group)
    if parallel_state.get_virtual_pipeline_model_parallel_world_size():
        for group in (pp_group(), dist.group.WORLD) if _size(pp_group()) == 2 else (pp_group(),):
            _pass_round(group)
    return (device.taken_bytes() - taken) // max(1, len(opened))


def _size(group: Any) -> int:
    return dist.get_world_size(group)


def _pass_round(group: Any) -> None:
    """From each stage to the next, in the order in which Megatron's stages do it."""
    ranks = dist.get_process_group_ranks(pp_group())
    own = ranks.index(dist.get_rank())
    after, before = ranks[(own + 1) % len(ranks)], ranks[own - 1]
    message, found = (torch.zeros(1, device=device.DEVICE) for _ in range(2))
    ways = [partial(dist.isend, message, after, group), partial(dist.irecv, found, before, group)]
    for work in [way() for way in (ways if own % 2 == 0 else reversed(ways))]:
        assert work is not None
        work.wait()


@contextmanager
def simulated(rank: int, layout: TrainLayout) -> Iterator[None]:
    """Inside, this process is one rank of a world whose others are not there: modules are built, no tensor is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        _take_places(layout, rank, timeout_s=60.0)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _take_places(layout: TrainLayout, rank: int, timeout_s: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    if _megatron_coords() != layout.coords(rank):
        raise RuntimeError(f"rank {rank}: Megatron placed it at {_megatron_coords()}, not {layout.coords(rank)}")


def _megatron_coords() -> RankCoords:
    return RankCoords(
        rank=dist.get_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),  # type: ignore[arg-type]
        edp=parallel_state.get_expert_data_parallel_rank(),
    )


def tp_group() -> dist.ProcessGroup:
    """The ranks that split this rank's layers and vocabulary."""
    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[return-value]


def pp_group() -> dist.ProcessGroup:
    """The ranks whose stages make up one model."""
    return parallel_state.get_pipeline_model_parallel_group()  # type: ignore[return-value]


def collection() -> ProcessGroupCollection:
    """What Megatron's schedules look up themselves where they are given no communicator."""
    found: Any = ProcessGroupCollection()
    found.tp, found.cp, found.pp, found.dp_cp = tp_group(), cp_group(), pp_group(), dp_cp_group()
    found.embd = parallel_state.get_embedding_group(check_initialized=False)
    found.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    return found


def cp_group() -> dist.ProcessGroup:
    """The ranks that share out the tokens of this rank's sequences."""
    return parallel_state.get_context_parallel_group()  # type: ignore[return-value]


def dp_cp_group() -> dist.ProcessGroup:
    """The ranks that hold the same dense shard, whatever they train on."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)  # type: ignore[return-value]


def dp_group() -> dist.ProcessGroup:
    """The ranks that hold the same dense shard and train on other sequences."""
    return parallel_state.get_data_parallel_group()  # type: ignore[return-value]


def reduced(stats: Sequence[Mapping[Statistic, torch.Tensor]]) -> Statistics:
    """Micro-batches' statistics over this rank and its data-parallel peers, as each statistic's reduction says."""
    found: Statistics = {}
    for op, is_max in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
        own = [statistic for statistic in stats[0] if statistic.reduction.is_max == is_max]
        if not own:
            continue
        rows = [[one[statistic].detach().double().reshape(-1) for statistic in own] for one in stats]
        table = torch.stack([torch.cat(row) for row in rows])
        totals = table.amax(0) if is_max else table.sum(0)
        dist.all_reduce(totals, op=op, group=dp_group())
        values = totals.split([len(value) for value in rows[0]])
        found |= {statistic: tuple(value.tolist()) for statistic, value in zip(own, values, strict=True)}
    return found


def sum_over_dp(values: torch.Tensor) -> torch.Tensor:
    """The sum of this rank's values and its data-parallel peers'."""
    return _over_dp(values, dist.ReduceOp.SUM)


def max_over_dp(values: torch.Tensor) -> torch.Tensor:
    """The largest of this rank's values and its data-parallel peers', of each."""
    return _over_dp(values, dist.ReduceOp.MAX)


def _over_dp(values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    found = values.to(device.DEVICE, copy=True)
    dist.all_reduce(found, op=op, group=dp_group())
    return found.to(values.device)
