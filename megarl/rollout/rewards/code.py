"""Programs, judged by running their tests in a sandbox.

A program's answers are compared outside: the expected ones are never where it is. So leaving early, replacing built-in
functions, comparing equal to everything or reading other processes' memory gains nothing. Two things cannot be
prevented. A program may look for the tests' own weaknesses, for example print each of a few possible answers. And a
test that is neither input and output nor an assertion on what the program computes (one of several statements, or with
objects of the program's classes in variables) is run beside the program: passing is then proven with a word that is
handed in after the program has started, which a program written against this file can find.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.rollout.rewards import Verdict
from megarl.rollout.rewards.code_tests import Check, Report, Suite, read_tests
from megarl.rollout.rewards.inside_tests import BEGUN
from megarl.rollout.sandbox import http_service, sandbox
from megarl.rollout.sandbox.sandbox import SandboxLimits

_INSIDE = Path(__file__).with_name("inside_tests.py").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:python3?|py)[ \t]*\r?\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.I)
_OUTPUT_BYTES = 4 << 20  # of one test
_ALL_OUTPUT_BYTES = 64 << 20


def score(
    response: str,
    answer: str,
    row: Mapping[str, Any],
    *,
    tests: str = "tests",
    timeout_s: float = 4.0,
    total_s: float = 30.0,
    memory_mb: int = 512,
    unsafe: bool = False,
    url: str | None = None,
    partial: bool = False,
    wrong: float = 0.0,
) -> Verdict:
    """1 when the last ```python block of the response passes all tests in row[tests], else wrong; see read_tests.

    timeout_s: of one test; total_s: of all, those not reached by then are not passed. partial: the share of passed
    tests is the reward, wrong if none is. url: a SandboxFusion service instead of this machine. Raises ValueError for
    tests that cannot be read, UserFault where there is no isolation, ConnectionError from the service, RuntimeError
    when a sandbox does not come to the tests: none of them is a verdict.
    """
    if tests not in row:
        raise ValueError(f"the row has no column {tests!r}")
    suite = read_tests(row[tests])
    blocks = _BLOCK.findall(response)
    if not blocks:
        return Verdict(wrong, False)
    limits = SandboxLimits(
        wall_s=total_s,
        cpu_s=math.ceil(timeout_s) + 1,
        memory_mb=memory_mb,
        stdout_bytes=_ALL_OUTPUT_BYTES,
    )
    runner = _Runner(limits, timeout_s, unsafe, url)
    passed = _judge(runner, blocks[-1], suite, stop=not partial)
    num_passed = sum(passed)
    if num_passed == len(passed):
        return Verdict(1.0, True)
    return Verdict(num_passed / len(passed) if partial and num_passed else wrong, False)


@dataclass(frozen=True)
class _Runner:
    """Where programs run, and with what limits."""

    limits: SandboxLimits
    timeout_s: float
    unsafe: bool
    url: str | None

    def reports(self, program: str, setup: str, tests: Sequence[dict[str, Any]], *, stop: bool) -> list[Report]:
        """A report for each test that was run, in order; with stop, none after a test that failed by itself."""
        job = {
            "program": program,
            "setup": setup,
            "tests": tests,
            "wall_s": self.timeout_s,
            "output_bytes": _OUTPUT_BYTES,
            "stop": stop,
        }
        if self.url is None:
            outcome = sandbox.run(_INSIDE, json.dumps(job), self.limits, unsafe=self.unsafe)
        else:
            outcome = http_service.run(self.url, _INSIDE, json.dumps(job), self.limits)
        begun, _, reports = outcome.stdout.partition("\n")
        if begun != BEGUN:  # nothing of the program has been run yet
            said = (outcome.stderr.strip().splitlines() or ["nothing said"])[-1]
            raise RuntimeError(f"the sandbox did not come to the tests ({said[:200]})")
        return _read_reports(reports)


def _read_reports(said: str) -> list[Report]:
    """The lines that have the shape of a report, up to the first that has not: a program may have written them."""
    reports: list[Report] = []
    for line in said.splitlines():
        try:
            report = json.loads(line)
            types = {key: type(report[key]) for key in ("status", "stdout", "value", "passed")}
        except (ValueError, TypeError, LookupError, RecursionError):
            break
        if types.pop("status") not in (int, type(None)) or list(types.values()) != [str, str, bool]:
            break
        reports.append(report)
    return reports


def _judge(runner: _Runner, program: str, suite: Suite, *, stop: bool) -> list[bool]:
    """Which checks the program passes."""
    sent = [test for check in suite.checks for test in check.sent]
    began = time.monotonic()
    reports = runner.reports(program, suite.setup, sent, stop=stop)
    said: list[bool | str] = []
    for check in suite.checks:
        said.append(_said_of(check, reports[: len(check.sent)]))
        reports = reports[len(check.sent) :]
    if stop and False in said:
        return [one is True for one in said]
    conditions = [{"expression": one} for one in said if isinstance(one, str)]
    left_s = runner.limits.wall_s - (time.monotonic() - began)
    rest = replace(runner, limits=replace(runner.limits, wall_s=left_s))
    answers = iter(rest.reports("", suite.setup, conditions, stop=False) if conditions and left_s > 0 else ())
    return [one if isinstance(one, bool) else next(answers, {}).get("value") == "true" for one in said]


def _said_of(check: Check, reports: Sequence[Report]) -> bool | str:
    return len(reports) == len(check.sent) and check.judge(reports)
