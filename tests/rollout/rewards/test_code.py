"""Programs are worth what their tests say, and no program comes to a reward past its tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.isolation import http_service
from megarl.isolation import service as isolation_service
from megarl.isolation.sandbox import SandboxLimits
from megarl.rollout.rewards import code, inside_tests
from megarl.types.reward_result import RewardResult
from tests.http_server import Handler, serving

ADDS_LINES = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADDS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
ASSERTS = [
    "assert add(1, 2) == 3",
    "assert add([1], [2]) == [1, 2]",
    "assert abs(add(0.1, 0.2) - 0.3) < 1e-9",
]
BESIDE = ["sums = []\nsums.append(add(1, 2))\nassert sums == [3]"]
READS = "a, b = map(int, input().split())\n"
ADD = "def add(a, b):\n    return a + b\n"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("isolation")]


def judged(program: str, tests: Any, **arguments: Any) -> RewardResult:
    response = f"I think:\n```python\nraise SystemExit('a draft')\n```\nbetter:\n```python\n{program}\n```\nDone."
    return code.score(
        response, "", {"tests": tests}, **{"timeout_s": 20.0, "total_s": 60.0, **arguments}
    )


# --- what passes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        f"{READS}print(a + b)",
        "import sys\na, b = map(int, sys.stdin.buffer.read().split())\nsys.stdout.write(f'{a + b}  \\n\\n')",
        "a, b = map(int, open('/dev/stdin').read().split())\nprint(a + b)\nexit()",
        "import threading\ndef main():\n    print(sum(map(int, input().split())))\n"
        "threading.Thread(target=main).start()",
        f"if __name__ == '__main__':\n    {READS}    print(a + b)",
        f"import atexit\n{READS}atexit.register(lambda: print(a + b))",
    ],
)
def test_a_program_that_reads_and_prints(program: str) -> None:
    assert judged(program, ADDS_LINES) == RewardResult(1.0, True)


@pytest.mark.parametrize(
    "program",
    [
        ADD,
        "class Solution:\n    def add(self, a: int, b: int) -> Optional[int]:\n        return a + b",
        f"{ADD}\nif __name__ == '__main__':\n    print(add(int(input()), 1))",
        "from dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: int\n    b: int\n"
        "def add(a, b):\n    pair = Pair(a, b)\n    print('noise')\n    return pair.a + pair.b",
    ],
)
def test_a_function_of_a_program(program: str) -> None:
    assert judged(program, ADDS) == RewardResult(1.0, True)


ASSERTIONS = [
    ASSERTS,
    BESIDE,
    ["assert all(value == 3 for value in [add(1, 2), add(2, 1)])"],
    ["assert all(add(n, 1) == n + 1 for n in range(3))"],  # beside the program
    [
        "import math",
        "assert math.isclose(add(1, 2), 3)",
        "assert isinstance(add('a', 'b'), str), 'text'",
    ],
    ["assert add(add(1, 2), 3) in {6} and add(1, 1) == 2 and not add(0, 0)"],
    ["assert set(add((1, 2), (3,))) == set([3, 2, 1])\nassert add(10**5000, 1) > 0"],
    ["from fractions import Fraction", "assert add(Fraction(1, 2), Fraction(1, 2)) == 1"],
    ["assert add(float('inf'), 1) == float('inf')"],
]


@pytest.mark.parametrize("tests", ASSERTIONS, ids=lambda tests: tests[-1])
def test_assertions(tests: list[str]) -> None:
    assert judged(ADD, tests) == RewardResult(1.0, True)
    assert judged(ADD.replace("a + b", "None"), tests) == RewardResult(0.0, False)


@pytest.mark.parametrize(
    "tests",
    [
        json.dumps(ADDS_LINES),
        [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7", "testtype": "stdin"}],
        {"inputs": [["1 2"]], "outputs": [["3"]]},
    ],
)
def test_the_ways_to_write_lines(tests: Any) -> None:
    assert judged(f"{READS}print(a + b)", tests).correct
    assert not judged(f"{READS}print(a - b)", tests).correct


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}],
        {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [[3], ["ab"]]},
    ],
)
def test_the_ways_to_write_calls(tests: Any) -> None:
    assert judged(ADD, tests).correct
    assert not judged(ADD.replace("+", ","), tests).correct


def test_every_test_starts_afresh() -> None:
    program = f"import os\nassert not os.path.exists('x')\nopen('x', 'w')\nos.unlink('x')\nseen = []\n{ADD}"
    program = program.replace("return a", "seen.append(a); return 10 * (len(seen) - 1) + a")
    assert judged(program, ADDS).correct


# --- what does not -----------------------------------------------------------------------------------------------


def test_a_response_without_a_program_is_wrong() -> None:
    for response in (
        "",
        "print(3)",
        "```\nprint(3)\n```",
        "```c\nmain(){}\n```",
        "```python\nprint(3)",
    ):
        assert code.score(response, "", {"tests": ADDS_LINES}, wrong=-0.5) == RewardResult(
            -0.5, False
        )


def test_partly_right() -> None:
    program = f"{READS}print(3)"
    assert judged(program, ADDS_LINES) == RewardResult(0.0, False)
    assert judged(program, ADDS_LINES, partial=True, wrong=-1.0) == RewardResult(0.5, False)
    assert judged("print(0)", ADDS_LINES, partial=True, wrong=-1.0) == RewardResult(-1.0, False)
    assert (
        judged(
            f"{ADD}\nadd = lambda a, b, f=add: f(a, b) if a == 1 else 1/0", ADDS, partial=True
        ).reward
        == 0.5
    )
    assert judged(ADD, [*ASSERTS, "assert add(1, 1) == 3"], partial=True).reward == 0.75


@pytest.mark.parametrize(
    "tests", [ADDS_LINES, ADDS, ASSERTS, BESIDE], ids=["lines", "calls", "asserts", "beside"]
)
@pytest.mark.parametrize(
    "program", ["def add(", "1/0", f"{READS}print(a + b)\n1/0", "x = '\0'", "(" * 10_000, ""]
)
def test_a_broken_program_is_wrong(program: str, tests: Any) -> None:
    assert judged(program, tests) == RewardResult(0.0, False)


def test_time_is_kept_for_each_test_and_for_all() -> None:
    program = f"import time\n{READS}\nwhile a == 1: time.sleep(1)\nprint(a + b)"
    assert judged(program, ADDS_LINES, timeout_s=5.0, partial=True).reward == 0.5
    assert judged("while True: pass", ADDS_LINES, total_s=1.0) == RewardResult(0.0, False)


@pytest.mark.parametrize("memory_mb", [128, 1024])
def test_memory_is_kept(memory_mb: int) -> None:
    assert judged(
        f"{READS}x = bytearray(300 << 20)\nprint(a + b)", ADDS_LINES, memory_mb=memory_mb
    ).correct == (memory_mb == 1024)


# --- what cheats -------------------------------------------------------------------------------------------------

EQUAL = """
class Equal:
    __eq__ = __le__ = __lt__ = __ge__ = __gt__ = __contains__ = __bool__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __add__ = __abs__ = __iter__ = __call__ = lambda self, *_: self
    __repr__ = __str__ = lambda self: "True"
    __hash__ = lambda self: 0
def add(a, b):
    return Equal()
print(Equal())
"""
FORGES = """
import json, os
line = json.dumps({"status": 0, "stdout": "3", "value": "true", "passed": True}) + "\\n"
for path in [f"/proc/{pid}/fd/1" for pid in (os.getpid(), os.getppid(), 1)] + ["value", "stdout"]:
    try:
        with open(path, "w") as file:
            file.write(line * 9)
    except OSError:
        pass
for descriptor in range(64):
    try:
        os.write(descriptor, (line * 9).encode())
    except OSError:
        pass
os.kill(os.getppid(), 9)
"""
CHEATS = {
    "leaves": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "leaves when called": "def add(a, b):\n    raise SystemExit(0)",
    "leaves at once when called": "import os\nadd = lambda a, b: os._exit(0)",
    "equals everything": EQUAL,
    "no failure is one": "import builtins\nbuiltins.AssertionError = builtins.Exception = type('E', (), {})",
    "nothing is run": "import builtins\nbuiltins.exec = builtins.eval = builtins.compile = lambda *a, **k: None",
    "everything is true": f"import builtins as b\nb.all = b.isinstance = b.abs = lambda *a: True\n{EQUAL}",
    "says so": "print('all tests passed'); print('OK'); print(True)\nadd = lambda a, b: True",
    "closes its streams": "import os; os.close(1); os.close(2)",
    "kills its parent": "import os; os.kill(os.getppid(), 9)",
    "an exit handler": "import atexit, os; atexit.register(os._exit, 0)\nadd = lambda a, b: 0",
    "a tracer": "import sys; sys.settrace(lambda *a: None); sys.exit = print\nadd = lambda a, b: 1/0",
}


@pytest.mark.parametrize("tests", [ADDS_LINES, ADDS, ASSERTS], ids=["lines", "calls", "asserts"])
@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_a_cheat_is_wrong(program: str, tests: Any) -> None:
    assert judged(program, tests) == RewardResult(0.0, False)


@pytest.mark.parametrize("cheat", [name for name in CHEATS if EQUAL not in CHEATS[name]])
def test_most_cheats_are_wrong_beside_the_program_too(cheat: str) -> None:
    """Objects of the program's own that equal everything are not: said in the docstring of code.py."""
    assert judged(CHEATS[cheat], BESIDE) == RewardResult(0.0, False)


@pytest.mark.parametrize("tests", [ADDS_LINES, ADDS, ASSERTS], ids=["lines", "calls", "asserts"])
def test_forged_reports_are_compared_like_others(tests: Any) -> None:
    assert not judged(FORGES, tests).correct


def test_expected_answers_are_not_where_the_program_is() -> None:
    """It looks through its own memory and frames, and all processes' memory, files and arguments."""
    program = """
import gc, os, re, sys
def look():
    yield repr(gc.get_objects())
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals)
        frame = frame.f_back
    for pid in [pid for pid in os.listdir("/proc") if pid.isdigit()]:
        for name in ("cmdline", "environ", "fd/0", "mem"):
            try:
                path = f"/proc/{pid}/{name}"
                if name != "mem":
                    yield open(path, errors="replace").read()
                    continue
                for line in open(f"/proc/{pid}/maps"):
                    low, high = (int(end, 16) for end in line.split()[0].split("-"))
                    with open(path, "rb", buffering=0) as memory:
                        memory.seek(low)
                        yield memory.read(high - low).decode(errors="replace")
            except (OSError, ValueError, OverflowError):
                pass
def find(word, begins):
    for text in look():
        for found in re.findall(begins + "-[0-9]+", text):
            return found
"""
    tests = {
        "fn_name": "find",
        "inputs": [["given-1234", "expec" + "ted"]],
        "outputs": ["expected-5678"],
    }
    assert not judged(program, tests, memory_mb=2048).correct
    control = {
        "fn_name": "find",
        "inputs": [["given-1234", "giv" + "en"]],
        "outputs": ["given-1234"],
    }
    assert judged(program, control, memory_mb=2048).correct


# --- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("{", "not JSON"),
        (7, "neither inputs and outputs"),
        ({}, "neither inputs and outputs"),
        ([], "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ([{"input": "1"}], "no 'output'"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "without its fn_name"),
        (["import math"], "no assertion"),
        (["assert ("], "not Python"),
    ],
)
def test_tests_that_cannot_be_read_are_no_reward_result(tests: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        judged(ADD, tests)
    with pytest.raises(ValueError, match="no column 'other'"):
        code.score("", "", {"tests": tests}, tests="other")


def test_a_sandbox_that_does_not_come_to_the_tests_is_no_reward_result() -> None:
    with pytest.raises(RuntimeError, match="did not start the tests"):
        judged(ADD, ADDS, memory_mb=4)
    with pytest.raises(RuntimeError, match="did not start the tests"):
        judged(ADD, ADDS, total_s=0.0)


# --- a service ---------------------------------------------------------------------------------------------------


def test_a_test_that_ends_before_its_token_comes_has_a_report(tmp_path: Path) -> None:
    late = "token = time.sleep(1.0) or os.urandom(16).hex()"
    source = Path(inside_tests.__file__).read_text().replace("token = os.urandom(16).hex()", late)
    assert late in source
    job = {
        "program": "",
        "setup": "",
        "tests": [{"expression": "3"}],
        "wall_s": 60.0,
        "output_bytes": 99,
        "stop": True,
    }
    command = [sys.executable, "-c", source]
    ended = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, cwd=tmp_path
    )
    assert json.loads(ended.stdout.splitlines()[1])["status"] == 0, ended.stderr


class Service:
    """SandboxFusion's run_code, for as much as a program needs."""

    url: str
    reply: Any = None
    asked: dict[str, Any]

    def answer(self, handler: Handler, body: dict[str, Any]) -> None:
        self.asked = {"path": handler.path, **body}
        handler.send(200, json.dumps(self.reply or self.run(body)).encode())

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        command, stdin = [sys.executable, "-c", body["code"]], body["stdin"]
        ended = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=body["run_timeout"]
        )
        result = {"status": "Finished", "return_code": ended.returncode, "execution_time": 0.1}
        result |= {"stdout": ended.stdout, "stderr": ended.stderr}
        return {
            "status": "Failed" if ended.returncode else "Success",
            "message": "",
            "run_result": result,
        }


@pytest.fixture
def service(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.chdir(tmp_path)  # the program's files
    service = Service()
    with serving(service.answer) as service.url:
        yield service


@pytest.mark.parametrize("tests", [ADDS, ASSERTS])
def test_a_service_judges_like_this_machine(service: Service, tests: Any) -> None:
    assert judged(ADD, tests, url=service.url) == RewardResult(1.0, True)
    expected = {"path": "/run_code", "language": "python", "memory_limit_MB": 512}
    assert expected.items() <= service.asked.items()
    assert judged(ADD.replace("+", "-"), tests, url=service.url) == RewardResult(0.0, False)


def test_a_service_says_how_a_program_ended(service: Service) -> None:
    limits = SandboxLimits(wall_s=60.0)
    outcome = http_service.run(service.url, "import sys; print(1); sys.exit(3)", "", limits)
    assert (outcome.status, outcome.stdout, outcome.timed_out) == (3, "1\n", False)
    service.reply = {
        "status": "Failed",
        "run_result": {"status": "TimeLimitExceeded", "return_code": None},
    }
    outcome = http_service.run(service.url, "", "", limits)
    assert (outcome.status, outcome.timed_out) == (None, True)


@pytest.mark.parametrize(
    "reply", [{"status": "SandboxError", "message": "no pod"}, {"error": 1}, ["x"]]
)
def test_a_service_that_fails_is_no_reward_result(service: Service, reply: Any) -> None:
    service.reply = reply
    with pytest.raises(ConnectionError, match="could not run a program"):
        judged(ADD, ADDS, url=service.url)


def test_a_service_that_is_not_there_is_no_reward_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation_service, "_back_off", lambda state: 0.0)
    words = "the sandbox at 127.0.0.1:1 gave no usable answer in 5 tries: ConnectError"
    with pytest.raises(ConnectionError, match=words):
        judged(ADD, ADDS, url="http://127.0.0.1:1")
    (error,) = http_service.url_errors("sandbox:8080", "reward.function")
    assert error.where == "reward.function"
    assert http_service.url_errors("http://sandbox:8080", "reward.function") == []
