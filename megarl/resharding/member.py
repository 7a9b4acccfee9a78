"""One member of the exchange: the SGLang scheduler process of a GPU, or its training rank where no engine runs.

The members communicate through a key-value store. Before a byte moves they agree on their inputs, on the number of
rounds, and that their plans match; a member that cannot take part raises its error on every member, so that none hangs.
An exchange has succeeded when every member has written and verified all of its targets. After any failure the process
group is discarded, and the next attempt writes everything again in a new one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.device import join_store
from megarl.placement.expert_places import Places
from megarl.resharding.agreement import Agreement, StageFailed, Vote, fail_stage, suspects_of
from megarl.resharding.payloads import Params, PayloadName, make_payload
from megarl.resharding.planner import Planner
from megarl.resharding.reshard_plan import MemberPlan, agreed_rounds
from megarl.resharding.session import Session
from megarl.resharding.transport import (
    ConnectionBroken,
    PeerCheck,
    PeersSilent,
    close_group,
    make_group,
)
from megarl.resharding.verify import Verifier
from megarl.timeline.recorder import spanned

# increase it whenever the same inputs give another plan: members of two versions must not exchange
PLANNER = 1
# The settings of a session that must be equal on all members.
_COMMON_SETTINGS = (
    "shape",
    "train",
    "lora",
    "engine",
    "transformer_engine",
    "dtype",
    "round_bytes",
    "gpus_per_node",
    "verify",
)
_LEAVING_S = 2.0  # from the end of a member's connections until it has said whom it suspects
_STAGES = ("ready", "prepared", "done")  # of an attempt, in their order
# The fields of Stats that are added over members, and over payloads, which are moved one after the other.
_ADDED_OVER_MEMBERS = ("wire_bytes", "inter_node_bytes", "local_bytes")
_ADDED_OVER_PAYLOADS = (*_ADDED_OVER_MEMBERS, "plan_s", "seconds")


@dataclass(frozen=True)
class Stats:
    """The cost of one exchange for one member, or (from `collect_stats`) for all of them.

    For all members bytes are sums, extra memory and seconds are maxima, and the kept share is a mean.
    """

    wire_bytes: int  # sent to other members
    inter_node_bytes: int  # the part of them that is sent to another node
    local_bytes: int  # copied inside the GPU
    extra_bytes: int  # peak of the memory for buffers
    plan_s: float  # 0 when the plan was kept
    seconds: float  # of the whole exchange
    kept_share: float | None = None  # of adapters that were merged, see `Merge.kept_share`


class _OpenGroup(NamedTuple):
    """A process group of all members, and the key of the prefix store through which they found each other."""

    key: str
    process_group: Any


class Member:
    """A member in all exchanges of one payload in a run.

    The plan is made in the first exchange, and again whenever experts get other places. A process group is opened in
    the first exchange and after each failure, and lives until `close` or an error.
    """

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
        self.planner = Planner(session, self.payload)
        self._group: _OpenGroup | None = None
        self._places: Places | None = None

    def place(self, places: Places | None) -> None:
        """The engines' experts have these places from the next exchange on, for all members; None: as numbered."""
        self._places = places
        self.planner.place(places)

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
        planned_before_s = self.planner.seconds
        targets = targets or {}
        outcome = self._agree(f"{attempt}/ready", version, targets, error)
        done = f"{attempt}/done"
        ask = partial(self._agreement.ask, done)
        has_group = self._group is not None and self._group.key == outcome["group"]
        stage = done if has_group else f"{attempt}/prepared"
        try:
            executor = self.planner.executor(outcome["rounds"], targets)
            if not has_group:  # NCCL would wait forever for a member that fails before it joins
                self._agreement.reach(stage, {}, lambda votes: {})
                stage = done
                self._join(outcome["group"], ask)
            assert self._group
            self.payload.begin(version)
            extra_bytes = executor.run(self._group.process_group, self.session.timeout_s, ask)
            if finish:
                finish()
            kept_share = self.payload.kept_share()  # before `verify`, which reads all boxes again
            self.verify(targets, ask)
            stats = Stats(
                **self._moved_bytes(executor.plan),
                extra_bytes=extra_bytes,
                plan_s=self.planner.seconds - planned_before_s,
                seconds=time.perf_counter() - started,
                kept_share=kept_share,
            )
        except Exception as raised:
            words = f"failed in the exchange: {raised}"
            other_error = self._agreement.refuse(stage, words, self._suspects(stage, raised))
            self.close()  # only now, so that peers that fail because of it find this error
            if other_error:
                raise RuntimeError(other_error) from raised
            raise
        try:
            self._agreement.reach(stage, asdict(stats), lambda votes: {})
        except Exception:
            self.close()
            raise
        # SGLang may rebind fp8 weights, and the executor would keep the old memory
        if self.session.engine.fp8:
            self.planner.drop_executor()
        return stats

    def _suspects(self, stage: str, error: Exception) -> list[int]:
        """The members that may have caused an error, this one last where it may have."""
        member = self.session.member
        if isinstance(error, StageFailed):
            return []
        if not isinstance(error, PeersSilent):
            return [member]
        if isinstance(error, ConnectionBroken):
            (peer,) = error.peers
            if self._agreement.has_left(stage, peer, _LEAVING_S):
                # its connections have ended with that: another failure came first
                return []
        return [*error.peers, member]

    @spanned("verify")
    def verify(self, targets: Params, ask: PeerCheck = lambda: None) -> None:
        """Compare this member's targets with their sources, in the mode session.verify; collective.

        Raises VerifyError, or what `ask` raises when another member has failed. Call it only inside an exchange, or
        between two that have succeeded.
        """
        if self.session.verify == "off":
            return
        assert self._group
        verifier = Verifier(
            self.planner.streams,
            self.session.engine,
            self._group.process_group,
            self.payload.sources,
            targets,
            self.session.round_bytes,
            self.session.timeout_s,
            ask,
            self.payload.transform,
        )
        verifier.check(self.session.verify)

    def _agree(self, stage: str, version: int, targets: Params, error: Exception | None) -> Vote:
        """The outcome of the members' votes; raises where a member is not ready, or where their inputs differ."""
        error = error or self._error(targets)
        if error:
            self.close()
            self._agreement.refuse(stage, f"cannot take part: {error}")
            raise error
        outdated = self._agreement.forget()
        vote = {
            "inputs": self._inputs(version),
            "rounds": self.planner.streams.rounds_needed(self.session.round_bytes),
            "digest": str(self.planner.streams.digest),
            "group": self._group.key if self._group else "",
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
            self.planner.streams.rounds_needed(self.session.round_bytes)
        except Exception as error:
            return error
        return None

    def _inputs(self, version: int) -> dict[str, str]:
        """The inputs that must be equal on all members."""
        inputs = {name: repr(getattr(self.session, name)) for name in _COMMON_SETTINGS}
        places = hashlib.blake2b(repr(self._places).encode(), digest_size=8).hexdigest()
        return {
            "planner": str(PLANNER),
            "version": str(version),
            "the digest of experts' places": places,
            **inputs,
        }

    def _join(self, key: str, ask: PeerCheck) -> None:
        """Replace the process group by that of this key; collective."""
        self.close()
        s = self.session
        store = PrefixStore(key, self._store)
        self._group = _OpenGroup(key, make_group(store, s.member, s.num_members, s.timeout_s, ask))

    def close(self) -> None:
        """End this member's process group; the next exchange makes a new one."""
        if self._group:
            close_group(self._group.process_group)
        self._group = None

    def _moved_bytes(self, plan: MemberPlan) -> dict[str, int]:
        """The bytes that this member moves in an exchange, by the fields of `Stats`."""
        gpus_per_node = self.session.gpus_per_node
        own_node = self.session.member // gpus_per_node
        sends = [copy for step in plan.rounds for copy in step.sends]
        inter_node = [copy for copy in sends if copy.target // gpus_per_node != own_node]
        return {
            "wire_bytes": sum(copy.num_bytes for copy in sends),
            "inter_node_bytes": sum(copy.num_bytes for copy in inter_node),
            "local_bytes": sum(copy.num_bytes for copy in plan.local),
        }


def conclude(new_group: str, votes: Sequence[Vote]) -> Vote:
    """The outcome of the votes of members that are all ready. Raises RuntimeError where they do not match."""
    first_inputs = votes[0]["inputs"]
    for member, vote in enumerate(votes):
        for name, value in vote["inputs"].items():
            if value != first_inputs[name]:
                values = f"{first_inputs[name]} for member 0 and {value} for member {member}"
                raise RuntimeError(f"reshard: {name} is {values}")
    rounds = agreed_rounds(votes, "reshard: the members'")
    groups = {vote["group"] for vote in votes}
    have_same_group = len(groups) == 1 and "" not in groups
    return {
        "rounds": rounds,
        "group": groups.pop() if have_same_group else new_group,
    }


def abandon(
    store: Store, run_id: str, attempt: int, payloads: Sequence[PayloadName], reason: str
) -> None:
    """Fail an attempt for all members, present and later, because one that is gone cannot."""
    for payload in payloads:
        prefixed = PrefixStore(_prefix(run_id, payload), store)
        for stage in _STAGES:
            fail_stage(prefixed, f"{attempt}/{stage}", f"reshard: {reason}")


def exchange_suspects(
    store: Store, run_id: str, attempt: int, num_members: int, payloads: Sequence[PayloadName]
) -> list[int] | None:
    """The members that may have made an attempt fail, the likeliest first; read it when all members have ended it.

    Each member says whom it suspects: itself where it could not take part or has failed by itself, those that it waited
    for in vain, or both ends of a connection that failed. `most_suspected` weighs that. [] where no member knows: the
    attempt was abandoned, because one failed before it knew the others. None where their inputs differ.
    """
    for payload in payloads:
        prefixed = PrefixStore(_prefix(run_id, payload), store)
        for stage in _STAGES:
            suspects = suspects_of(prefixed, f"{attempt}/{stage}", num_members)
            if suspects != []:
                return suspects
    return []


def collect_stats(
    store: Store, run_id: str, attempt: int, num_members: int, payloads: Sequence[PayloadName]
) -> Stats:
    """The cost of a successful attempt for all members and payloads; read it before the next attempt."""
    of_payloads = []
    for payload in payloads:
        prefixed = PrefixStore(_prefix(run_id, payload), store)
        contents = [prefixed.get(f"{attempt}/done/{member}") for member in range(num_members)]
        of_members = [Stats(**json.loads(content)) for content in contents]
        of_payloads.append(_reduced(of_members, _ADDED_OVER_MEMBERS))
    return _reduced(of_payloads, _ADDED_OVER_PAYLOADS)


def _reduced(every_stats: Sequence[Stats], added: Collection[str]) -> Stats:
    """One value of each field: the sum of those that are added, the mean of kept shares, else the maximum."""
    reduced = {}
    for field in fields(Stats):
        values = [getattr(stats, field.name) for stats in every_stats]
        known_values = [value for value in values if value is not None]
        if field.name in added:
            reduced[field.name] = sum(known_values)
        elif field.name != "kept_share":
            reduced[field.name] = max(known_values)
        elif known_values:
            reduced[field.name] = fmean(known_values)
    return Stats(**reduced)


def _prefix(run_id: str, payload: PayloadName) -> str:
    """The prefix of the keys in the store."""
    return f"reshard/{run_id}/{payload}"
