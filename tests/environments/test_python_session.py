"""An interpreter keeps what an episode has defined, in the sandbox, and ends with it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from megarl.environments.python import PythonSession
from megarl.environments.runtime.tool_loading import load_environment
from megarl.isolation import sandbox
from megarl.isolation.interpreter import SandboxInterpreter
from megarl.isolation.sandbox import SandboxLimits
from megarl.types import UserError

PATH = "megarl.environments.python:PythonSession"
LOST = "The next call begins anew: what earlier ones defined is lost."
LONG_S = 60.0


@pytest.fixture(autouse=True)
def isolation() -> None:
    for error in sandbox.sandbox_errors("episode.environment"):
        pytest.skip(str(error))


def session(**arguments: Any) -> PythonSession:
    python_session = load_environment(PATH, {"timeout_s": LONG_S, **arguments}).make(5)
    assert isinstance(python_session, PythonSession)
    return python_session


def play(scenario: Callable[..., Awaitable[Any]], *sessions: PythonSession) -> Any:
    """What the coroutine function makes of the sessions; afterwards none of their processes is there."""

    async def played() -> Any:
        try:
            return await scenario(*sessions)
        finally:
            for python_session in sessions:
                await python_session.close()

    before = set(psutil.Process().children(recursive=True))
    result = asyncio.run(played())
    assert not set(psutil.Process().children(recursive=True)) - before
    return result


def told(*cells: str, **arguments: Any) -> list[str]:
    async def scenario(one: PythonSession) -> list[str]:
        return [await one.python(cell) for cell in cells]

    return play(scenario, session(**arguments))


def test_what_a_call_defines_is_there_in_the_next() -> None:
    assert told(
        "import math\nx = 20\ndef f(n): return math.factorial(n)",
        "f(x)",
        "print(x, end='!')\nx += 1",
        "x",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    n: int\nA(x)",
        "open('kept', 'w').write('it')\nprint(open('kept').read())",
        "import sys\nprint('error', file=sys.stderr)\nprint('output')",
        "input()",
    )[:-1] == [
        "The code printed nothing.",
        "2432902008176640000",
        "20!",
        "21",
        "A(n=21)",
        "it",
        "error\noutput",
    ]


def test_exceptions_are_told_and_cost_no_state() -> None:
    outputs = told(
        "x = 1\ndef f():\n    return 1 / 0",
        "print('before')\nf()",
        "x +",
        "raise SystemExit(3)",
        "x",
    )
    assert [line.strip() for line in outputs[1].splitlines() if line.strip(" ~^")] == [
        "before",
        "Traceback (most recent call last):",
        *('File "<cell 2>", line 2, in <module>', "f()"),
        *('File "<cell 1>", line 3, in f', "return 1 / 0"),
        "ZeroDivisionError: division by zero",
    ]
    assert "SyntaxError: invalid syntax" in outputs[2] and "inside_interpreter" not in outputs[2]
    assert outputs[3].endswith("SystemExit: 3") and outputs[4] == "1"


def test_what_takes_too_long_or_ends_itself_is_told_and_begins_anew() -> None:
    outputs = told(
        "x = 1",
        "print('a')\nwhile True: pass",
        "x",
        "x = 2\nimport os\nos._exit(3)",
        "'y'",
        timeout_s=2.0,
    )
    assert outputs[1] == f"a\nThe code took longer than 2 s and was ended. {LOST}"
    assert outputs[2].endswith("NameError: name 'x' is not defined")
    assert outputs[3:] == [f"Python has ended. {LOST}", "'y'"]


def test_memory_and_output_have_limits() -> None:
    flood, letters = "for _ in range(10**4): print('x' * 99)", "print(end='é' * 2**16)"
    outputs = told("x = 1\ny = bytes(2**30)", flood, "x", letters, memory_mb=256)
    assert outputs[0].endswith("MemoryError") and outputs[2] == "1"
    assert (
        outputs[1]
        == ("x" * 99 + "\n") * 655 + "x" * 36 + "\nOnly the first 65536 of 1000000 bytes are shown."
    )
    assert outputs[3] == "é" * 2**15 + "\nOnly the first 65536 of 131072 bytes are shown."


def test_it_has_no_network_and_no_files_of_the_machine() -> None:
    outputs = told(
        "import os\nsorted(os.listdir('/tmp'))",
        f"os.path.exists({__file__!r})",
        "import socket\nsocket.create_connection(('127.0.0.1', 9), 5)",
        "len([name for name in os.listdir('/proc') if name.isdigit()])",
        "len(os.environ.keys() - {'PATH', 'HOME', 'TMPDIR', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'})",
    )
    assert outputs[:2] == ["['main.py']", "False"] and "Error" in outputs[2] and outputs[3] == "2"


def test_random_numbers_and_hashes_repeat_themselves() -> None:
    cells = ["import random\nrandom.random()", "hash('a'), {*'abcdefgh'}"]
    first, second = told(*cells), told(*cells)
    assert first == second and "Error" not in "".join(first)


def test_many_at_once_and_calls_of_one_turn_in_their_order() -> None:
    async def scenario(*sessions: PythonSession) -> list[str]:
        began = time.monotonic()
        await asyncio.gather(
            *(
                python_session.python(f"x = [{number}]")
                for number, python_session in enumerate(sessions)
            )
        )
        assert time.monotonic() - began < LONG_S
        await asyncio.gather(
            *(
                python_session.python(f"x.append({number})")
                for number in range(5)
                for python_session in sessions
            )
        )
        return await asyncio.gather(*(python_session.python("x") for python_session in sessions))

    assert play(scenario, *(session() for _ in range(6))) == [
        f"[{number}, 0, 1, 2, 3, 4]" for number in range(6)
    ]


def test_a_call_that_is_given_up_leaves_no_process() -> None:
    async def scenario(one: PythonSession) -> str:
        await one.python("x = 1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await one.python("import subprocess\nsubprocess.run(['sleep', '1000'])")
        return await one.python("'x' in globals()")

    assert play(scenario, session()) == "False"


def test_a_call_that_waits_does_not_outlive_the_episode() -> None:
    """Its interpreter would be ended by nobody: the thread that it leaves keeps it alive."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()"

    async def scenario(one: PythonSession) -> list[Any]:
        await one.python("x = 1")
        calls = [
            asyncio.ensure_future(one.python(code))
            for code in ("import time\ntime.sleep(1000)", thread, thread)
        ]
        await asyncio.sleep(0)  # the first has the interpreter, and the others wait for it
        await one.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    ended, *waited = play(scenario, session())
    assert ended == f"Python has ended. {LOST}"
    assert [str(error) for error in waited if isinstance(error, RuntimeError)] == [
        "the episode has ended"
    ] * 2


def test_an_interpreter_that_nobody_closes_ends_and_leaves_no_descriptor() -> None:
    async def forget() -> None:
        interpreter = SandboxInterpreter(
            SandboxLimits(wall_s=LONG_S), 0, where="episode.environment"
        )
        await interpreter.run(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()"
        )

    before, files = set(psutil.Process().children(recursive=True)), psutil.Process().num_fds()
    for _ in range(2):
        asyncio.run(forget())
        gc.collect()
    assert not set(psutil.Process().children(recursive=True)) - before
    assert psutil.Process().num_fds() <= files


def test_a_cell_that_forks_or_hides_its_streams_is_one_cell() -> None:
    outputs = told(
        "import os, sys\nchild = os.fork()",
        "os.waitpid(child, 0)[1]",
        "sys.stdout = None\nsys.stderr = 3",
        "os.write(1, b'a') and None",
    )
    assert outputs == ["The code printed nothing.", "0", "The code printed nothing.", "a"]


def test_without_isolation_it_does_the_same() -> None:
    outputs = told(
        "import os\nopen('kept', 'w').close()",
        "sorted(os.listdir('.'))",
        "os._exit(1)",
        "'y'",
        unsafe=True,
    )
    assert outputs == [
        "The code printed nothing.",
        "['kept', 'main.py']",
        f"Python has ended. {LOST}",
        "'y'",
    ]


def test_a_machine_without_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_has_worked", False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="^episode.environment: bubblewrap .* is not installed"):
        load_environment(PATH, {})
    assert load_environment(PATH, {"unsafe": True}).tools
