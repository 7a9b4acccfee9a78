"""Return values become observations; texts are cut to their bound, whatever letters they have."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environments import Observation
from megarl.environments.runtime.results import BadResult, cut, observation_of


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("x", "x"),
        (None, ""),
        (7, "7"),
        (0.5, "0.5"),
        (True, "true"),
        ({"a": ["ä"]}, '{"a": ["ä"]}'),
        ("", ""),
    ],
)
def test_text_and_what_json_holds_are_results(result: Any, text: str) -> None:
    assert observation_of(result, 100) == Observation(text)


def test_an_observation_keeps_its_reward_and_its_end() -> None:
    result = observation_of(Observation("x" * 1000, np.float32(0.5), np.bool_(True)), 100)  # type: ignore[arg-type]
    assert (
        (result.reward, result.done) == (0.5, True)
        and type(result.reward) is float
        and type(result.done) is bool
    )
    assert "left out" in result.text


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (object(), "a value of type object"),
        (float("nan"), "type float"),
        (b"x", "type bytes"),
        (Decimal(1), "type Decimal"),
        (Observation(3), "whose text is 3"),  # type: ignore[arg-type]
        (Observation("", float("inf")), "whose reward is inf"),
        (Observation("", 1e39), "whose reward is 1e+39"),
        (Observation("", None), "whose reward is None"),  # type: ignore[arg-type]
        (Observation("", "1"), "whose reward is '1'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_result_is_told(result: Any, says: str) -> None:
    with pytest.raises(BadResult, match=says.replace("+", r"\+")):
        observation_of(result, 100)


@given(text=st.text(st.characters(codec=None)), most_bytes=st.integers(min_value=2, max_value=40))
def test_a_text_is_whole_or_keeps_its_ends(text: str, most_bytes: int) -> None:
    shown = cut(text, most_bytes)
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most_bytes:
        assert shown.encode() == raw
        return
    head, _, tail = shown.partition("\n[... ")
    number, _, tail = tail.partition(" characters left out ...]\n")
    clean = raw.decode()
    assert clean.startswith(head) and clean.endswith(tail)
    assert len(head) + int(number) + len(tail) == len(text)
    assert len(head.encode()) + len(tail.encode()) <= most_bytes
    assert len(head.encode()) + len(tail.encode()) > most_bytes - 8, (
        "no more is left out than letters demand"
    )
