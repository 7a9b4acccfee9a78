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
            if isinstance(value, int):
                result = Fraction(value)
            else:
                result = _decimal(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _value(operand, text, depth - 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand, text, depth - 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            result = _power(_value(left, text, depth - 1), _value(right, text, depth - 1))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATIONS:
            result = _OPERATIONS[type(operator)](
                _value(left, text, depth - 1), _value(right, text, depth - 1)
            )
        case _:
            raise ValueError(
                f"{ast.unparse(node)[:60]!r} is not a number or one of + - * / // % **"
            )
    if _bits(result) > _MOST_BITS:
        raise ValueError(f"a number has more than {_MOST_BITS} bits")
    return result


def _decimal(written: str) -> Fraction:
    """A decimal number as it is written: 0.1 is a tenth."""
    exponent = written.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > _MOST_BITS:
        raise ValueError(f"a number has more than {_MOST_BITS} bits")
    return Fraction(written)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent is not a whole number")
    if base in (1, -1):
        return base ** (exponent.numerator % 2)
    if base and _bits(base) * abs(exponent.numerator) > 2 * _MOST_BITS:
        raise ValueError(f"a power has more than {_MOST_BITS} bits")
    return base**exponent.numerator


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _written(value: Fraction) -> str:
    """An integer or a finite decimal fraction exactly; any other as a fraction with its beginning as decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    shifted = abs(value) * 10**_DIGITS
    if shifted.denominator == 1:
        sign = "-" if value < 0 else ""
        whole, decimals = divmod(shifted.numerator, 10**_DIGITS)
        return f"{sign}{whole}.{decimals:0{_DIGITS}d}".rstrip("0")
    try:
        return f"{value} = {float(value):.{_DIGITS}g} (rounded)"
    except OverflowError:
        return str(value)
