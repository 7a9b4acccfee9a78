"""megarl's own exchange, through the functions that a run uses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.execute import Executor
from megarl.resharding.reshard_plan import plan_streams
from megarl.resharding.traffic import Traffic, count_traffic
from megarl.resharding.transport import make_group

from .case import DTYPE, Case, Params


def cost(case: Case) -> Traffic:
    """The bytes that the planner says the exchange takes."""
    sources = megatron_map.parts(case.shape, case.train, True)
    targets = sglang_map.parts(case.shape, case.engine)
    return count_traffic(
        sources, targets, case.num_processes, gpus_per_node=case.gpus_per_node, dtype=DTYPE
    )


class Megarl:
    """One member's side."""

    def __init__(
        self,
        case: Case,
        rank: int,
        sources: Params,
        targets: Params,
        store: Store,
        round_bytes: int,
        timeout_s: float,
    ) -> None:
        self._case, self._rank, self._sources, self._targets = case, rank, sources, targets
        self._round_bytes, self._timeout_s = round_bytes, timeout_s
        self._group = make_group(PrefixStore("megarl", store), rank, case.num_processes, timeout_s)

    def plan(self) -> None:
        """This member's plan; all agree on the number of rounds."""
        case = self._case
        streams = plan_streams(
            megatron_map.parts(case.shape, case.train, True),
            sglang_map.parts(case.shape, case.engine),
            self._rank,
            case.num_processes,
            gpus_per_node=case.gpus_per_node,
            dtype=DTYPE,
        )
        num_rounds = torch.tensor(streams.rounds_needed(self._round_bytes))
        dist.all_reduce(num_rounds, dist.ReduceOp.MAX)
        self._executor = Executor(streams.assign(num_rounds.tolist()), self._sources, self._targets)

    def run(self) -> None:
        """Fill the targets."""
        self._executor.run(self._group, self._timeout_s)
