"""What a program's answers are compared with, how they cross, and how an assertion is cut; without a sandbox."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.rewards.code_asserts import cut, imports_of
from megarl.rollout.rewards.code_tests import read_tests, same_output, same_value
from megarl.rollout.rewards.inside_tests import Encoder, decode

# --- comparing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n", "1 2", True), ("1  2", "1 2", True), (" 1\n2 \n\n", "1\n2\n", True), ("1\n\n2", "1\n2", False),
        ("1 2", "1\n2", False), ("", "0", False), ("0.3000000001", "0.3", True), ("0.31", "0.3", False),
        ("1", "1.0", True), ("1.0", "1", False), ("nan", "0.5", False), ("1e9", "1000000000", False),
        ("yes", "Yes", False), ("inf", "1e999", True),
    ],
)  # fmt: skip
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) == same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True), (1, 2, False), (True, 1, False), (1, True, False), (None, None, True), (0, None, False),
        ((1, [2]), [1, [2]], True), ([1], [1, 2], False), ({1: "a"}, {"1": "a"}, True), ({1: 2}, {"1": 3}, False),
        (0.1 + 0.2, 0.3, True), (1, 1.0, True), (1.0, 1, True), ("1", 1, False), ({1}, [1], False),
        (10**400, 1.5, False), (float("nan"), 1.0, False), (float("inf"), float("inf"), True), (1.5, "1.5", False),
    ],
)  # fmt: skip
def test_values(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) == same


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    | st.frozensets(st.integers() | st.text()) | st.sets(st.integers()),
)  # fmt: skip


@given(PLAIN)
def test_a_value_crosses_as_it_is(value: Any) -> None:
    crossed = json.loads(json.dumps(Encoder().encode(value)))
    arrived = decode(crossed)
    assert arrived == value and type(arrived) is type(value)


@pytest.mark.parametrize(
    "value", [Decimal("1.10"), Fraction(1, 3), [Decimal(2)], Counter("aab"), OrderedDict(a=1)]
)
def test_a_librarys_value_crosses_to_a_sandbox(value: Any) -> None:
    assert decode(json.loads(json.dumps(Encoder().encode(value))), is_inside=True) == value


@pytest.mark.parametrize(
    "value", [deque([1, 2]), range(1, 3), iter([1, 2]), (n for n in (1, 2)), {1: 0, 2: 0}.keys()]
)
def test_what_can_be_gone_through_crosses_as_that(value: Any) -> None:
    encoded = Encoder().encode(value)
    assert list(decode(encoded, is_inside=True)) == [1, 2]
    with pytest.raises(LookupError):
        decode(encoded)


@pytest.mark.parametrize("value", [object(), print, type("Own", (), {})(), iter(int, 1)])
def test_other_values_do_not_cross(value: Any) -> None:
    with pytest.raises(TypeError):
        Encoder().encode(value)


# --- cutting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expressions", "condition", "literal"),
    [
        ("assert f(1) == 2", ("f(1)",), "_0 == 2", (2,)),
        (
            "assert f(1) == {'a': (1, -2)}, 'why'",
            ("f(1)",),
            "_0 == {'a': (1, -2)}",
            ({"a": (1, -2)},),
        ),
        ("assert 2 == f(g(1))", ("f(g(1))",), "2 == _0", None),
        ("assert f(1) == f(2)", ("f(1)", "f(2)"), "_0 == _1", None),
        (
            "assert abs(Solution().f(x)[0] - 1) < 2",
            ("Solution().f(x)[0]",),
            "abs(_0 - 1) < 2",
            None,
        ),
        ("assert not f(sorted([1]))", ("f(sorted([1]))",), "not _0", None),
        ("assert math.isclose(f(math.pi), 1)", ("f(math.pi)",), "math.isclose(_0, 1)", None),
        ("assert bisect(1) == 2", ("bisect(1)",), "_0 == 2", (2,)),
        (
            "assert sorted(v for v in f(1)) == [1]",
            ("f(1)",),
            "sorted((v for v in _0)) == [1]",
            None,
        ),
        ("assert f([n for n in range(2)]) == 1", ("f([n for n in range(2)])",), "_0 == 1", (1,)),
    ],
)
def test_an_assertion_is_cut(
    text: str, expressions: tuple[str, ...], condition: str, literal: Any
) -> None:
    cuts = cut(text, imports_of([text]))
    assert cuts is not None
    (assertion,) = cuts
    assert (assertion.expressions, assertion.condition, assertion.literal) == (
        expressions,
        condition,
        literal,
    )


@pytest.mark.parametrize(
    "text",
    ["x = f(1)\nassert x == 2", "assert all(f(n) for n in (1, 2))", "assert (lambda: f(1))()", "assert 1 == 1",
     "assert (n := f(1)) and n > 0", "for n in (1, 2):\n    assert f(n)", "f(1)"],
)  # fmt: skip
def test_what_cannot_be_cut_is_left_whole(text: str) -> None:
    assert cut(text, "") is None
    assert read_tests([text]).checks[0].sent == ({"inside": text},)
