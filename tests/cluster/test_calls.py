"""What becomes of workers that are lost together, or whose place another has taken; Ray is stood in for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ray.exceptions

from megarl.cluster import calls
from megarl.cluster.calls import Calls
from megarl.cluster.failures import ResultsLost, WorkerFailed, reported


@dataclass(eq=False)
class Worker:
    name: str
    watch_refs: list[Any]
    computes: bool = False


class Session(Calls):
    """Workers by name, whose references are strings; `errors`: what a reference has raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(timeout_s=600.0)
        monkeypatch.setattr(Calls, "_is_here", lambda *_: True)
        monkeypatch.setattr(Calls, "_is_displaced", lambda _, worker: worker in self.displaced)
        self.displaced: list[Any] = []
        self.errors: dict[str, Exception] = {}
        self.told: list[str] = []
        monkeypatch.setattr(calls, "failure", self.errors.get)
        monkeypatch.setattr(calls.ray, "wait", self._waited)

    def _waited(self, refs: Sequence[str], **_: Any) -> tuple[list[str], list[str]]:
        return [ref for ref in refs if ref in self.errors], []

    def _ended(self, refs: list[Any], watched: Sequence[Any]) -> list[Any]:
        return [ref for ref in refs if ref in self.errors or ref == "returned"]

    def add(self, name: str, ref: str, on_loss: Callable[[], None], *more_refs: str) -> Any:
        worker: Any = Worker(name, [ref, *more_refs])

        def told(_: Exception) -> None:
            self.told.append(ref)
            on_loss()

        self._workers.append(worker)
        self._owners[worker] = told
        return worker

    def settled(self, ref: Any) -> bool:
        """Whether a call to engine 0 settles."""
        return self.settle({ref: "engine 0"})

    def kill(self, ref: str) -> None:
        self.errors[ref] = ray.exceptions.ActorDiedError()


class Pair:
    """Two ranks, which their owner ends together."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.workers = [session.add(f"rank {rank}", f"watch {rank}", self.end) for rank in (0, 1)]
        for rank in (0, 1):
            session.kill(f"watch {rank}")

    def end(self) -> None:
        for worker in self.workers:
            self.session._forget(worker)


def test_an_owner_is_told_once_of_workers_that_die_in_one_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a node do: the owner has ended the second one with the first."""
    session = Session(monkeypatch)
    Pair(session)
    returned: Any = "returned"
    assert session.await_any({returned: "engine 0"}) == [returned]
    assert session.told == ["watch 0"]


def test_an_owner_is_told_once_of_a_worker_all_of_whose_watches_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine is watched by two calls, which end together with its node."""
    session = Session(monkeypatch)
    session.add("engine 1", "watch", lambda: None, "fail")
    session.kill("watch")
    session.kill("fail")
    returned: Any = "returned"
    assert session.await_any({returned: "engine 0"}) == [returned]
    assert session.told == ["watch"]


@pytest.mark.parametrize(
    ("silence_s", "is_stopped", "told"),
    [(6.0, True, ["watch"]), (6.0, False, []), (5.0, True, [])],
)
def test_a_worker_that_a_signal_stops_while_it_starts_is_not_given_the_time_of_a_start(
    monkeypatch: pytest.MonkeyPatch, silence_s: float, is_stopped: bool, told: list[str]
) -> None:
    session = Session(monkeypatch)
    rank = session.add("rank 0", "watch", lambda: None)
    monkeypatch.setattr(session._quick_pulses, "silence_s", lambda _: silence_s)
    monkeypatch.setattr(session, "is_stopped", lambda _: is_stopped)
    session._judge_silence([rank])
    assert session.told == told


def test_while_a_result_is_fetched_workers_are_asked_for_heartbeats_and_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(monkeypatch)
    session.add("engine 0", "watch", lambda: None)
    asked: list[int] = []
    monkeypatch.setattr(session._pulses, "look", lambda workers: None)
    monkeypatch.setattr(session._quick_pulses, "look", lambda workers: asked.append(len(workers)))
    monkeypatch.setattr(session._quick_pulses, "is_overdue", lambda worker: bool(asked))
    monkeypatch.setattr(session, "is_stopped", lambda _: False)
    session._fetch.keywords["look"]()
    assert asked == [1] and session.told == ["watch"]


@pytest.mark.parametrize("is_silent", [True, False])
def test_what_an_owner_was_told_is_the_cause_of_all_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """At once; the call of a worker that is there may have failed because of another's death, which shows later."""
    session = Session(monkeypatch)
    workers: list[Any] = []

    def end() -> None:
        for worker in workers:
            session._forget(worker)

    workers += [session.add(f"rank {rank}", f"watch {rank}", end) for rank in (0, 1)]
    if is_silent:
        monkeypatch.setattr(
            session._quick_pulses, "is_overdue", lambda worker: worker is workers[1]
        )
        session._judge_silence(workers)
    session.kill("call")
    waits_s: list[float] = []
    waited = session._waited

    def noted(refs: Sequence[str], timeout: float, **options: Any) -> tuple[list[str], list[str]]:
        waits_s.append(timeout)
        return waited(refs, **options)

    monkeypatch.setattr(calls.ray, "wait", noted)
    monkeypatch.setattr(session._pulses, "ask", lambda _: None)
    call: Any = "call"
    cause = "rank 1 has not answered" if is_silent else "rank 0: its process died"
    with pytest.raises(WorkerFailed, match=cause):
        session.gather({call: "rank 0"})
    assert bool(waits_s) != is_silent


def test_a_silent_worker_is_killed_at_once_with_those_that_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray asks a process to end; one that has no memory for an answer would be waited for."""
    session = Session(monkeypatch)
    workers = [session.add(f"rank {rank}", f"watch {rank}", lambda: None) for rank in (0, 1)]
    events: list[str] = []
    for worker in workers:
        worker.kill = lambda: events.append("asked")
    monkeypatch.setattr(session._quick_pulses, "is_overdue", lambda worker: worker is workers[1])
    monkeypatch.setattr(session, "end", lambda worker: events.append(f"{worker.name} killed"))
    monkeypatch.setattr(calls.ray, "wait", lambda refs, **_: events.append("waited") or (refs, []))
    session.end_all(workers)
    assert events == ["asked", "asked", "rank 1 killed", "waited"]


def test_calls_settle_where_an_owner_ends_the_others_with_a_worker_that_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(monkeypatch)
    Pair(session)
    assert session.settled("returned")
    assert len(session.told) == 1


def test_a_worker_is_lost_whose_slot_is_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node seemed dead while another worker of it was started anew, and answers again."""
    session = Session(monkeypatch)
    session.displaced.append(session.add("rank 0", "watch 0", lambda: None))
    session.add("rank 1", "watch 1", lambda: None)
    session.settled("returned")
    assert session.told == ["watch 0"]


def test_nothing_is_waited_for_once_a_wait_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch)
    seen: list[Any] = []
    monkeypatch.setattr(session, "_ended", lambda refs, _: seen.append(session._awaited) or refs)
    labels: Any = {"returned": "engine 0"}
    assert session.await_any(labels) == ["returned"]
    assert seen == [(labels, {})] and session._awaited == ()


def test_calls_settle_where_the_last_one_to_be_waited_for_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two engines in an exchange the one was given up first that had waited for the other."""
    session = Session(monkeypatch)
    engine = session.add("engine 0", "watch", lambda: session.kill("call"))
    engine.computes = True
    session._quick_pulses.still_s[engine] = 30.0
    looks = iter(range(3))
    monkeypatch.setattr(session, "_judge_silence", lambda _: next(looks))
    monkeypatch.setattr(session._stillness, "is_overdue", lambda _, still_s: still_s == [30.0])
    monkeypatch.setattr(session, "_before_hang", pytest.fail)
    assert session.settled("call")
    assert session.told == ["watch"]


def test_workers_that_an_owner_has_ended_are_not_judged_by_their_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(monkeypatch)
    workers = Pair(session).workers
    monkeypatch.setattr(session._quick_pulses, "is_overdue", lambda worker: True)
    monkeypatch.setattr(session._pulses, "silence_s", lambda worker: 600.0)
    session._judge_silence(workers)
    assert session.told == ["watch 0"]
    session._workers.append(workers[1])
    with pytest.raises(WorkerFailed, match="rank 1 has not answered"):
        session._judge_silence(workers)


def test_the_call_of_a_worker_that_is_replaced_already_does_not_count_for_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(monkeypatch)
    successors: list[Any] = []

    def replace() -> None:
        successors.append(session.add("engine 0", "watch new", lambda: None))

    session.add("engine 0", "watch old", replace)
    session.kill("watch old")
    session.kill("call")
    assert session.settled("call")
    assert (session.told, len(successors)) == (["watch old"], 1)
    assert session.settled("call"), "also where the loss was told before"
    session.kill("watch new")
    assert session.settled("call")
    assert session.told == ["watch old", "watch new"]


@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_what_is_lost_with_its_node_is_told_from_other_errors(num_calls: int) -> None:
    """However many calls it was handed on by."""
    error: ray.exceptions.RayError = ray.exceptions.ObjectLostError("ab" * 28, None, "")  # type: ignore[arg-type]
    for _ in range(num_calls):
        error = ray.exceptions.RayTaskError("train", "traceback", error, "", 1, "127.0.0.1")
    lost = reported("rank 0", error)
    assert isinstance(lost, ResultsLost) and lost.worker == "rank 0"
    other = ray.exceptions.RayTaskError("train", "traceback", ValueError(), "", 1, "127.0.0.1")
    assert not isinstance(reported("rank 0", other), ResultsLost)


def test_a_result_that_is_lost_with_its_node_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call had ended before its node died: nothing else tells of it."""
    session = Session(monkeypatch)

    def get(ref: Any, **_: Any) -> None:
        raise ray.exceptions.ObjectLostError(ref, None, "")

    monkeypatch.setattr(calls.ray, "get", get)
    returned: Any = "returned"
    (outcome,) = session.outcomes({returned: "engine 1"})
    assert isinstance(outcome, ResultsLost)
    assert outcome.worker == "engine 1"
