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

from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.device import join_store
from megarl.resharding.agreement import Agreement, Vote
from megarl.resharding.execute import Executor
from megarl.resharding.payloads import Params, PayloadName, make_payload
from megarl.resharding.reshard_plan import DIGEST_BITS, MemberPlan, Streams, plan_streams
from megarl.resharding.session import Session
from megarl.resharding.transport import PeerCheck, close_group, make_group
from megarl.resharding.verify import Verifier

# increase it whenever the same inputs give another plan: members of two versions must not exchange
PLANNER = 1
# How a field of Stats is reduced over members; of the others the maximum counts.
_REDUCED_BY: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("wire_bytes", "inter_node_bytes", "local_bytes"), sum),
    "kept_share": fmean,
}
# The same where weights and adapters are moved one after the other.
_ADDED: Mapping[str, Callable[[Sequence[Any]], Any]] = dict.fromkeys(
    ("wire_bytes", "inter_node_bytes", "local_bytes", "plan_s", "seconds"), sum
)


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
    """A member in all exchanges of one payload in a run. The plan is made in the first exchange."""

    def __init__(self, session: Session, params: Params, payload: PayloadName) -> None:
        """params: of the member's training rank, with the factors of its adapters; empty where it has none."""
        self.session = session
        self.payload = make_payload(payload, session, params)
        self._store = PrefixStore(
            _prefix(session.run_id, payload), join_store(session.meet, session.timeout_s)
        )
        self._agreement = Agreement(
            self._store, session.member, session.num_members, session.timeout_s
        )
        self._plan: tuple[list[int], MemberPlan] | None = None  # (rounds of each send stage, plan)
        self._executor: Executor | None = None
        self._group: tuple[str, Any] | None = None  # (key of its prefix store, process group)
        self._plan_s = 0.0  # seconds of planning in the current exchange

    @cached_property
    def streams(self) -> Streams:
        s = self.session
        started = time.perf_counter()
        sources = self.payload.source_parts
        targets = self.payload.target_parts
        made = plan_streams(
            sources, targets, s.member, s.num_members, gpus_per_node=s.gpus_per_node, dtype=s.dtype
        )
        self._plan_s += time.perf_counter() - started
        return made

    def run(
        self,
        version: int,
        attempt: int,
        targets: Params | None = None,
        *,
        error: Exception | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Stats:
        """Update this member's target parameters to `version`; collective. Returns this member's cost.

        attempt: unique in a run. targets may be different tensors each time (an engine may rebind them). error: the
        reason why the caller cannot take part, which is raised here after the other members have received it. finish:
        called when the targets are written; an exception of it fails the exchange for all. Raises this member's own
        error (LayoutError, UserError, VerifyError), or RuntimeError with the message of another member.
        """
        started = time.perf_counter()
        targets = targets or {}
        self._plan_s = 0.0
        outcome = self._agree(f"{attempt}/ready", version, targets, error)
        done = f"{attempt}/done"
        key = outcome["group"]
        has_group = self._group is not None and self._group[0] == key
        stage = done if has_group else f"{attempt}/prepared"
        try:
            executor = self._prepare(outcome["rounds"], targets)
            ask = partial(self._agreement.ask, done)
            if not has_group:  # NCCL would wait forever for a member that fails before it joins
                self._agreement.reach(stage, {}, lambda votes: {})
                stage = done
                self._join(key, ask)
            assert self._group
            self.payload.begin(version)
            extra_bytes = executor.run(self._group[1], self.session.timeout_s, ask)
            if finish:
                finish()
            kept_share = self.payload.kept_share()  # verifying reads all boxes once more
            self.verify(targets, ask)
            stats = self._stats(extra_bytes, time.perf_counter() - started, kept_share)
        except Exception as raised:
            first = self._agreement.refuse(stage, f"failed in the exchange: {raised}")
            self.close()  # only now, so that peers that fail because of it find this error
            if first:
                raise RuntimeError(first) from raised
            raise
        try:
            self._agreement.reach(stage, asdict(stats), lambda votes: {})
        except Exception:
            self.close()
            raise
        # SGLang may rebind fp8 weights, and the executor would keep the old memory
        if self.session.engine.fp8:
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
            sources = self.payload.sources
            transform = self.payload.transform
            made = Verifier(
                self.streams, s.engine, self._group[1], sources, targets, *bounds, transform
            )
            made.check(s.verify)

    def _agree(self, stage: str, version: int, targets: Params, error: Exception | None) -> Vote:
        """Return the outcome if every member is ready and has the same inputs; otherwise raise."""
        error = error or self._error(targets)
        if error:
            self.close()
            self._agreement.refuse(stage, f"cannot take part: {error}")
            raise error
        outdated = self._agreement.forget()
        vote = {
            "inputs": self._inputs(version),
            "rounds": self.streams.rounds_needed(self.session.round_bytes),
            "digest": str(self.streams.digest),
            "group": self._group[0] if self._group else "",
        }
        try:
            outcome = self._agreement.reach(
                stage, vote, lambda votes: conclude(f"group/{stage}", votes)
            )
        except Exception:
            self.close()
            raise
        # all members have reached this stage, so nobody reads older keys
        self._agreement.delete(outdated)
        return outcome

    def _error(self, targets: Params) -> Exception | None:
        """The reason why this member cannot take part: parameters that the maps do not describe, or no plan."""
        try:
            self.payload.check(targets)
            self.streams.rounds_needed(self.session.round_bytes)
        except Exception as error:
            return error
        return None

    def _inputs(self, version: int) -> dict[str, str]:
        """The inputs that must be equal on all members."""
        s = self.session
        names = [
            "shape",
            "train",
            "lora",
            "engine",
            "transformer_engine",
            "dtype",
            "round_bytes",
            "gpus_per_node",
        ]
        found = {name: repr(getattr(s, name)) for name in [*names, "verify"]}
        return {"planner": str(PLANNER), "version": str(version), **found}

    def _prepare(self, rounds: list[int], targets: Params) -> Executor:
        """The executor, made again where the number of rounds or the parameters have changed."""
        started = time.perf_counter()
        if self._plan is None or self._plan[0] != rounds:
            self._plan = (rounds, self.streams.assign(rounds))
            self._executor = None
        if self._executor is None or not self._executor.fits(self.payload.sources, targets):
            self._executor = Executor(
                self._plan[1], self.payload.sources, targets, self.payload.transform
            )
            self._plan_s += time.perf_counter() - started
        return self._executor

    def _join(self, key: str, ask: PeerCheck) -> None:
        """Replace the process group by that of this key; collective."""
        self.close()
        s = self.session
        self._group = (
            key,
            make_group(PrefixStore(key, self._store), s.member, s.num_members, s.timeout_s, ask),
        )

    def close(self) -> None:
        """End this member's process group; the next exchange makes a new one."""
        if self._group:
            close_group(self._group[1])
        self._group = None

    def _stats(self, extra_bytes: int, seconds: float, kept_share: float | None) -> Stats:
        assert self._plan
        plan = self._plan[1]
        node = self.session.member // self.session.gpus_per_node
        sends = [copy for step in plan.rounds for copy in step.sends]
        return Stats(
            wire_bytes=sum(copy.num_bytes for copy in sends),
            inter_node_bytes=sum(
                c.num_bytes for c in sends if c.target // self.session.gpus_per_node != node
            ),
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
                raise RuntimeError(
                    f"reshard: {name} is {first} for member 0 and {value} for member {member}"
                )
    if sum(int(vote["digest"]) for vote in votes) % 2**DIGEST_BITS:
        raise RuntimeError("reshard: the members' plans do not match: sends differ from receives")
    groups = {vote["group"] for vote in votes}
    return {
        "rounds": [
            max(numbers) for numbers in zip(*(vote["rounds"] for vote in votes), strict=True)
        ],
        "group": groups.pop() if len(groups) == 1 and "" not in groups else new_group,
    }


def member_stats(
    store: Store, run_id: str, attempt: int, num_members: int, payload: PayloadName
) -> list[Stats]:
    """The cost of a successful attempt for each member; read it before the next attempt."""
    store = PrefixStore(_prefix(run_id, payload), store)
    return [
        Stats(**json.loads(store.get(f"{attempt}/done/{member}"))) for member in range(num_members)
    ]


def collect_stats(
    store: Store, run_id: str, attempt: int, num_members: int, payloads: Sequence[PayloadName]
) -> Stats:
    """The cost of a successful attempt for all members and payloads; read it before the next attempt."""
    of_payloads = [
        _reduced(member_stats(store, run_id, attempt, num_members, one), _REDUCED_BY)
        for one in payloads
    ]
    return _reduced(of_payloads, _ADDED)


def _reduced(found: Sequence[Stats], how: Mapping[str, Callable[[Sequence[Any]], Any]]) -> Stats:
    of_each = {
        field.name: [getattr(stats, field.name) for stats in found] for field in fields(Stats)
    }
    known = {name: [one for one in values if one is not None] for name, values in of_each.items()}
    return Stats(**{name: how.get(name, max)(values) for name, values in known.items() if values})


def _prefix(run_id: str, payload: PayloadName) -> str:
    """Of the store's keys."""
    return f"reshard/{run_id}/{payload}"
