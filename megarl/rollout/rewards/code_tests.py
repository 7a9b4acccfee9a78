"""Tests of a program: reading them from a data row, and comparing a program's results with the expected ones. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megarl.rollout.rewards.code_asserts import Cut, cut, imports_of
from megarl.rollout.rewards.inside_tests import decode
from megarl.types.json_objects import JsonObject

_TOLERANCE = 1e-6  # relative and absolute, between numbers with a fraction
_NAMES = ("fn_name", "func_name")
# Tasks that give a function's signature annotate it with these names.
_CALL_SETUP = "from typing import *"

# of a report whose value the program wrote itself
_NO_VALUE = (ValueError, TypeError, LookupError, RecursionError)

TestReport = Mapping[str, Any]  # of one test, by inside_tests.py


@dataclass(frozen=True)
class Check:
    """One test. sent: its parts for the sandbox; passes: their reports -> whether it passed, or an expression that says
    so when it is evaluated in a sandbox without the program."""

    sent: tuple[JsonObject, ...]
    passes: Callable[[Sequence[TestReport]], bool | str]


@dataclass(frozen=True)
class Suite:
    setup: str
    checks: tuple[Check, ...]


def read_tests(tests: Any) -> Suite:
    """The tests of one row: JSON text, or its value. Raises ValueError for tests of another form.

    {"inputs": [...], "outputs": [...]}: stdin and stdout; with "fn_name": arguments and result of a function, or of a
    method of `Solution`; [{"input": ..., "output": ...}, ...]: the same; ["assert ...", ...].
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"the tests are not JSON ({error})") from error
    match tests:
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            name = _function_name([tests])
        case [*_] if all(isinstance(test, Mapping) for test in tests):
            try:
                inputs = [test["input"] for test in tests]
                outputs = [test["output"] for test in tests]
            except KeyError as error:
                raise ValueError(f"a test has no {error.args[0]!r}") from error
            name = _function_name(tests)
            if name is None and any(test.get("testtype") == "functional" for test in tests):
                raise ValueError("tests of a function without its fn_name")
        case [*_] if all(isinstance(test, str) for test in tests):
            return _asserts(tests)
        case _:
            raise ValueError("the tests are neither inputs and outputs nor a list of assertions")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name:
        return _calls(name, inputs, outputs)
    return Suite("", tuple(map(_stdin, inputs, outputs)))


def _function_name(tests: Sequence[Mapping[str, Any]]) -> str | None:
    """The name of the function that the tests call; None where they are of a program's input and output."""
    return next((test[key] for test in tests for key in _NAMES if test.get(key)), None)


# --- stdin and stdout --------------------------------------------------------------------------------------------


def _stdin(stdin: Any, expected: Any) -> Check:
    expected_text = _text(expected)

    def passes(reports: Sequence[TestReport]) -> bool:
        return reports[0]["status"] == 0 and same_output(reports[0]["stdout"], expected_text)

    return Check(({"stdin": _text(stdin)},), passes)


def _text(lines: Any) -> str:
    if isinstance(lines, list):
        return "\n".join(map(str, lines))
    return str(lines)


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs are equal but for white space at the ends of lines and of the whole.

    A number that is expected with a fraction may be off by a millionth.
    """
    ours = output.strip().splitlines()
    theirs = expected.strip().splitlines()
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    words = ours.split()
    expected_words = theirs.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs or not any(mark in theirs for mark in ".eE"):
        return ours == theirs
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False


# --- calls -------------------------------------------------------------------------------------------------------


def _calls(name: str, inputs: list[Any], outputs: list[Any]) -> Suite:
    # LiveCodeBench writes an argument a line, as JSON; APPS puts every result into a list of one.
    results = [_from_json(output) for output in outputs]
    wrapped = all(isinstance(result, list) and len(result) == 1 for result in results)
    checks = []
    for arguments, result in zip(inputs, results, strict=True):
        if isinstance(arguments, str):
            arguments = list(map(json.loads, arguments.splitlines()))
        checks.append(_call(name, arguments, result, wrapped))
    return Suite(_CALL_SETUP, tuple(checks))


def _from_json(output: Any) -> Any:
    if isinstance(output, str):
        with suppress(ValueError):
            return json.loads(output)
    return output


def _call(name: str, arguments: list[Any], expected: Any, wrapped: bool) -> Check:
    def passes(reports: Sequence[TestReport]) -> bool:
        try:
            value = decode(_encoded(reports[0]))
        except _NO_VALUE:
            return False
        return same_value(value, expected) or (wrapped and same_value(value, expected[0]))

    return Check(({"call": name, "arguments": arguments},), passes)


def same_value(value: Any, expected: Any) -> bool:
    """Equal as JSON: tuples are lists, keys are strings, True is not 1; floats may be off by a millionth."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        ours = {str(key): item for key, item in value.items()}
        return ours.keys() == expected.keys() and all(
            same_value(ours[key], expected[key]) for key in ours
        )
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        if type(value) is type(expected) is int:
            return value == expected
        with suppress(OverflowError):  # an integer beyond all floats
            return math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        return False
    return type(value) is type(expected) and value == expected


# --- assertions --------------------------------------------------------------------------------------------------


def _asserts(texts: Sequence[str]) -> Suite:
    imports = imports_of(texts)
    checks = []
    for text in texts:
        cuts = cut(text, imports)
        if cuts is None:
            checks.append(
                Check(
                    ({"inside": text},),
                    lambda reports: reports[0]["status"] == 0 and reports[0]["passed"],
                )
            )
        elif cuts:
            checks.append(_assertions(cuts))
    if not checks:
        raise ValueError("no assertion among the tests")
    return Suite(imports, tuple(checks))


def _assertions(cuts: Sequence[Cut]) -> Check:
    def passes(reports: Sequence[TestReport]) -> bool | str:
        conditions = []
        values = map(_encoded, reports)
        for each in cuts:
            try:
                result = _condition(each, list(islice(values, len(each.expressions))))
            except _NO_VALUE:
                return False
            if not result:
                return False
            if isinstance(result, str):
                conditions.append(result)
        return " and ".join(conditions) or True

    return Check(tuple({"expression": text} for each in cuts for text in each.expressions), passes)


def _condition(assertion: Cut, values: list[Any]) -> bool | str:
    """Whether an assertion with a literal holds; of others the condition with its values."""
    if assertion.literal is not None:
        with suppress(LookupError):  # of a type without literals
            return decode(values[0]) == assertion.literal[0]
    # all values are one literal, whatever text of the program is in them and however deep they are
    encoded = f"__import__('json').loads({json.dumps(values)!r})"
    names = ", ".join(f"_{index}" for index in range(len(values)))
    return f"bool((lambda {names}: {assertion.condition})(*map(_value, {encoded})))"


def _encoded(report: TestReport) -> Any:
    if report["status"] != 0:
        raise ValueError(f"ended with {report['status']}")
    return json.loads(report["value"])
