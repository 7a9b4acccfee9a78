"""What the exchange asks of torch's process groups, held against torch's own classes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from megarl.device import address_of, host_store, join_store
from megarl.resharding import transport
from megarl.resharding.agreement import Agreement


class RecordingBackend:
    """A stand-in for NCCL's backend: its coalescing calls go to a real gloo backend, which has the same binding."""

    def __init__(self) -> None:
        self._real: Any = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
        self.open_blocks = 0
        self.posted = 0

    def _start_coalescing(self, *arguments: Any) -> None:
        _bind(self._real._start_coalescing, *arguments)
        self.open_blocks += 1

    def _end_coalescing(self, *arguments: Any) -> SimpleNamespace | None:
        _bind(self._real._end_coalescing, *arguments)
        self.open_blocks -= 1
        return SimpleNamespace(messages=self.posted) if self.posted else None

    def post(self) -> SimpleNamespace:
        self.posted += 1
        return SimpleNamespace()


def _bind(method: Any, *arguments: Any) -> None:
    """Raise TypeError where torch's binding does not take these arguments; that gloo does not coalesce is no fault."""
    with suppress(RuntimeError):
        method(*arguments)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingBackend]:
    monkeypatch.setattr(transport, "BACKEND", "nccl")
    backend = RecordingBackend()
    yield backend
    assert backend.open_blocks == 0, "an NCCL group that stays open swallows what is posted later"


def test_the_contract_refuses_a_device() -> None:
    with pytest.raises(TypeError):
        RecordingBackend()._start_coalescing(torch.device("cpu"))


def test_a_round_becomes_one_work(nccl: RecordingBackend) -> None:
    with transport.batch(nccl) as works:
        works += [(1, nccl.post()), (2, nccl.post())]  # type: ignore[list-item]
    assert works == [(peer, SimpleNamespace(messages=2)) for peer in (1, 2)]


def test_a_round_without_messages_is_closed(nccl: RecordingBackend) -> None:
    with transport.batch(nccl) as works:
        pass
    assert works == []


def test_an_error_inside_a_round_closes_it(nccl: RecordingBackend) -> None:
    with pytest.raises(ZeroDivisionError), transport.batch(nccl) as works:
        works.append((1, nccl.post()))  # type: ignore[arg-type]
        raise ZeroDivisionError


class Stuck:
    """A message whose peer has failed: NCCL's communicator does not notice, and gloo may have forgotten the message."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        Event().wait(timeout.total_seconds())


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_words_of_a_failed_peer_end_a_wait(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "BACKEND", backend)
    monkeypatch.setattr(transport, "PEER_CHECK_S", 0.01)
    store = HashStore()
    ours, theirs = (Agreement(PrefixStore("x", store), member, 2, 60.0) for member in (0, 1))
    ours.ask("1/done")  # nobody has refused yet
    theirs.refuse("1/done", "failed in the exchange: no memory")
    with pytest.raises(RuntimeError, match="member 1 failed in the exchange: no memory"):
        transport.wait([(1, Stuck())], 600.0, lambda: ours.ask("1/done"))  # type: ignore[list-item]


def test_a_message_over_gloo_that_fails_names_the_member_at_its_other_end() -> None:
    stores = HashStore()
    with ThreadPoolExecutor() as threads:
        groups = [
            *threads.map(
                lambda m: transport.make_group(PrefixStore("a", stores), m, 3, 60.0), range(3)
            )
        ]
    content = torch.zeros(1)
    with transport.batch(groups[0]) as works:
        works.append((2, groups[0].recv([content], 2, 0)))
    transport.close_group(groups[2])
    del groups[2]
    with pytest.raises(transport.ConnectionBroken) as raised:
        transport.wait(works, 60.0, lambda: None)
    assert raised.value.peers == [2]
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_message_over_gloo_that_does_not_come_is_no_broken_connection() -> None:
    """Of which one would ask the peer why it has left."""

    class Silent:
        def wait(self, timeout: timedelta) -> None:
            Event().wait(timeout.total_seconds())
            raise RuntimeError("Timed out")

    with pytest.raises(transport.PeersSilent, match="Timed out") as raised:
        transport.wait([(1, Silent())], 0.05, lambda: None)  # type: ignore[list-item]
    assert raised.value.peers == [1] and type(raised.value) is transport.PeersSilent


def test_a_round_over_nccl_that_does_not_end_names_all_of_its_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "BACKEND", "nccl")
    stuck: Any = Stuck()
    with pytest.raises(transport.PeersSilent, match=r"within 0\.05 s") as raised:
        transport.wait([(3, stuck), (1, stuck)], 0.05, lambda: None)
    assert raised.value.peers == [3, 1]


@pytest.mark.parametrize(("others_come", "silent"), [(False, [0, 2]), (True, [2])])
def test_a_group_that_does_not_come_about_names_those_that_did_not_come_to_it(
    others_come: bool, silent: list[int]
) -> None:
    store = HashStore()
    if others_come:
        store.set("came/0", "")
    with pytest.raises(transport.PeersSilent, match="no group of all members") as raised:
        transport.make_group(store, 1, 3, 0.2)
    assert raised.value.peers == silent
    store.set("came/0", "")
    store.set("came/2", "")
    with pytest.raises(transport.PeersSilent) as raised:
        transport.make_group(store, 1, 3, 0.2)
    assert raised.value.peers == [0, 2], "who is to blame where all came is not known"


def test_a_stage_that_all_reached_is_no_failure() -> None:
    agreement = Agreement(HashStore(), 0, 1, 60.0)
    agreement.reach("1/done", {}, lambda votes: {})
    agreement.ask("1/done")


def test_a_wait_has_an_end() -> None:
    with pytest.raises(RuntimeError, match=r"did not end within 0\.05 s"):
        transport.poll(lambda: False, 0.05, lambda: None)


def test_what_blocks_for_ever_ends_with_a_peers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's start does where a member never comes to it."""
    monkeypatch.setattr(transport, "PEER_CHECK_S", 0.01)
    never, store = Event(), HashStore()
    Agreement(PrefixStore("a", store), 1, 2, 60.0).refuse(
        "done", "failed in the exchange: out of memory"
    )
    ask = partial(Agreement(PrefixStore("a", store), 0, 2, 60.0).ask, "done")
    with pytest.raises(RuntimeError, match="member 1 failed in the exchange: out of memory"):
        transport.bounded(never.wait, 60.0, ask)
    with pytest.raises(RuntimeError, match=r"did not end within 0\.05 s"):
        transport.bounded(never.wait, 0.05, lambda: None)
    never.set()


def test_a_group_whose_member_does_not_come_ends_with_a_peers_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "PEER_CHECK_S", 0.01)
    server = host_store(60.0)
    store = join_store(address_of(server), 60.0)
    Agreement(PrefixStore("a", server), 1, 2, 60.0).refuse("done", "has left: it was killed")
    ask = partial(Agreement(PrefixStore("a", store), 0, 2, 60.0).ask, "done")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="member 1 has left: it was killed"):
        transport.make_group(PrefixStore("group", store), 0, 2, 30.0, ask)
    assert time.monotonic() - started < 15.0
    # Ends the thread that still waits. It drops its group at once, which may break the connection that this side makes.
    late = PrefixStore("group", join_store(address_of(server), 60.0))
    with suppress(RuntimeError):
        transport.make_group(late, 1, 2, 30.0)


def test_what_ends_says_how() -> None:
    transport.bounded(lambda: None, 60.0, lambda: None)
    with pytest.raises(KeyError, match="the cause"):
        transport.bounded(lambda: {}["the cause"], 60.0, lambda: None)


def test_nccl_connects_when_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has no message in the first round would otherwise never join the communicator."""
    connected: list[torch.device] = []
    chosen: list[torch.device] = []  # by the thread that connects

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *arguments: object) -> None:
            pass

        def eager_connect_single_device(self, device: torch.device) -> None:
            connected.append(device)

    monkeypatch.setattr(transport, "BACKEND", "nccl")
    monkeypatch.setattr(transport, "DEVICE", "cuda")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    transport.make_group(HashStore(), 0, 1, 60.0)
    assert connected == chosen == [torch.device("cuda", 3)]
    assert "arg0: torch.device) -> None" in (
        dist.ProcessGroupGloo.eager_connect_single_device.__doc__ or ""
    )
