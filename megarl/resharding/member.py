"""One member of the exchange: the SGLang scheduler process of a GPU, or its training rank where no engine runs.

The members meet in a key-value store. Before every exchange each one publishes its verdict (parameters as mapped,
digest of the plan), so that one that cannot take part is an error with its own words everywhere, and not a hang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.device import join_store
from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.execute import Params, make_group, run_copies
from megarl.resharding.plan import Plan, plan_copies
from megarl.resharding.publish import SourceHandles, attach
from megarl.resharding.shards import LayoutError, Shard, verify_params
from megarl.types import ModelShape

UNKNOWN_MOE_LAYOUTS = ("use_triton_kernels", "use_flashinfer_trtllm_moe")  # SGLang layers that store w13 differently


@dataclass(frozen=True)
class Stats:
    """What one exchange cost: bytes sent over the wire, bytes copied inside a GPU, seconds of the slowest member."""

    wire_bytes: int
    local_bytes: int
    seconds: float


@dataclass(frozen=True)
class Session:
    """Everything that one member must know, apart from its parameters. dtype is torch's name ("float32")."""

    store_port: int
    run_id: str
    member: int
    shape: ModelShape
    train: TrainLayout
    engine: EngineLayout
    transformer_engine: bool
    dtype: str
    round_bytes: int
    timeout_s: float
    source: SourceHandles | None  # None: the member is the training rank itself

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Session:
        nested = {
            "shape": ModelShape(**content["shape"]),
            "train": TrainLayout(**content["train"]),
            "engine": EngineLayout(**content["engine"]),
            "source": SourceHandles.from_json(content["source"]) if content["source"] else None,
        }
        return Session(**{**content, **nested})


@dataclass(frozen=True)
class Sessions:
    """The sessions of all members: engines[e][tp_rank], and trainers[rank] for GPUs without an engine."""

    engines: tuple[dict[int, Session], ...]
    trainers: dict[int, Session]

    def engine_message(self, engine: int, version: int, first: bool) -> dict[str, Any]:
        """The JSON object that engine `engine` hands to `load` in each of its processes; `first`: with the sessions."""
        members = self.engines[engine]
        message: dict[str, Any] = {"run_id": members[0].run_id, "version": version}
        if first:
            message["sessions"] = {str(tp_rank): session.to_json() for tp_rank, session in members.items()}
        return message


def sessions(
    handles: Sequence[SourceHandles],
    *,
    store_port: int,
    run_id: str,
    shape: ModelShape,
    train: TrainLayout,
    engine: EngineLayout,
    transformer_engine: bool,
    dtype: str,
    round_bytes: int,
    timeout_s: float,
) -> Sessions:
    """Assemble the sessions of one run; handles[rank] is what training rank `rank` published."""
    engines: tuple[dict[int, Session], ...] = tuple({} for _ in range(engine.count))
    trainers: dict[int, Session] = {}
    for slot, source in enumerate(handles):
        at = engine.member(slot)
        session = Session(
            store_port, run_id, slot, shape, train, engine, transformer_engine, dtype, round_bytes, timeout_s,
            source if at else None,
        )  # fmt: skip
        if at:
            engines[at[0]][at[1]] = session
        else:
            trainers[slot] = session
    return Sessions(engines, trainers)


class Member:
    """Takes part in every exchange of a run. The plan is made once, on the first."""

    def __init__(self, session: Session, source_params: Params | None = None) -> None:
        """source_params: the training rank's own; None in an engine process, which maps the published ones."""
        self.session = session
        self.num_members = session.train.world_size
        if source_params is None:
            if session.source is None:
                raise ValueError(f"member {session.member} has neither parameters nor handles")
            source_params = attach(session.source)
        self.source_params = source_params
        self.store = PrefixStore(f"reshard/{session.run_id}", join_store(session.store_port, session.timeout_s))
        self.timeout = timedelta(seconds=session.timeout_s)
        self.num_runs = 0
        self.old_keys: list[str] = []

    def source_shards(self, member: int) -> list[Shard]:
        s = self.session
        return megatron_map.shards(s.shape, s.train, member, s.transformer_engine)

    def target_shards(self, member: int) -> list[Shard]:
        at = self.session.engine.member(member)
        return sglang_map.shards(self.session.shape, self.session.engine, at[1]) if at else []

    @cached_property
    def plan(self) -> Plan:
        everyone = range(self.num_members)
        return plan_copies(
            [self.source_shards(member) for member in everyone],
            [self.target_shards(member) for member in everyone],
            self.session.member,
            self.session.round_bytes // self.dtype.itemsize,
        )

    @cached_property
    def group(self) -> Any:
        store = PrefixStore("group", self.store)
        return make_group(store, self.session.member, self.num_members, self.session.timeout_s)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.session.dtype)

    def run(self, version: int, target_params: Params | None = None, fault: Exception | None = None) -> Stats:
        """Bring this member's target parameters to `version`; all members must call it. Returns this member's cost.

        target_params may be other tensors each time (an engine may rebind them). fault: why the caller cannot take
        part; it is raised here, after the others have heard of it. Raises what this member finds wrong (LayoutError,
        UserFault), or RuntimeError with the words of another member that cannot take part.
        """
        started = time.perf_counter()
        targets = target_params or {}
        self._agree(fault or self._fault(targets))
        plan = self.plan
        run_copies(plan, self.group, self.source_params, targets)
        itemsize = self.dtype.itemsize
        stats = Stats(
            wire_bytes=itemsize * sum(copy.area for step in plan.rounds for copy in step.sends),
            local_bytes=itemsize * sum(copy.area for copy in plan.local),
            seconds=time.perf_counter() - started,
        )
        self._write(f"stats/{version}/{self.session.member}", asdict(stats))
        return stats

    def _fault(self, targets: Params) -> Exception | None:
        """What keeps this member from taking part: parameters that the maps do not describe, or no plan."""
        try:
            verify_params(self.source_shards(self.session.member), self.source_params)
            verify_params(self.target_shards(self.session.member), targets)
            for name, param in [*self.source_params.items(), *targets.items()]:
                if param.dtype != self.dtype:
                    raise LayoutError(f"{name} is {param.dtype}, the exchange is of {self.session.dtype}")
            self.plan  # noqa: B018  (made here, so that what it raises reaches the others)
        except Exception as error:
            return error
        return None

    def _agree(self, fault: Exception | None) -> None:
        """Go on only if every member is ready with the same plan."""
        self.num_runs += 1
        verdict = {"fault": str(fault)} if fault else {"digest": self.plan.digest}
        outdated, self.old_keys = self.old_keys, []
        self._write(f"ready/{self.num_runs}/{self.session.member}", verdict)
        if fault:
            raise fault
        keys = [f"ready/{self.num_runs}/{member}" for member in range(self.num_members)]
        self.store.wait(keys, self.timeout)
        verdicts = [json.loads(content) for content in self.store.multi_get(keys)]
        for member, other in enumerate(verdicts):
            if "fault" in other:
                raise RuntimeError(f"reshard: member {member} cannot take part: {other['fault']}")
            if other != verdict:
                raise RuntimeError(f"reshard: members {self.session.member} and {member} have made different plans")
        for key in outdated:  # everyone has come to this run, so nobody reads the last one's keys any more
            self.store.delete_key(key)

    def _write(self, key: str, content: Mapping[str, Any]) -> None:
        self.store.set(key, json.dumps(content))
        self.old_keys.append(key)


def collect_stats(store: Store, run_id: str, version: int, num_members: int) -> Stats:
    """The cost of a finished exchange: bytes summed over the members, seconds of the slowest."""
    store = PrefixStore(f"reshard/{run_id}", store)
    found = [Stats(**json.loads(store.get(f"stats/{version}/{member}"))) for member in range(num_members)]
    return Stats(
        wire_bytes=sum(stats.wire_bytes for stats in found),
        local_bytes=sum(stats.local_bytes for stats in found),
        seconds=max(stats.seconds for stats in found),
    )


_engine_members: dict[str, Member] = {}  # this process's member, by run id


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: runs in each scheduler process and writes into the model's own parameters.

    named_tensors is [("session", uint8 tensor of UTF-8 JSON)], the JSON being `Sessions.engine_message`.
    """
    ((_, encoded),) = named_tensors
    message = json.loads(encoded.cpu().numpy().tobytes())
    run_id = message["run_id"]
    if run_id not in _engine_members:
        session = Session.from_json(message["sessions"][str(dist.get_rank())])
        _engine_members[run_id] = Member(session)
    _engine_members[run_id].run(message["version"], dict(model.named_parameters()), unknown_layout(model))


def unknown_layout(model: torch.nn.Module) -> LayoutError | None:
    """Why an engine's model cannot be written: some MoE kernels store experts in another order in the same shape."""
    for name, module in model.named_modules():
        up_first = getattr(getattr(module, "quant_method", None), "load_up_proj_weight_first", False)
        if up_first or any(getattr(module, flag, False) for flag in UNKNOWN_MOE_LAYOUTS):
            return LayoutError(f"{name}: this MoE backend of SGLang stores experts in a layout that has no map")
    return None
