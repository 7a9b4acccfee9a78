"""Measures how fast a rank computes, copies and sends while all others do the same; runs in a worker on each GPU.

All ranks do the same in the same order. Messages go around a ring, so that each rank sends and receives at once, as in
a reshard; between nodes each GPU sends to the GPU of the same number, through its own network card.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megarl import device
from megarl.device import Address
from megarl.doctor.facts import RankRates


@dataclass(frozen=True)
class Sizes:
    """The sizes of the timed operations: a message, a copy, a small all-reduce, and a product of square matrices."""

    message_bytes: int
    copy_bytes: int
    small_bytes: int
    width: int
    repeats: int


GPU_SIZES = Sizes(256 * 2**20, 2**30, 16 * 2**10, 8192, 20)
CPU_SIZES = Sizes(8 * 2**20, 32 * 2**20, 16 * 2**10, 512, 3)


class RateRank:
    """Rank `rank` of `num_ranks`, with `node_ranks` on each node, on GPU rank % node_ranks of its node."""

    def __init__(
        self, rank: int, num_ranks: int, node_ranks: int, address: Address, timeout_s: float
    ) -> None:
        """Blocks until all ranks have joined."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._node_ranks = node_ranks
        if device.DEVICE == "cuda":
            torch.cuda.set_device(rank % node_ranks)
        self._device = torch.device(device.DEVICE)
        device.use_loopback()
        limit = timedelta(seconds=timeout_s)
        store = PrefixStore("doctor", device.join_store(address, timeout_s))
        dist.init_process_group(
            device.BACKEND, store=store, rank=rank, world_size=num_ranks, timeout=limit
        )
        nodes = [range(first, first + node_ranks) for first in range(0, num_ranks, node_ranks)]
        groups: list[Any] = [dist.new_group([*ranks], timeout=limit) for ranks in nodes]
        self._node_group: dist.ProcessGroup = groups[rank // node_ranks]
        self._inside = nodes[rank // node_ranks]
        self._between = range(rank % node_ranks, num_ranks, node_ranks)
        self._sizes = GPU_SIZES if device.DEVICE == "cuda" else CPU_SIZES

    def measure(self) -> RankRates:
        """All rates; collective."""
        communicator_bytes = self._communicator_bytes()  # before any other message
        return RankRates(
            node=self._rank // self._node_ranks,
            device_name=device.gpu_name(),
            memory_bytes=self._memory_bytes(),
            matmul_flops=self._matmul_flops(),
            copy_bytes_per_s=self._copy_rate(),
            host_bytes_per_s=self._host_rate(),
            inside_bytes_per_s=self._message_rate(self._inside),
            between_bytes_per_s=self._message_rate(self._between),
            inside_latency_s=self._latency(self._inside, self._node_group),
            between_latency_s=self._latency(self._between, None),
            communicator_bytes=communicator_bytes,
        )

    def _communicator_bytes(self) -> int | None:
        """The memory of the node's group, or of the world's where a node has one GPU."""
        if device.DEVICE != "cuda" or self._num_ranks == 1:
            return None
        message = self._empty(4)
        self._wait()
        used_bytes = device.used_gpu_bytes()
        dist.all_reduce(message, group=self._node_group if len(self._inside) > 1 else None)
        self._wait()
        return max(0, device.used_gpu_bytes() - used_bytes)

    def _memory_bytes(self) -> int:
        """The GPU's memory; on CPU this rank's share of the host's."""
        if device.DEVICE == "cuda":
            return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return psutil.virtual_memory().total // self._node_ranks

    def _matmul_flops(self) -> float:
        """Of matrix products in bfloat16; on CPU in float32, for which its cores have instructions."""
        dtype = torch.bfloat16 if device.DEVICE == "cuda" else torch.float32
        width = self._sizes.width
        matrix = torch.randn(width, width, dtype=dtype, device=self._device)
        out = torch.empty_like(matrix)
        return 2 * width**3 / self._seconds(lambda: torch.matmul(matrix, matrix, out=out))

    def _copy_rate(self) -> float:
        source = self._empty(self._sizes.copy_bytes)
        target = torch.zeros_like(source)
        return 2 * self._sizes.copy_bytes / self._seconds(lambda: target.copy_(source))

    def _host_rate(self) -> float | None:
        if device.DEVICE != "cuda":
            return None
        target = self._empty(self._sizes.copy_bytes)
        source = torch.empty(self._sizes.copy_bytes, dtype=torch.uint8, pin_memory=True)
        seconds = self._seconds(lambda: target.copy_(source, non_blocking=True))
        return self._sizes.copy_bytes / seconds

    def _message_rate(self, ring: range) -> float | None:
        """Of messages to the next rank of the ring while others arrive from the one before; None without peers."""
        if len(ring) == 1:
            return None
        place = ring.index(self._rank)
        after = ring[(place + 1) % len(ring)]
        before = ring[place - 1]
        source = self._empty(self._sizes.message_bytes)
        target = self._empty(self._sizes.message_bytes)

        def shift() -> None:
            pair = [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, target, before)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return self._sizes.message_bytes / self._seconds(shift)

    def _latency(self, ranks: range, group: dist.ProcessGroup | None) -> float | None:
        """Of a small all-reduce; None without peers."""
        if len(ranks) == 1:
            return None
        small = torch.zeros(self._sizes.small_bytes // 4, device=self._device)
        return self._seconds(lambda: dist.all_reduce(small, group=group))

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def _seconds(self, work: Callable[[], object]) -> float:
        """The mean time of a call, after a barrier and a first call that opens communicators."""
        work()
        self._wait()
        dist.barrier()
        start = time.monotonic()
        for _ in range(self._sizes.repeats):
            work()
        self._wait()
        return max(time.monotonic() - start, 1e-9) / self._sizes.repeats

    def _wait(self) -> None:
        if device.DEVICE == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        dist.destroy_process_group()
