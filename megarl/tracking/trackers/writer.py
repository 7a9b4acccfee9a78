"""Runs a tracker's calls in a thread of their own, and reports its failure in one line."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from threading import Thread

from megarl.printable import one_line
from megarl.tracking.trackers.interface import State, Tracker
from megarl.tracking.trackers.withheld import redacted

_MOST_WAITING = 1000  # writes in the queue; further ones are dropped

Call = tuple[str, Callable[[], None]]  # (description of the write, function that writes)


class Writer:
    """Calls one tracker, so that neither its network nor its errors reach the run.

    The thread is a daemon: a call that never returns does not keep the process from ending.
    """

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._calls: queue.Queue[Call | None] = queue.Queue()
        self._has_failed = False
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, what: str, call: Callable[[], None]) -> None:
        """Queue a write; returns at once."""
        if self._calls.qsize() >= _MOST_WAITING:
            self._fail(f"{what} is left out, {_MOST_WAITING} writes are waiting already")
        elif self._thread.is_alive():  # it has ended if the tracker could not be opened
            self._calls.put((what, call))

    def end(self, state: State) -> None:
        """Queue the run's end after all waiting writes; returns at once."""
        self._calls.put(("the end of the run", lambda: self._tracker.close(state)))
        self._calls.put(None)

    def join(self, deadline: float) -> None:
        """Wait until everything is written, or until the deadline by time.monotonic."""
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def leave(self) -> None:
        """Abandon the tracker if it has not finished."""
        if self._thread.is_alive():
            try:
                self._fail("it does not finish, and is abandoned so that the run can end")
            finally:
                self._tracker.abandon()

    def _work(self) -> None:
        try:
            where = self._tracker.open()
        except Exception as error:
            self._fail(f"it does not open, and the run goes on without it ({reason(error)})")
            self._tracker.abandon()
            return
        if where:
            self._say(f"{self._name}: {redacted(where)}")
        while found := self._calls.get():
            what, call = found
            try:
                call()
            except Exception as error:
                self._fail(f"{what} is not written, and the run goes on ({reason(error)})")

    def _fail(self, problem: str) -> None:
        """Report the first failure only; later writes are still tried."""
        if not self._has_failed:
            self._has_failed = True
            self._say(f"{self._name}: {problem}; metrics.jsonl has everything")


def reason(error: BaseException) -> str:
    """The type and the first line of an error as one line, without secrets."""
    lines = str(error).strip().splitlines() or [""]
    return one_line(redacted(f"{type(error).__name__}: {lines[0]}".removesuffix(": ")))
