"""Members of an exchange whose sessions, payloads and plans are stand-ins: their agreement and messages are real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.resharding.agreement import Agreement
from megarl.resharding.member import _COMMON_SETTINGS, Member
from megarl.resharding.reshard_plan import MemberPlan
from megarl.resharding.transport import PeerCheck


class BarePlan:
    """Stands for a member's planner, and for the executor of its plan: a subclass says which messages it sends."""

    def __init__(self, number: int, num_members: int) -> None:
        self.seconds = 0.0
        self.streams = SimpleNamespace(rounds_needed=lambda _: [1, 1], digest=0)
        self.plan = MemberPlan(number, num_members, (), (), frozenset())

    def executor(self, rounds: list[int], targets: object) -> BarePlan:
        return self

    def run(self, group: Any, timeout_s: float, ask: PeerCheck) -> int:
        raise NotImplementedError


def bare_member(store: Store, number: int, num_members: int, plan: BarePlan) -> Member:
    """A member of the exchanges of the weights in the run `run`."""
    bare: Any = Member.__new__(Member)
    settings = dict.fromkeys(_COMMON_SETTINGS, None) | {
        "round_bytes": 1,
        "gpus_per_node": num_members,
        "verify": "off",
        "engine": SimpleNamespace(fp8=False),
    }
    prefixed = PrefixStore("reshard/run/weights", store)
    bare.session = SimpleNamespace(
        member=number, num_members=num_members, timeout_s=60.0, **settings
    )
    bare.payload = SimpleNamespace(
        check=lambda _: None, begin=lambda _: None, kept_share=lambda: None
    )
    bare.planner = plan
    bare._store = prefixed
    bare._agreement = Agreement(prefixed, number, num_members, 60.0)
    bare._group = None
    bare._places = None
    return bare
