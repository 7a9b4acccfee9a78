"""One member of the exchange: the SGLang scheduler process of a GPU, or its training rank where no engine runs.

The members communicate through a key-value store. Before a byte moves they agree on their inputs, on the number of
rounds, and that their plans match; a member that cannot take part raises its error on every member, so that none hangs.
An exchange has succeeded when every member has written and verified all of its targets. After any failure the process
group is discarded, and the next attempt writes everything again in a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.device import join_store
from megarl.parallel.lora_pairs import is_factor
from megarl.resharding import engine_model, fp8, lora_map, megatron_map, sglang_map
from megarl.resharding.agreement import Agreement, Vote
from megarl.resharding.execute import Executor, Params
from megarl.resharding.lora_merge import Merge
from megarl.resharding.memory_handles import map_params
from megarl.resharding.plan import DIGEST_BITS, MemberPlan, Streams, plan_streams
from megarl.resharding.session import Session
from megarl.resharding.shards import LayoutError, Part, Shard, cells, first_of, verify_params
from megarl.resharding.transport import PeerCheck, close_group, make_group
from megarl.resharding.verify import Verifier, VerifyError

PLANNER = 1  # increase it whenever the same inputs give another plan: members of two versions must not exchange
# How a field of Stats is reduced over members; of the others the maximum counts.
_REDUCED_BY: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("wire_bytes", "inter_node_bytes", "local_bytes"), sum),
    "kept_share": fmean,
}
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Stats:
    """The cost of one exchange for one member, or (from `collect_stats`) for all of them.

    Bytes sent over a wire, the part of them to another node, and bytes copied inside the GPU; the peak of extra memory;
    seconds of planning (0 when the plan was kept), and in total; of adapters that were merged, the part that rounding
    has kept (`Merge.kept_share`). For several members bytes are sums, extra memory and seconds are maxima, and the kept
    part is a mean.
    """

    wire_bytes: int
    inter_node_bytes: int
    local_bytes: int
    extra_bytes: int
    plan_s: float
    seconds: float
    kept_share: float | None = None


class Member:
    """A member in all exchanges of a run. The plan is made in the first exchange."""

    def __init__(self, session: Session, source_params: Params | None = None) -> None:
        """source_params: those of the training rank itself, with the factors of its adapters.

        None in an engine process, which maps session.source.
        """
        self.session = session
        if source_params is None:
            source_params = map_params(session.source) if session.source else {}
        self.source_params = {name: param for name, param in source_params.items() if not is_factor(name)}
        self._factors = {name: param for name, param in source_params.items() if is_factor(name)}
        self._store = PrefixStore(f"reshard/{session.run_id}", join_store(session.meet, session.timeout_s))
        self._agreement = Agreement(self._store, session.member, session.num_members, session.timeout_s)
        self._plan: tuple[list[int], MemberPlan] | None = None  # (rounds of each chapter, plan)
        self._executor: Executor | None = None
        self._group: tuple[str, Any] | None = None  # (key of its prefix store, process group)
        self._plan_s = 0.0  # seconds of planning in the current exchange

    @cached_property
    def source_parts(self) -> list[Part]:
        s = self.session
        return megatron_map.parts(s.shape, s.train, s.transformer_engine)

    @cached_property
    def merge(self) -> Merge | None:
        """The adapters of this member's training rank. Raises LayoutError where their map does not describe them."""
        s = self.session
        if s.lora is None or s.member >= s.train.world_size:
            return None
        shards = lora_map.shards(s.shape, s.train, s.member, s.lora, s.transformer_engine)
        return Merge.of(s.lora, self._shards(self.source_parts), shards, self._factors)

    @cached_property
    def target_parts(self) -> list[Part]:
        return sglang_map.parts(self.session.shape, self.session.engine)

    @cached_property
    def streams(self) -> Streams:
        s, started = self.session, time.perf_counter()
        sources, targets = fp8.with_scales(self.source_parts, self.target_parts), self.target_parts
        made = plan_streams(sources, targets, s.member, s.num_members, gpus_per_node=s.gpus_per_node, dtype=s.dtype)
        self._plan_s += time.perf_counter() - started
        return made

    def run(
        self,
        version: int,
        attempt: int,
        targets: Params | None = None,
        *,
        fault: Exception | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Stats:
        """Update this member's target parameters to `version`; collective. Returns this member's cost.

        attempt: unique in a run. targets may be different tensors each time (an engine may rebind them). fault: the
        reason why the caller cannot take part, which is raised here after the other members have received it. finish:
        called when the targets are written; an exception of it fails the exchange for all. Raises this member's own
        fault (LayoutError, UserFault, VerifyError), or RuntimeError with the message of another member.
        """
        started, targets = time.perf_counter(), targets or {}
        self._plan_s = 0.0
        outcome = self._agree(f"{attempt}/ready", version, targets, fault)
        done, key = f"{attempt}/done", outcome["group"]
        has_group = self._group is not None and self._group[0] == key
        stage = done if has_group else f"{attempt}/prepared"
        try:
            executor, ask = self._prepare(outcome["rounds"], targets), partial(self._agreement.ask, done)
            if not has_group:  # NCCL would wait forever for a member that fails before it joins
                self._agreement.reach(stage, {}, lambda votes: {})
                stage = done
                self._join(key, ask)
            assert self._group
            if self.merge:
                self.merge.begin(version)
            extra_bytes = executor.run(self._group[1], self.session.timeout_s, ask)
            if finish:
                finish()
            kept_share = self.merge.kept_share() if self.merge else None  # verifying reads all boxes once more
            self.verify(targets, ask)
            stats = self._stats(extra_bytes, time.perf_counter() - started, kept_share)
        except Exception as error:
            first = self._agreement.refuse(stage, f"failed in the exchange: {error}")
            self.close()  # only now, so that peers that fail because of it find this error
            if first:
                raise RuntimeError(first) from error
            raise
        try:
            self._agreement.reach(stage, asdict(stats), lambda votes: {})
        except Exception:
            self.close()
            raise
        if self.session.engine.fp8:  # SGLang may rebind fp8 weights, and the executor would keep the old memory
            self._executor = None
        return stats

    def verify(self, targets: Params, ask: PeerCheck = lambda: None) -> None:
        """Compare this member's targets with their sources, in the mode session.verify; collective.

        Raises VerifyError, or what `ask` raises when another member has failed. Call it only inside an exchange, or
        between two that have succeeded.
        """
        s = self.session
        if s.verify != "off":
            assert self._group
            bounds = s.round_bytes, s.timeout_s, ask
            made = Verifier(self.streams, s.engine, self._group[1], self.source_params, targets, *bounds, self.merge)
            made.check(s.verify)

    def _agree(self, stage: str, version: int, targets: Params, fault: Exception | None) -> Vote:
        """Return the outcome if every member is ready and has the same inputs; otherwise raise."""
        fault = fault or self._fault(targets)
        if fault:
            self.close()
            self._agreement.refuse(stage, f"cannot take part: {fault}")
            raise fault
        outdated = self._agreement.forget()
        vote = {
            "inputs": self._inputs(version),
            "rounds": self.streams.rounds_needed(self.session.round_bytes),
            "digest": str(self.streams.digest),
            "group": self._group[0] if self._group else "",
        }
        try:
            outcome = self._agreement.reach(stage, vote, lambda votes: conclude(f"group/{stage}", votes))
        except Exception:
            self.close()
            raise
        self._agreement.delete(outdated)  # all members have reached this stage, so nobody reads older keys
        return outcome

    def _fault(self, targets: Params) -> Exception | None:
        """The reason why this member cannot take part: parameters that the maps do not describe, or no plan."""
        try:
            verify_params(self._shards(self.source_parts), self.source_params)
            for name, param in self.source_params.items():
                if param.dtype not in SOURCE_DTYPES:
                    raise LayoutError(f"{name}: training weights in {param.dtype} have no map")
            if self.merge and self.session.engine.fp8:
                raise LayoutError("adapters are not merged into the weights of fp8 engines")
            wanted = self._shards(self.target_parts)
            verify_params(wanted, targets)
            self._check_dtypes(wanted, targets)
            self.streams.rounds_needed(self.session.round_bytes)
        except Exception as error:
            return error
        return None

    def _shards(self, parts: Sequence[Part]) -> list[Shard]:
        return [shard for part in parts if self.session.member in part.members for shard in part.shards]

    def _check_dtypes(self, wanted: Sequence[Shard], targets: Params) -> None:
        for shard in wanted:
            dtype = shard.dtype or self.session.dtype
            for name, _ in cells(shard):
                if targets[name].dtype != getattr(torch, dtype):
                    raise LayoutError(f"{name} is {targets[name].dtype}, the exchange brings {dtype}")

    def _inputs(self, version: int) -> dict[str, str]:
        """The inputs that must be equal on all members."""
        s = self.session
        names = ["shape", "train", "lora", "engine", "transformer_engine", "dtype", "round_bytes", "gpus_per_node"]
        found = {name: repr(getattr(s, name)) for name in [*names, "verify"]}
        return {"planner": str(PLANNER), "version": str(version), **found}

    def _prepare(self, rounds: list[int], targets: Params) -> Executor:
        """The executor, made again where the number of rounds or the parameters have changed."""
        started = time.perf_counter()
        if self._plan is None or self._plan[0] != rounds:
            self._plan, self._executor = (rounds, self.streams.deal(rounds)), None
        if self._executor is None or not self._executor.fits(self.source_params, targets):
            self._executor = Executor(self._plan[1], self.source_params, targets, self.merge)
            self._plan_s += time.perf_counter() - started
        return self._executor

    def _join(self, key: str, ask: PeerCheck) -> None:
        """Replace the process group by that of this key; collective."""
        self.close()
        s = self.session
        self._group = key, make_group(PrefixStore(key, self._store), s.member, s.num_members, s.timeout_s, ask)

    def close(self) -> None:
        """End this member's process group; the next exchange makes a new one."""
        if self._group:
            close_group(self._group[1])
        self._group = None

    def _stats(self, extra_bytes: int, seconds: float, kept_share: float | None) -> Stats:
        assert self._plan
        plan, node = self._plan[1], self.session.member // self.session.gpus_per_node
        sends = [copy for step in plan.rounds for copy in step.sends]
        return Stats(
            wire_bytes=sum(copy.num_bytes for copy in sends),
            inter_node_bytes=sum(c.num_bytes for c in sends if c.target // self.session.gpus_per_node != node),
            local_bytes=sum(copy.num_bytes for copy in plan.local),
            extra_bytes=extra_bytes,
            plan_s=self._plan_s,
            seconds=seconds,
            kept_share=kept_share,
        )


def conclude(new_group: str, votes: Sequence[Vote]) -> Vote:
    """The outcome of the votes of members that are all ready. Raises RuntimeError where they do not match."""
    for member, vote in enumerate(votes):
        for name, value in vote["inputs"].items():
            if value != votes[0]["inputs"][name]:
                first = votes[0]["inputs"][name]
                raise RuntimeError(f"reshard: {name} is {first} for member 0 and {value} for member {member}")
    if sum(int(vote["digest"]) for vote in votes) % 2**DIGEST_BITS:
        raise RuntimeError("reshard: the members' plans do not match: sends differ from receives")
    groups = {vote["group"] for vote in votes}
    return {
        "rounds": [max(numbers) for numbers in zip(*(vote["rounds"] for vote in votes), strict=True)],
        "group": groups.pop() if len(groups) == 1 and "" not in groups else new_group,
    }


def member_stats(store: Store, run_id: str, attempt: int, num_members: int) -> list[Stats]:
    """The cost of a successful attempt for each member; read it before the next attempt."""
    store = PrefixStore(f"reshard/{run_id}", store)
    return [Stats(**json.loads(store.get(f"{attempt}/done/{member}"))) for member in range(num_members)]


def collect_stats(store: Store, run_id: str, attempt: int, num_members: int) -> Stats:
    """The cost of a successful attempt for all members; read it before the next attempt."""
    found = member_stats(store, run_id, attempt, num_members)
    of_members = {field.name: [getattr(stats, field.name) for stats in found] for field in fields(Stats)}
    known = {name: [one for one in values if one is not None] for name, values in of_members.items()}
    return Stats(**{name: _REDUCED_BY.get(name, max)(values) for name, values in known.items() if values})


_engine_members: dict[str, Member] = {}  # this process's member, by run id
_loaded: dict[str, tuple[int, list[torch.nn.Module]]] = {}  # (attempt, its models up to now), by run id


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: runs in each scheduler process and writes into the model's own parameters.

    With drafts SGLang calls it twice in one update, for the target model and then for the draft model
    (managers/scheduler_components/weight_updater.py); the second call writes and verifies both in one exchange.
    named_tensors is [("session", uint8 tensor of UTF-8 JSON)], the JSON being `Sessions.engine_message`.
    """
    ((_, encoded),) = named_tensors
    message = json.loads(encoded.cpu().numpy().tobytes())
    run_id = message["run_id"]
    models = _models(run_id, message["attempt"], model)
    if len(models) == message["models"]:
        del _loaded[run_id]
        _exchange(message, models)


def _models(run_id: str, attempt: int, model: torch.nn.Module) -> list[torch.nn.Module]:
    """The models of this attempt in the order of the calls; what an earlier attempt has left is forgotten."""
    before, models = _loaded.get(run_id, (attempt, []))
    models = [*models, model] if before == attempt else [model]
    _loaded[run_id] = attempt, models
    return models


def _exchange(message: Mapping[str, Any], models: Sequence[torch.nn.Module]) -> None:
    run_id = message["run_id"]
    if "sessions" in message:
        if run_id in _engine_members:  # whose handles are no longer valid
            _engine_members[run_id].close()
        _engine_members[run_id] = Member(Session.from_json(message["sessions"][str(dist.get_rank())]))
    member, whole = _engine_members[run_id], engine_model.joined(models)

    def finish() -> None:
        engine_model.write_constants(whole)
        for model in models:
            engine_model.refresh_derived(model)
        if member.session.verify == "off":
            return
        if faults := engine_model.constant_faults(whole) + engine_model.derived_faults(whole):
            raise VerifyError(first_of(faults))

    member.run(
        message["version"],
        message["attempt"],
        engine_model.params(whole),
        fault=engine_model.unknown_layout(whole) or engine_model.draft_fault(models),
        finish=finish,
    )
