"""The calculator computes what Python's integers and fractions do, and nothing else, whatever a model writes."""

from __future__ import annotations

import operator
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environments.calculator import calculate
from megarl.environments.runtime.tool_loading import load_tools

OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
numbers = st.integers(min_value=-(10**9), max_value=10**9)
expressions = st.recursive(
    numbers.map(lambda number: (f"({number})" if number < 0 else str(number), number)),
    lambda inner: st.builds(
        lambda left, name, right: (f"({left[0]} {name} {right[0]})", name, left[1], right[1]),
        inner, st.sampled_from([*OPERATORS]), inner,
    ).map(lambda made: (made[0], _apply(made[1], made[2], made[3]))),
    max_leaves=6,
)  # fmt: skip


def _apply(name: str, left: int | None, right: int | None) -> int | None:
    """Python's own result; None: there is none."""
    if left is None or right is None or (name in ("//", "%") and right == 0):
        return None
    return OPERATORS[name](left, right)


@given(expression=expressions)
def test_whole_numbers_are_pythons(expression: tuple[str, int | None]) -> None:
    text, value = expression
    if value is None:
        with pytest.raises(ZeroDivisionError, match="^division by zero$"):
            calculate(text)
    else:
        assert calculate(text) == str(value)


@given(left=numbers, right=numbers.filter(bool))
def test_quotients_are_exact(left: int, right: int) -> None:
    text = calculate(f"({left}) / ({right})")
    exact = Fraction(left, right)
    written, _, rounded = text.partition(" = ")
    assert Fraction(written) == exact
    if rounded:
        assert float(rounded.removesuffix(" (rounded)")) == pytest.approx(float(exact), rel=1e-14)
    elif exact.denominator != 1:
        assert "/" not in written and not written.endswith("0")


@given(base=st.integers(-50, 50), exponent=st.integers(0, 40))
def test_powers_are_pythons(base: int, exponent: int) -> None:
    assert calculate(f"({base}) ** {exponent}") == str(base**exponent)


@given(text=st.text(max_size=60) | st.text("0123456789.+-*/%() e", max_size=60))
def test_whatever_is_written_there_is_a_text_or_an_error(text: str) -> None:
    with suppress(ValueError, ZeroDivisionError):
        assert len(calculate(text)) < 6000


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), (" 7 ", "7"), ("-7 // 2", "-4"), ("-7 % 3", "2"),
        ("2 ** -2", "0.25"),
        ("-2 ** 2", "-4"), ("2 ** 3 ** 2", "512"), ("0.1 + 0.2", "0.3"), ("1e3", "1000"),
        ("-0.5", "-0.5"), ("+1.50", "1.5"),
        ("1 / 3", "1/3 = 0.333333333333333 (rounded)"), ("10 / 4", "2.5"), ("1.005 * 100", "100.5"), ("0 ** 0", "1"),
        ("(-1) ** 99999999999", "-1"), ("1_000 * 2", "2000"), ("2 ** 4000 % 10", "6"),
        ("7.5 // 2", "3"), ("5.5 % 2", "1.5"),
    ],
)  # fmt: skip
def test_what_it_says(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "not an arithmetic expression"),
        ("2 +", "not an arithmetic expression"),
        ("x = 3", "not an arithmetic expression"),
        ("__import__('os').system('id')", "is not a number or one of"),
        ("open", "'open' is not a number or one of"),
        ("'a' * 9", "is not a number or one of"),
        ("True + 1", "'True' is not a number or one of"),
        ("1j", "is not a number or one of"),
        ("[1][0]", "is not a number or one of"),
        ("1 if 1 else 2", "is not a number or one of"),
        ("1 << 3", "is not a number or one of"),
        ("~1", "is not a number or one of"),
        ("1 < 2", "is not a number or one of"),
        ("lambda: 1", "is not a number or one of"),
        ("9 ** 9 ** 9", "a power has more than 4096 bits"),
        ("2 ** 5000", "a power has more than 4096 bits|a number has more than 4096 bits"),
        ("2 ** -99999999", "a power has more than 4096 bits"),
        ("(2 ** 4000) * (2 ** 4000)", "a number has more than 4096 bits"),
        ("1e99999", "a number has more than 4096 bits"),
        ("1e-99999999999999999999", "a number has more than 4096 bits"),
        ("2 ** 0.5", "an exponent is not a whole number"),
        ("0 ** -1", "division by zero"),
        ("1 % 0", "division by zero"),
        ("1+" * 600 + "1", "more than 1000 characters"),
        ("1+" * 300 + "1", "nests deeper than 100"),
        ("-" * 900 + "1", "nests deeper than 100|not an arithmetic expression"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
    ],
)
def test_what_it_refuses(expression: str, problem: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError), match=problem):
        calculate(expression)


def test_it_is_a_tool() -> None:
    (tool,) = load_tools(["megarl.environments.calculator:calculate"], {}).tools.values()
    assert tool.schema["function"]["parameters"]["required"] == ["expression"]
    assert tool.function(**tool.values({"expression": "6*7"})) == "42"
