"""The bench of episodes: the splice against rendering, and one small run of it."""

from __future__ import annotations

import pytest

from scripts.bench.episodes import Lag, tokenising_against_rendering
from tests.scripts.bench.benches import figures


def test_the_turn_tokenizer_does_not_grow_with_the_conversation() -> None:
    """Rendering 256 turns takes many times what it takes for 4, on any machine; the splice has the same work."""
    short, long = (tokenising_against_rendering(turns, repeats=15) for turns in (4, 256))
    assert long["tokens"] > 50 * short["tokens"]
    assert long["ratio"] > 10 * short["ratio"]


def test_a_lag_is_what_a_task_is_woken_too_late() -> None:
    lag = Lag()
    assert lag.p99_ms() == 0, "nothing was seen yet"
    lag.seconds += [0.001] * 980 + [0.2] * 20
    assert lag.p99_ms() == pytest.approx(200)


@pytest.mark.slow
@pytest.mark.nightly  # a bench, of parts that other tests run by day
def test_a_run_plays_every_turn_and_every_hung_call_ends() -> None:
    small = "--episodes 4 8 --turns 3 --conversations 2 --repeats 2 --group 8"
    results = figures("episodes", f"{small} --hung-share 0.125 --call-timeout-s 0.5")
    for count, row in zip((4, 8), results["turns"].values(), strict=True):
        assert (row["turns"], row["ends_answered"], row["call_errors"]) == (3 * count, count, 0)
        assert 0 < row["turn_ms"] == pytest.approx(1e3 * row["wall_s"] / row["turns"])
    none, some = results["hung"].values()
    assert (none["call_errors"], some["hung"]) == (0, 2)
    assert some["call_errors"] >= 2, "a call that hangs is told to the model, which goes on"
    assert none["ends_answered"] == some["ends_answered"] == 8
    assert some["wall_s"] > 0.5
