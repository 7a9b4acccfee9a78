"""The process groups of a training rank; only this module reads Megatron's global parallel state."""

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
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

# also registers the "fake" backend
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl import device
from megarl.algos.statistics import Statistic, Statistics
from megarl.placement.train_layout import TrainLayout

TOLD_BYTES = 512
# of this process's world: see `_row_groups`
_ROW_GROUPS: dict[int, dist.ProcessGroup] = {}


def join(store: Store, rank: int, layout: TrainLayout, seed: int, timeout_s: float) -> None:
    """Join the training world, build Megatron's groups and seed every generator; blocks until all ranks have joined."""
    device.use_loopback()
    dist.init_process_group(
        device.BACKEND,
        store=PrefixStore("train", store),
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    _initialize_groups(layout, timeout_s)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def open_communicators() -> int:
    """Open every communicator of this rank; collective. Returns the approximate GPU memory of each in bytes; 0 on CPU.

    NCCL opens a communicator at its first message, when the memory might belong to the engine. The groups are opened
    in the order in which all ranks made them. Point-to-point messages of virtual stages have one for each pair.
    """
    used_bytes = device.used_gpu_bytes()
    opened: list[Any] = [
        group
        for group in parallel_state._global_process_group_list or []
        if dist.get_world_size(group) > 1
    ]
    for group in opened:
        dist.all_reduce(torch.zeros(1, device=device.DEVICE), group=group)
    if parallel_state.get_virtual_pipeline_model_parallel_world_size():
        _open_ring(pp_group())
        if pp_group().size() == 2:
            _open_ring(dist.group.WORLD)
    return (device.used_gpu_bytes() - used_bytes) // max(1, len(opened))


def _open_ring(group: Any) -> None:
    """Send a message from each stage to the next, in the order of Megatron's stages."""
    ranks = dist.get_process_group_ranks(pp_group())
    stage = ranks.index(dist.get_rank())
    after = ranks[(stage + 1) % len(ranks)]
    before = ranks[stage - 1]
    sent, received = (torch.zeros(1, device=device.DEVICE) for _ in range(2))
    calls = [partial(dist.isend, sent, after, group), partial(dist.irecv, received, before, group)]
    for work in [call() for call in (calls if stage % 2 == 0 else reversed(calls))]:
        assert work is not None
        work.wait()


@contextmanager
def simulated(rank: int, layout: TrainLayout) -> Iterator[None]:
    """Be one rank of a simulated world inside the block: modules can be built, but no tensor is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        _initialize_groups(layout, timeout_s=60.0)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _initialize_groups(layout: TrainLayout, timeout_s: float) -> None:
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
    _ROW_GROUPS.clear()
    _ROW_GROUPS.update(_row_groups(layout, timeout_s))


def _row_groups(layout: TrainLayout, timeout_s: float) -> dict[int, dist.ProcessGroup]:
    """{size: the group of this rank and of the data-parallel ranks beside it that split a row of `size` ranks}.

    Sizes are 2, 4, ... to max_cp. Megatron's own hybrid groups go up to all data-parallel ranks, and take memory.
    """
    own: dict[int, dist.ProcessGroup] = {}
    ranks = [layout.coords(rank) for rank in range(layout.world_size)]
    for size in (2**power for power in range(1, layout.max_cp.bit_length())):
        members: dict[tuple[int, int, int], list[int]] = {}
        for at in ranks:
            members.setdefault((at.pp, at.tp, at.dp // size), []).append(at.rank)
        for of_group in members.values():
            group: Any = parallel_state.create_group(of_group, timeout=timedelta(seconds=timeout_s))
            if dist.get_rank() in of_group:
                own[size] = group
    return own


def tp_group() -> dist.ProcessGroup:
    """The tensor-parallel ranks, which split this rank's layers and vocabulary."""
    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[return-value]


def pp_group() -> dist.ProcessGroup:
    """The pipeline-parallel ranks, whose stages make up one model."""
    return parallel_state.get_pipeline_model_parallel_group()  # type: ignore[return-value]


def pipeline_groups() -> ProcessGroupCollection:
    """The groups that Megatron's schedules need where they are given a communicator."""
    groups: Any = ProcessGroupCollection()
    groups.tp = tp_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = pp_group()
    groups.dp_cp = dp_cp_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    return groups


def cp_group(size: int) -> dist.ProcessGroup:
    """The ranks that share the tokens of a row with this one, of which there are so many (PackedRow.cp)."""
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == size:
        return group
    return _ROW_GROUPS[size]


def dp_cp_group() -> dist.ProcessGroup:
    """The data- and context-parallel ranks, which hold the same dense shard."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)  # type: ignore[return-value]


def stage_group() -> dist.ProcessGroup:
    """All ranks of this rank's pipeline stage, which hold its layers, experts included."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)  # type: ignore[return-value]


def dp_group() -> dist.ProcessGroup:
    """The data-parallel ranks, which hold the same dense shard and train on different sequences."""
    return parallel_state.get_data_parallel_group()  # type: ignore[return-value]


def etp_group() -> dist.ProcessGroup:
    """The ranks that split this rank's experts."""
    return parallel_state.get_expert_tensor_parallel_group()  # type: ignore[return-value]


def edp_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the same experts."""
    return parallel_state.get_expert_data_parallel_group()  # type: ignore[return-value]


def reduce_stats(stats: Sequence[Mapping[Statistic, Tensor]], copies: Sequence[int]) -> Statistics:
    """Statistics of micro-batches over this rank and its data-parallel peers, each by its own reduction.

    copies: the data-parallel ranks that have each micro-batch and count it together as one.
    """
    reduced: Statistics = {}
    for op, is_max in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
        statistics = [statistic for statistic in stats[0] if statistic.reduction.is_max == is_max]
        if not statistics:
            continue
        rows = [
            [batch[statistic].detach().double().reshape(-1) for statistic in statistics]
            for batch in stats
        ]
        table = torch.stack([torch.cat(row) for row in rows])
        counted = table / torch.tensor(copies, dtype=table.dtype, device=table.device)[:, None]
        totals = table.amax(0) if is_max else counted.sum(0)
        dist.all_reduce(totals, op=op, group=dp_group())
        values = totals.split([len(value) for value in rows[0]])
        reduced |= {
            statistic: tuple(value.tolist())
            for statistic, value in zip(statistics, values, strict=True)
        }
    return reduced


def over_pp(values: Tensor) -> Tensor:
    """The elementwise sum over the pipeline stages."""
    return _reduced(values, dist.ReduceOp.SUM, pp_group())


def over_dp(values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The elementwise sum over the data-parallel ranks, or another reduction."""
    return _reduced(values, op, dp_group())


def _reduced(
    values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> Tensor:
    reduced = values.to(device.DEVICE, copy=True)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced.to(values.device)


def all_agree(flag: Tensor) -> bool:
    """Whether the number of every rank of the world is not 0; waits for the device."""
    return bool(_reduced(flag.to(device.DEVICE), dist.ReduceOp.MIN, dist.group.WORLD).item())


def gathered(values: Tensor) -> Tensor:
    """[ranks of the world, ...]: the values of each, which have one shape on all of them."""
    own = values.to(device.DEVICE).reshape(-1)
    table = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_into_tensor(table, own)
    return table.view(dist.get_world_size(), *values.shape)


def told(text: str, rank: int) -> str:
    """The text of one rank of the world, cut to TOLD_BYTES, on all of them."""
    content = text.encode()[:TOLD_BYTES].ljust(TOLD_BYTES, b"\0")
    told_bytes = torch.tensor([*content], dtype=torch.uint8, device=device.DEVICE)
    dist.broadcast(told_bytes, rank)
    return bytes(told_bytes.tolist()).rstrip(b"\0").decode(errors="replace")
