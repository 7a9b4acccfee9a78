"""A calculator that computes exactly, without eval."""

from __future__ import annotations

import ast
from fractions import Fraction

_MOST_CHARACTERS = 1000
_MOST_DEPTH = 100
_MOST_BITS = 4096  # of a numerator or a denominator
_DIGITS = 15  # of a decimal fraction that is not exact
_OPERATIONS = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: Fraction.__mod__,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression exactly, for example (3 + 4) * 12 ** 2 / 5.

    Args:
        expression: numbers and the operators + - * / // % ** with parentheses
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {_MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is not an arithmetic expression") from None
    try:
        return _written(_value(tree.body, expression.strip(), _MOST_DEPTH))
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth == 0:
        raise ValueError(f"the expression nests deeper than {_MOST_DEPTH}")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            written = ast.get_source_segment(text, node) or ""
            if isinstance(value, int):
                found = Fraction(value)
            else:
                found = _decimal(written)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            inner = _value(operand, text, depth - 1)
            if isinstance(sign, ast.USub):
                found = -inner
            else:
                found = inner
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            found = _power(_value(left, text, depth - 1), _value(right, text, depth - 1))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATIONS:
            found = _OPERATIONS[type(operator)](
                _value(left, text, depth - 1), _value(right, text, depth - 1)
            )
        case _:
            raise ValueError(
                f"{ast.unparse(node)[:60]!r} is not a number or one of + - * / // % **"
            )
    if _bits(found) > _MOST_BITS:
        raise ValueError(f"a number has more than {_MOST_BITS} bits")
    return found


def _decimal(written: str) -> Fraction:
    """A decimal number as it is written: 0.1 is a tenth."""
    exponent = written.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > _MOST_BITS:
        raise ValueError(f"a number has more than {_MOST_BITS} bits")
    return Fraction(written)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent is not a whole number")
    if base not in (0, 1, -1) and _bits(base) * abs(exponent.numerator) > 2 * _MOST_BITS:
        raise ValueError(f"a power has more than {_MOST_BITS} bits")
    if base in (1, -1):
        if exponent.numerator % 2:
            return base
        return Fraction(1)
    return Fraction(base**exponent.numerator)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _written(value: Fraction) -> str:
    """An integer or a finite decimal fraction exactly; any other as a fraction with its beginning as decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    twos = 0
    fives = 0
    while rest % 2 == 0:
        rest = rest // 2
        twos = twos + 1
    while rest % 5 == 0:
        rest = rest // 5
        fives = fives + 1
    digits = max(twos, fives)
    if rest == 1 and digits <= _DIGITS:
        sign = "-" if value < 0 else ""
        whole = abs(value.numerator) * 10**digits // value.denominator
        return f"{sign}{whole // 10**digits}.{whole % 10**digits:0{digits}d}"
    try:
        return f"{value} = {float(value):.{_DIGITS}g} (rounded)"
    except OverflowError:
        return str(value)
