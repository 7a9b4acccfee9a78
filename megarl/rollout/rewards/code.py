"""Scores programs by running their tests in a sandbox.

A program's results are compared outside of the sandbox; the expected ones never enter it. So it gains nothing by
exiting early, replacing built-in functions, equalling everything or reading other processes' memory. Two things cannot
be prevented. A program may exploit weak tests, for example print each of a few possible answers. And a test that is
neither input and output nor an assertion on what the program computes (several statements, or objects of the program's
classes in variables) runs in the program's process: a random token that the process gets after the program has started
proves that it passed, and a program written against this file can find it.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from megarl.isolation import http_service, sandbox
from megarl.isolation.sandbox import Outcome, SandboxLimits
from megarl.rollout.rewards import SANDBOX_HINT, WHERE
from megarl.rollout.rewards.code_tests import Suite, TestReport, read_tests
from megarl.rollout.rewards.inside_tests import BEGUN
from megarl.types.json_objects import Columns, JsonObject
from megarl.types.reward_result import RewardResult

_INSIDE = Path(__file__).with_name("inside_tests.py").read_text(encoding="utf-8")
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.I
)
_OUTPUT_BYTES = 4 << 20  # of one test
_ALL_OUTPUT_BYTES = 64 << 20


def score(
    response: str,
    answer: str,
    row: Columns,
    *,
    tests: str = "tests",
    timeout_s: float = 4.0,
    total_s: float = 30.0,
    memory_mb: int = 512,
    unsafe: bool = False,
    url: str | None = None,
    partial: bool = False,
    wrong: float = 0.0,
) -> RewardResult:
    """1 when the last ```python block of the response passes all tests in row[tests], else wrong; see read_tests.

    timeout_s: of one test; total_s: of all, those not reached by then fail. partial: the share of passed
    tests is the reward, wrong if none is. url: a SandboxFusion service instead of this machine. Raises ValueError for
    tests that cannot be read, UserError where there is no isolation, ConnectionError from the service, RuntimeError
    when a sandbox does not start the tests: none of them is a verdict.
    """
    if tests not in row:
        raise ValueError(f"the row has no column {tests!r}")
    suite = read_tests(row[tests])
    blocks = _BLOCK.findall(response)
    if not blocks:
        return RewardResult(wrong, False)
    limits = SandboxLimits(
        wall_s=total_s,
        cpu_s=math.ceil(timeout_s) + 1,
        memory_mb=memory_mb,
        stdout_bytes=_ALL_OUTPUT_BYTES,
    )
    run = functools.partial(sandbox.run, where=WHERE, unsafe=unsafe, hint=SANDBOX_HINT)
    if url is not None:
        run = functools.partial(http_service.run, url)
    passed = _passed(_Runner(run, limits, timeout_s), blocks[-1], suite, stop=not partial)
    num_passed = sum(passed)
    if num_passed == len(passed):
        return RewardResult(1.0, True)
    return RewardResult(num_passed / len(passed) if partial and num_passed else wrong, False)


@dataclass(frozen=True)
class _Runner:
    """Where programs run, and their limits."""

    run: Callable[[str, str, SandboxLimits], Outcome]  # of a program, its stdin and its limits
    limits: SandboxLimits
    timeout_s: float

    def reports(
        self, program: str, setup: str, tests: Sequence[JsonObject], *, stop: bool
    ) -> list[TestReport]:
        """A report for each test that was run, in order. stop: run no test after one that exits with an error."""
        job = {
            "program": program,
            "setup": setup,
            "tests": tests,
            "wall_s": self.timeout_s,
            "output_bytes": _OUTPUT_BYTES,
            "stop": stop,
        }
        outcome = self.run(_INSIDE, json.dumps(job), self.limits)
        begun, _, reports = outcome.stdout.partition("\n")
        if begun != BEGUN:  # the program has not been started yet
            reason = (outcome.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the sandbox did not start the tests ({reason[:200]})")
        return _read_reports(reports)


def _read_reports(output: str) -> list[TestReport]:
    """The lines that are reports, up to the first that is not: a program may have written it."""
    reports: list[TestReport] = []
    for line in output.splitlines():
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            break
        match report:
            case {"status": int() | None, "stdout": str(), "value": str(), "passed": bool()}:
                reports.append(report)
            case _:
                break
    return reports


def _passed(runner: _Runner, program: str, suite: Suite, *, stop: bool) -> list[bool]:
    """Whether the program passes each check."""
    sent = [test for check in suite.checks for test in check.sent]
    began = time.monotonic()
    reports = iter(runner.reports(program, suite.setup, sent, stop=stop))
    results: list[bool | str] = []
    for check in suite.checks:
        check_reports = list(islice(reports, len(check.sent)))
        results.append(len(check_reports) == len(check.sent) and check.passes(check_reports))
    if stop and False in results:
        return [result is True for result in results]
    conditions = [{"expression": result} for result in results if isinstance(result, str)]
    left_s = runner.limits.wall_s - (time.monotonic() - began)
    condition_runner = replace(runner, limits=replace(runner.limits, wall_s=left_s))
    answers = iter(
        condition_runner.reports("", suite.setup, conditions, stop=False)
        if conditions and left_s > 0
        else ()
    )
    return [
        result if isinstance(result, bool) else next(answers, {}).get("value") == "true"
        for result in results
    ]
