"""One process of the bench: it holds one training rank's weights and one engine rank's parameters, and does as told."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megarl.device import Address, join_store, use_loopback
from megarl.resharding import megatron_map, sglang_map

from . import wire
from .case import Case, Params, fill, forget, is_exact, make_params
from .gather import Gather
from .mcore import MegatronCore
from .ours import Megarl

TIMEOUT_S = 300.0
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Method(Protocol):
    """A way to fill the targets from the sources."""

    def plan(self) -> None: ...
    def run(self) -> None: ...


class Contender(NamedTuple):
    """A method with the parameters that it fills and what must be in them afterwards."""

    method: Method
    targets: Params
    wanted: Params


class Process:
    """What the commands of the parent do; every one runs on all ranks at once."""

    def __init__(
        self, meet: Address, case: Case, rank: int, round_bytes: int, bucket_bytes: int
    ) -> None:
        use_loopback()
        store = join_store(meet, TIMEOUT_S)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("world", store),
            rank=rank,
            world_size=case.num_processes,
            timeout=timeout,
        )
        held = megatron_map.shards(case.shape, case.train, rank, True)
        sources = fill(make_params(held), held)
        at = case.engine.member(rank)
        assert at is not None
        of_engine = sglang_map.shards(case.shape, case.engine, at[1])
        of_megatron = megatron_map.shards(case.shape, case.engine_as_megatron, rank, True)
        ours, theirs = make_params(of_engine), make_params(of_megatron)
        wanted = fill(make_params(of_engine), of_engine)
        megarl = Megarl(case, rank, sources, ours, store, round_bytes, TIMEOUT_S)
        self.contenders = {
            "megarl": Contender(megarl, ours, wanted),
            "gather": Contender(Gather(case, rank, sources, ours, bucket_bytes), ours, wanted),
            "megatron_core": Contender(
                MegatronCore(case, rank, sources, theirs),
                theirs,
                fill(make_params(of_megatron), of_megatron),
            ),
        }

    def plan(self, name: str) -> float:
        """Seconds that planning takes."""
        start = time.monotonic()
        self.contenders[name].method.plan()
        return time.monotonic() - start

    def forget(self, name: str) -> None:
        """Take every weight out of the targets."""
        forget(self.contenders[name].targets)

    def run(self, name: str) -> tuple[float, float]:
        """When the exchange started here and when it ended, on the machine's clock."""
        start = time.monotonic()
        self.contenders[name].method.run()
        return start, time.monotonic()

    def run_for_memory(self, name: str) -> int:
        """The most bytes that the exchange needed beside the parameters."""
        before = wire.begin_memory()
        self.contenders[name].method.run()
        return wire.peak_memory() - before

    def is_exact(self, name: str) -> bool:
        """Whether every bit of every target is as wanted."""
        contender = self.contenders[name]
        return is_exact(contender.targets, contender.wanted)

    def sockets(self) -> list[wire.Socket]:
        return wire.own_sockets()


def main(pipe: Connection, *args: Any) -> None:
    """Serve commands (name, arguments) until the pipe closes; what comes first is the address of the store."""
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    try:
        process = Process(pipe.recv(), *args)
        pipe.send((True, None))
        while True:
            command, arguments = pipe.recv()
            pipe.send((True, getattr(process, command)(*arguments)))
    except EOFError:
        os._exit(0)  # without the goodbyes of groups whose peers are gone
    except BaseException:
        pipe.send((False, traceback.format_exc()))
