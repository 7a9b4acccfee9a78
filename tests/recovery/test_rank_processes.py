"""What is said, and when, of ranks whose processes are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.recovery.rank_processes import RankProcesses


class Cluster:
    """In the place of a cluster: it starts workers by name, and notes in order what it is told."""

    host = "127.0.0.1"

    def __init__(self, *, has_ended: bool) -> None:
        self._has_ended = has_ended
        self.told: list[str] = []
        self.on_loss: list[Callable[[Exception], None]] = []

    def worker(self, name: str, slot: int, on_loss: Any, *, computes: bool) -> Any:
        self.on_loss.append(on_loss)
        return SimpleNamespace(name=name, slot=slot, start=lambda *_: name)

    def has_ended(self, worker: Any) -> bool:
        return self._has_ended

    def say(self, line: str) -> None:
        self.told.append(line)

    def end_all(self, workers: Sequence[Any]) -> None:
        self.told.append(f"{len(workers)} ended")


@pytest.mark.parametrize(
    ("has_ended", "told"),
    [
        (False, ["rank 1 is silent; the ranks are ended", "2 ended"]),
        (True, ["2 ended"]),
    ],
    ids=["hang", "death"],
)
def test_ranks_that_hang_are_told_of_before_their_processes_are_ended(
    has_ended: bool, told: list[str]
) -> None:
    """Who says that a rank has died says at once what the run does about it."""
    cluster: Any = Cluster(has_ended=has_ended)
    run = SimpleNamespace(restarts=3, timeout_s=5)
    role: Any = SimpleNamespace(recipe=SimpleNamespace(run=run), slots=(0, 1), trains=True)
    ranks = RankProcesses(cluster, role, name="rank", target="Rank")
    ranks.start()
    cluster.on_loss[1](WorkerFailed("rank 1 is silent", "evidence", "rank 1"))
    assert cluster.told == told
    assert ranks.loss and ranks.loss.rank == "rank 1"
    cluster.on_loss[0](WorkerFailed("rank 0 is silent", "evidence", "rank 0"))
    assert cluster.told == told, "the ranks are lost together"
