"""Carry a plan out: local copies, and one all-to-all a round. No decisions are taken here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megarl.device import BACKEND, use_loopback
from megarl.resharding.plan import Copy, Plan, Round, elements_per_peer
from megarl.resharding.shards import rectangle

Params = Mapping[str, torch.Tensor]


def make_group(store: Store, member: int, num_members: int, timeout_s: float) -> Any:
    """A process group of the members alone; the default group belongs to Megatron in one process, to SGLang in another.

    Every member must call this with a store (prefix) that no other group uses.
    """
    timeout = timedelta(seconds=timeout_s)
    if BACKEND == "gloo":
        use_loopback()
        return dist.ProcessGroupGloo(store, member, num_members, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, member, num_members, options)


@torch.no_grad()
def run_copies(plan: Plan, group: Any, sources: Params, targets: Params) -> None:
    """Write every target rectangle of this member; returns when all of them are there.

    Packs round i while round i - 1 is on the wire, and unpacks round i - 1 while round i is; four flat buffers, each at
    most a round. All parameters have one dtype and sit on one device.
    """
    _copy_all(_views(plan.local, targets, "target"), _views(plan.local, sources, "source"))
    if plan.rounds:
        like = next(iter(sources.values()))
        send, receive = (_pair_of_buffers(plan.rounds, side, like) for side in ("sends", "receives"))
        pending = None
        for index, step in enumerate(plan.rounds):
            packed = _parts(send[index % 2], step.sends)
            _copy_all(packed, _views(step.sends, sources, "source"))
            if pending:
                pending.wait()
            pending = _all_to_all(group, plan, step, send[index % 2], receive[index % 2])
            if index:
                _unpack(plan.rounds[index - 1], receive[(index - 1) % 2], targets)
        assert pending is not None
        pending.wait()
        _unpack(plan.rounds[-1], receive[(len(plan.rounds) - 1) % 2], targets)
    if BACKEND == "nccl":
        torch.cuda.synchronize()


def _all_to_all(group: Any, plan: Plan, step: Round, send: torch.Tensor, receive: torch.Tensor) -> dist.Work:
    send_split = elements_per_peer(step.sends, plan.num_members, "target")
    receive_split = elements_per_peer(step.receives, plan.num_members, "source")
    return group.alltoall_base(receive[: sum(receive_split)], send[: sum(send_split)], receive_split, send_split)


def _pair_of_buffers(rounds: Sequence[Round], side: str, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = max(sum(copy.area for copy in getattr(step, side)) for step in rounds)
    first, second = (torch.empty(largest, dtype=like.dtype, device=like.device) for _ in range(2))
    return first, second


def _unpack(step: Round, buffer: torch.Tensor, targets: Params) -> None:
    _copy_all(_views(step.receives, targets, "target"), _parts(buffer, step.receives))


def _parts(buffer: torch.Tensor, copies: Sequence[Copy]) -> list[torch.Tensor]:
    """The flat buffer cut into one [rows, cols] view for each copy, in order."""
    parts = buffer[: sum(copy.area for copy in copies)].split([copy.area for copy in copies]) if copies else ()
    return [part.view(copy.num_rows, copy.num_cols) for part, copy in zip(parts, copies, strict=True)]


def _views(copies: Sequence[Copy], params: Params, side: Literal["source", "target"]) -> list[torch.Tensor]:
    if side == "source":
        return [rectangle(params[c.source_param], c.source_at, c.num_rows, c.num_cols) for c in copies]
    return [rectangle(params[c.target_param], c.target_at, c.num_rows, c.num_cols) for c in copies]


def _copy_all(into: list[torch.Tensor], out_of: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]
