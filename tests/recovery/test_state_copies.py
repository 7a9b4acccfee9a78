"""Copies of ranks' states in other processes, in a real Ray session: who may die without one being lost.

Two keepers stand for those of two nodes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.actor import Worker
from megarl.cluster.deadline import Deadline
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.recovery import state_copies
from megarl.recovery.restarts import Restarts
from megarl.recovery.state_copies import CopiesLost, Generation, StateCopies
from megarl.recovery.state_keeper import CHUNK_BYTES, CopyCost
from megarl.types.losses import Losses

TARGET = "tests.recovery.copied_rank:CopiedRank"
# more than one part
STATE_BYTES = CHUNK_BYTES + 12_345


def test_a_generation_is_usable_while_every_rank_has_a_copy_somewhere() -> None:
    generation = Generation(3, 5, {"a": frozenset(), "b": frozenset()})
    for rank, node in (("a", 0), ("b", 1), ("a", 1)):
        assert not generation.is_usable or rank == "a"
        generation = generation.with_holder(rank, node)
    assert generation.is_usable and generation.without_node(0).is_usable
    assert not generation.without_node(1).is_usable


class Session:
    """Stands for a cluster whose calls all return; `lost`: the keeper that dies while the next ones are waited for."""

    def __init__(self) -> None:
        self.on_loss: dict[int, Any] = {}
        self.lost: int | None = None
        # slots of workers whose processes have ended, and the names of those for whose end was asked, by call
        self.dead: set[int] = set()
        self.asked: list[list[str]] = []
        self.loss_log = Losses()

    def worker(self, name: str, slot: int, on_loss: Any, gpus: float) -> Any:
        self.on_loss[slot] = on_loss
        return SimpleNamespace(
            name=name, slot=slot, peer=name, start=lambda *_: object(), call=lambda *_: object()
        )

    def await_any(self, calls: dict[Any, str], *, may_lose: bool, patience_s: float) -> list[Any]:
        if self.lost is not None:
            self.on_loss[self.lost](WorkerFailed("keeper: its process died", "traceback"))
            self.lost = None
        return [*calls]

    def ended(self, workers: list[Any]) -> list[Any]:
        self.asked.append([worker.name for worker in workers])
        return [worker for worker in workers if worker.slot in self.dead]

    def gather(self, calls: dict[Any, str]) -> list[CopyCost]:
        for call in calls:
            if isinstance(call, WorkerFailed):
                raise call
        return [CopyCost(num_bytes=1, seconds=3.0)] * len(calls)

    def end(self, worker: Any) -> None: ...


def on_two_nodes(session: Any, restarts: int) -> tuple[StateCopies, Any]:
    """Copies that are begun of a rank on each node, and the ranks."""
    copies = StateCopies(session, [0, 1], Restarts(restarts, 1e9), lambda _: None, timeout_s=600.0)
    ranks: Any = [SimpleNamespace(name=f"rank {slot}", slot=slot, peer=None) for slot in (0, 1)]
    copies.begin(1, 1, ranks)
    copies.settle()
    return copies, ranks


def test_a_keeper_that_dies_while_the_second_copies_are_made_holds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the first ones that it had, which nobody must be sent to, nor those that it was getting."""
    monkeypatch.setattr(state_copies, "failure", lambda _: None)
    session: Any = Session()
    copies, _ = on_two_nodes(session, restarts=1)
    session.lost = 1
    copies._settle_second()
    assert copies.newest
    assert copies.newest.holders == {"rank 0": frozenset({0}), "rank 1": frozenset({0})}


def test_nobody_is_sent_to_a_keeper_that_dies_while_new_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The generation was chosen before. The other keeper has all of it, and without that one it is lost."""
    monkeypatch.setattr(state_copies, "failure", lambda _: None)
    session: Any = Session()
    copies, ranks = on_two_nodes(session, restarts=9)
    copies._settle_second()
    chosen = copies.newest
    assert chosen
    dead = WorkerFailed("keeper: its process died", "traceback")
    session.on_loss[1](dead)
    copies.restore(chosen, ranks)
    session.on_loss[0](dead)
    with pytest.raises(CopiesLost, match="the copies of rank 0 after step 1 are lost") as raised:
        copies.restore(chosen, ranks)
    assert raised.value.ranks_are_untouched


@pytest.mark.parametrize("second", [True, False])
def test_a_rank_whose_keeper_dies_while_it_gives_is_given_the_second_copy(
    monkeypatch: pytest.MonkeyPatch, second: bool
) -> None:
    """The other rank has its own; without a second copy what this one has got is a part of its state."""
    monkeypatch.setattr(state_copies, "failure", lambda _: None)
    session: Any = Session()
    copies, ranks = on_two_nodes(session, restarts=9)
    if second:
        copies._settle_second()
    generation = copies.newest
    assert generation
    given: list[tuple[int, str]] = []
    keepers: Any = copies._keepers
    for node, keeper in keepers.items():
        keeper.call = lambda _, name, rank, node=node: given.append((node, name.rank)) or object()
    session.lost = 1
    if second:
        copies.restore(generation, ranks)
        assert given == [(0, "rank 0"), (1, "rank 1"), (0, "rank 1")]
    else:
        with pytest.raises(CopiesLost, match="the copies of rank 1 after step 1") as raised:
            copies.restore(generation, ranks)
        assert not raised.value.ranks_are_untouched


def test_ranks_have_got_a_part_where_the_only_keeper_dies_while_it_gives_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of them has got the whole, so that all wait again; but a state is written in place."""
    monkeypatch.setattr(state_copies, "failure", lambda _: None)
    session: Any = Session()
    copies = StateCopies(session, [0], Restarts(9, 1e9), lambda _: None, timeout_s=600.0)
    ranks: Any = [SimpleNamespace(name=f"rank {slot}", slot=slot, peer=None) for slot in (0, 1)]
    copies.begin(1, 1, ranks)
    copies.settle()
    generation = copies.newest
    assert generation
    session.lost = 0
    with pytest.raises(CopiesLost, match="the copies of rank 0 after step 1 are lost") as raised:
        copies.restore(generation, ranks)
    assert not raised.value.ranks_are_untouched


@pytest.mark.parametrize("dead", [set(), {2}, {0, 2}])
def test_calls_that_fail_ask_once_whether_their_keepers_have_ended(
    monkeypatch: pytest.MonkeyPatch, dead: set[int]
) -> None:
    """A call fails by its rank, too, and it takes a second to learn that a keeper lives. There are two ranks a node."""
    monkeypatch.setattr(
        state_copies, "failure", lambda call: call if isinstance(call, WorkerFailed) else None
    )
    session: Any = Session()
    copies = StateCopies(session, [0, 2], Restarts(9, 1e9), lambda _: None, timeout_s=600.0)
    ranks: Any = [SimpleNamespace(name=f"rank {n}", slot=n, peer=None) for n in range(4)]
    copies.begin(1, 1, ranks)
    copies.settle()
    copies._settle_second()
    generation = copies.newest
    assert generation
    failures: Any = {rank.name: WorkerFailed(f"{rank.name}: it is gone", "") for rank in ranks}
    keepers: Any = copies._keepers
    for keeper in keepers.values():
        keeper.call = lambda _, name, __: failures.pop(name.rank)
    session.dead = dead
    if dead == {0, 2}:
        with pytest.raises(CopiesLost) as raised:
            copies.restore(generation, ranks)
        assert not raised.value.ranks_are_untouched
    else:
        with pytest.raises(WorkerFailed, match="rank 0: it is gone"):
            copies.restore(generation, ranks)
    assert session.asked == [["keeper of copies 0", "keeper of copies 1"]]
    assert {keeper.slot for keeper in copies._keepers.values()} == {0, 2} - dead


def test_the_limit_of_copies_is_learnt_from_their_time_and_is_that_of_copies_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not from the wait for them, which is short behind a long rollout, nor from how long that was.

    A state is given back in its own time.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(state_copies, "failure", lambda _: None)
    monkeypatch.setattr(state_copies, "time", SimpleNamespace(monotonic=lambda: clock.now))
    session: Any = Session()
    copies = StateCopies(session, [0], Restarts(9, 1e9), lambda _: None, timeout_s=600.0)
    limits: list[float] = []
    monkeypatch.setattr(copies, "_await_all", lambda _, __, limit_s: limits.append(limit_s))
    ranks: Any = [SimpleNamespace(name="rank 0", slot=0, peer=None)]
    for step in range(1, 5):
        copies.begin(step, step, ranks)
        clock.now += 100.0
        copies.settle()
    # before each copy it is waited for the start of keepers, behind it for the copies between them
    assert limits[1::3] == [600.0, 600.0, 600.0, 15.0]
    assert set(limits[0::3]) == {600.0}
    assert copies.newest
    copies.restore(copies.newest, ranks)
    assert limits[-1] == 600.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]))
        with Cluster(2) as session:
            yield session


class World:
    """Two ranks on two nodes, and the copies of their states."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lines: list[str] = []
        self.copies = StateCopies(cluster, [0, 1], Restarts(1, 1e9), self.lines.append, 600.0)
        self.ranks: list[Worker] = []
        self.pids: list[int] = []
        self.start(seeds=(1, 2))

    def start(self, seeds: tuple[int, int]) -> None:
        """New ranks, with states of their own."""
        self.ranks = [
            self.cluster.worker(f"rank {number}", number, lambda _: None) for number in range(2)
        ]
        calls = {
            rank.start(TARGET, seed, STATE_BYTES): rank.name
            for rank, seed in zip(self.ranks, seeds, strict=True)
        }
        self.pids = self.cluster.gather(calls)

    def digests(self) -> list[Any]:
        return self.cluster.call_all(self.ranks, "digest")

    def copy(self, step: int) -> None:
        """With both keepers."""
        self.copies.begin(step, step, self.ranks)
        assert self.copies.settle()["recovery/copy_bytes"] == 2 * STATE_BYTES
        self.copies._settle_second()

    def kill_keeper(self, node: int) -> None:
        keeper = self.copies._keepers[node]
        (pulse,) = self.cluster.gather({keeper.pulse(): keeper.name})
        os.kill(pulse.pid, signal.SIGKILL)
        # the loss is noticed while something is waited for
        while node in self.copies._keepers:
            self.cluster.settle({self.ranks[0].call("digest"): self.ranks[0].name})

    def end(self) -> None:
        for worker in (*self.ranks, *self.copies._keepers.values()):
            self.cluster.end(worker)


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    world = World(cluster)
    yield world
    world.end()


@pytest.mark.slow
def test_new_ranks_get_the_states_of_those_that_were_killed_whichever_keeper_is_left(
    world: World,
) -> None:
    expected = world.digests()
    world.copy(step=4)
    for pid in world.pids:
        os.kill(pid, signal.SIGKILL)
    world.start(seeds=(8, 9))
    world.kill_keeper(1)
    assert world.digests() != expected
    newest = world.copies.newest
    assert newest and (newest.step, newest.version) == (4, 4)
    world.copies.restore(newest, world.ranks)
    assert world.digests() == expected
    (line,) = world.lines
    assert "keeper of copies 1" in line and "it is started anew" in line


@pytest.mark.slow
def test_the_generation_before_stays_until_the_next_is_whole(world: World, tmp_path: Path) -> None:
    expected = world.digests()
    world.copy(step=1)
    (rank, _) = world.ranks
    world.cluster.gather({rank.call("wait_for", tmp_path / "never"): rank.name})
    world.copies.begin(2, 2, world.ranks)
    os.kill(world.pids[0], signal.SIGKILL)
    assert world.copies.settle() == {}
    assert [line.startswith("rank 0 after step 2 is not copied: ") for line in world.lines] == [
        True
    ]
    newest = world.copies.newest
    assert newest and newest.step == world.copies.safe_step == 1
    world.start(seeds=(3, 4))
    world.copies.restore(newest, world.ranks)
    assert world.digests() == expected
    world.copy(step=2)
    assert world.copies.safe_step == 2


@pytest.mark.slow
def test_a_keeper_that_never_ends_a_copy_is_started_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that gets no more memory: it answers heartbeats all the same. Nothing is learnt from the wait for it."""
    learnt: list[float] = []
    deadline = Deadline(2.0)
    monkeypatch.setattr(deadline, "observe", learnt.append)
    assert world.copies._have_keepers()
    world.copies._deadline = deadline
    (rank, _) = world.ranks
    world.cluster.gather({rank.call("wait_for", tmp_path / "end"): rank.name})
    world.copies.begin(1, 1, world.ranks)
    assert world.copies.settle() == {}
    (tmp_path / "end").touch()
    assert any("has not ended a call for" in line for line in world.lines), world.lines
    assert not learnt
    deadline.ceiling_s = 600.0
    world.copy(step=2)
    assert learnt


@pytest.mark.slow
def test_a_copy_for_which_a_node_has_no_room_is_told_and_one_lost_too_often_is_the_last(
    world: World,
) -> None:
    (rank, _) = world.ranks
    world.cluster.gather({rank.call("pretend", 2**50): rank.name})
    world.copies.begin(1, 1, world.ranks)
    assert world.copies.settle() == {}
    assert (
        f"rank 0 after step 1 is not copied: {2**50} bytes, of which the node has" in world.lines[0]
    )
    world.kill_keeper(0)
    world.copies.start()
    world.kill_keeper(0)
    assert world.lines[-1].endswith("no more copies of the ranks' states are made")
    world.copies.begin(2, 2, world.ranks)
    assert world.copies.settle() == {} and world.copies.newest is None
