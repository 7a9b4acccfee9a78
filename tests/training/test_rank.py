"""A rank by itself; what it computes with others is in tests/parallel."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megarl.training import policy
from megarl.training.policy import PolicyRank
from megarl.training.rank import TrainingRank


def test_the_disk_is_attended_to_until_the_call_of_that_number_has_ended(tmp_path: Path) -> None:
    """Also where the rank was started anew, and its predecessor had the calls before."""
    rank = TrainingRank.__new__(TrainingRank)
    rank._last_disk_call = 0
    rank._saved_in = tmp_path

    async def attend() -> None:
        attending = asyncio.ensure_future(rank.attend_disk(5, tmp_path))
        await asyncio.sleep(0)
        assert not attending.done()
        with rank._disk_call(5):
            pass
        await attending

    asyncio.run(asyncio.wait_for(attend(), 60.0))


class Exchanges:
    """Stands for those of a slot. failures: whether the next exchange fails, of all objects that share the list."""

    def __init__(self, session: Any, failures: list[bool]) -> None:
        self.session = session
        self.failures = failures
        self.is_open = True

    def of(self, _: str) -> Exchanges:
        return self

    def place(self, places: None) -> None:
        assert places is None

    def run(self, version: int, attempt: int) -> None:
        assert self.is_open
        if self.failures.pop(0):
            raise RuntimeError("the connection to the store is broken")

    def close(self) -> None:
        self.is_open = False


def test_an_exchange_that_fails_is_repeated_over_new_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the session is the same; an exchange that succeeds leaves them open for the next."""
    made: list[Exchanges] = []
    failures = [False, True, False, False]

    def open_exchanges(session: Any, _: Any) -> Exchanges:
        made.append(Exchanges(session, failures))
        return made[-1]

    monkeypatch.setattr(policy, "Exchanges", open_exchanges)
    rank: Any = PolicyRank.__new__(PolicyRank)
    rank.__dict__.update(_exchanges=None, params=dict, factors=dict)
    rank.reshard("session", 1, 1, ["weights"])
    with pytest.raises(RuntimeError, match="is broken"):
        rank.reshard("session", 2, 2, ["weights"])
    rank.reshard("session", 2, 3, ["weights"])
    rank.reshard("session", 3, 4, ["weights"])
    assert [exchanges.is_open for exchanges in made] == [False, True]
