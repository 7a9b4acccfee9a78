"""Members in threads, over gloo, whose plans are fakes: whom they suspect after exchanges that fail in vain."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.placement.engine_layout import EngineLayout
from megarl.recovery.suspicion import Suspicion
from megarl.resharding import member, transport
from megarl.resharding.agreement import StageFailed
from megarl.resharding.member import Member, exchange_suspects
from megarl.resharding.transport import ConnectionBroken, PeerCheck, PeersSilent
from tests.resharding.bare_members import BarePlan, bare_member

CUT_OFF = 2  # the member that the others do not reach
NUM_MEMBERS = 3


class Plan(BarePlan):
    """Of a member whose messages all come from the one that is cut off."""

    def __init__(self, number: int, left: dict[int, Event]) -> None:
        """left: of the other members."""
        super().__init__(number, NUM_MEMBERS)
        self._number = number
        self._left = left

    def run(self, group: Any, timeout_s: float, ask: PeerCheck) -> int:
        if self._number == CUT_OFF:
            for left in self._left.values():
                left.wait()
            ask()
        with transport.batch(group) as works:
            works.append((CUT_OFF, group.recv([torch.zeros(1)], CUT_OFF, 0)))
        transport.wait(works, 0.2, ask)
        raise AssertionError("nothing was sent")


def made(store: Store, number: int, left: dict[int, Event]) -> Member:
    return bare_member(store, number, NUM_MEMBERS, Plan(number, left))


def test_a_broken_connection_to_a_member_that_has_left_is_no_failure_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who leaves says whom it suspects, and closes its connections then. One that sends nothing in time is another."""
    monkeypatch.setattr(member, "_LEAVING_S", 0.01)
    store = HashStore()
    first, second, _ = (made(store, number, {}) for number in range(NUM_MEMBERS))
    broken, late = ConnectionBroken("closed by peer", [0]), PeersSilent("timed out", [0])
    assert second._suspects("1/done", broken) == [0, 1]
    first._agreement.refuse("1/done", "waits in vain", [CUT_OFF, 0])
    assert second._suspects("1/done", broken) == []
    assert second._suspects("1/done", late) == [0, 1]
    assert second._suspects("1/done", StageFailed("member 0 waits in vain")) == []
    assert second._suspects("1/done", MemoryError()) == [1]


def cut_off(make: Callable[..., Any]) -> Callable[..., Any]:
    """Groups in which one member finds nobody, and is not found."""

    def make_cut_off(store: Store, number: int, *others: Any) -> Any:
        return make(PrefixStore("alone", store) if number == CUT_OFF else store, number, *others)

    return make_cut_off


def test_a_member_that_reaches_nobody_is_given_up_after_two_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first it sends nothing, in the second no group comes about, of which all are suspected alike."""
    monkeypatch.setattr(transport, "PEER_CHECK_S", 60.0)
    store = HashStore()
    left = {number: Event() for number in range(NUM_MEMBERS) if number != CUT_OFF}
    members = [made(store, number, left) for number in range(NUM_MEMBERS)]

    def fail(failing: Member, attempt: int) -> None:
        with pytest.raises(RuntimeError):
            failing.run(1, attempt)
        if failing.session.member != CUT_OFF:
            left[failing.session.member].set()

    def suspects_after(attempt: int) -> list[int]:
        with ThreadPoolExecutor() as threads:
            assert [*threads.map(lambda failing: fail(failing, attempt), members)]
        suspects = exchange_suspects(store, "run", attempt, NUM_MEMBERS, ["weights"])
        assert suspects
        return suspects

    suspicion = Suspicion(EngineLayout(3, 1, 1))
    suspects = suspects_after(attempt=1)
    assert suspects == [CUT_OFF]
    suspicion.note(suspects)
    monkeypatch.setattr(dist, "ProcessGroupGloo", cut_off(dist.ProcessGroupGloo))
    for each in members:
        monkeypatch.setattr(each.session, "timeout_s", 2.0)
    suspects = suspects_after(attempt=2)
    assert {*suspects} == {0, 1, CUT_OFF}
    suspicion.note(suspects)
    assert suspicion.give_up() == CUT_OFF
