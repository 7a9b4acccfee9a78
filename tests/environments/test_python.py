"""Programs of the model run in the sandbox, and whatever they do the model is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megarl.environments.python import python
from megarl.environments.runtime.tool_loading import load_tools
from megarl.isolation import sandbox
from megarl.types import UserError

PYTHON = "megarl.environments.python:python"


@pytest.fixture(autouse=True)
def isolation() -> None:
    for error in sandbox.sandbox_errors("episode.tools"):
        pytest.skip(str(error))


def told(code: str, **arguments: Any) -> str:
    return asyncio.run(python(code, **{"timeout_s": 60.0, **arguments}))


def test_what_it_prints_is_returned_and_nothing_is_kept() -> None:
    assert (
        told("import math\nprint(math.factorial(20))\nopen('/tmp/x', 'w').write('x')")
        == "2432902008176640000"
    )
    assert told("import os\nprint(os.path.exists('/tmp/x'))") == "False"
    assert told("x = 1") == "The program printed nothing."


def test_errors_are_told_after_what_it_printed() -> None:
    output = told("print('before')\n1 / 0")
    assert output.startswith("before\nTraceback") and output.endswith(
        "ZeroDivisionError: division by zero"
    )
    assert "SyntaxError" in told("print(")
    assert told("import os\nos._exit(3)") == "Exit status 3."


def test_limits_are_told() -> None:
    assert told("print('a', flush=True)\nwhile True: pass", timeout_s=1.0) == (
        "a\nThe program took longer than 1 s and was ended."
    )
    assert told("while True: print('x' * 1000)").endswith(
        "The program printed more than 65536 bytes and was ended."
    )
    assert "MemoryError" in told("x = bytes(2**30)", memory_mb=128)


def test_the_model_sees_the_code_alone_and_many_run_at_once() -> None:
    (tool,) = load_tools([PYTHON], {"timeout_s": 30.0}).tools.values()
    assert [*tool.schema["function"]["parameters"]["properties"]] == ["code"] and tool.is_async

    async def together() -> list[str]:
        return await asyncio.gather(
            *(tool.function(**tool.values({"code": f"print({n})"})) for n in range(4))
        )

    assert asyncio.run(together()) == ["0", "1", "2", "3"]


def test_a_machine_without_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_has_worked", False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="^episode.tools: bubblewrap .* is not installed"):
        load_tools([PYTHON], {})
    assert load_tools([PYTHON], {"unsafe": True}).tools
