"""The shipped tools and games through real worker processes, with the default limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.runtime.environment_thread import EnvironmentThread

pytestmark = pytest.mark.slow
Play = Callable[..., Any]


@pytest.mark.usefixtures("isolation")
def test_python_search_and_calculator_together(play: Play, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "\n".join(json.dumps({"contents": f"number {word}"}) for word in ("one", "two", "three"))
    )

    async def episode(pool: EnvironmentThread, number: int) -> list[str]:
        name = str(number)
        await pool.open(name, {}, number)
        calls = [
            ("python", {"code": f"import numbers\nprint({number} ** 2)"}),
            ("search", {"query": "three"}),
            ("calculate", {"expression": f"{number} ** 2"}),
        ]
        results = await pool.call(name, calls)
        assert not any(result.error for result in results), results
        await pool.finish(name)
        return [result.text for result in results]

    async def scenario(pool: EnvironmentThread) -> None:
        texts = await asyncio.gather(*(episode(pool, number) for number in range(12)))
        assert texts == [[str(n * n), "[1] number three", str(n * n)] for n in range(12)]
        assert pool.num_ended == 0

    tools = tuple(
        f"megarl.environments.{name}"
        for name in ("calculator:calculate", "python:python", "search:search")
    )
    play(
        scenario,
        tools=tools,
        arguments={"corpus": str(corpus), "num_results": 1, "timeout_s": 50.0},
        workers=2,
        call_timeout_s=60.0,
    )


@pytest.mark.usefixtures("isolation")
def test_a_python_call_that_is_cut_costs_no_state(play: Play) -> None:
    async def scenario(pool: EnvironmentThread) -> None:
        async def told(code: str) -> str:
            (result,) = await pool.call("a", [("python", {"code": code})])
            return result.text

        await pool.open("a", {}, 0)
        await told("x = 1")
        assert await told("import time\nx = 2\ntime.sleep(100)") == "python took longer than 5 s."
        assert await told("x") == "1"
        assert await pool.resume("a", {}, 0, await pool.leave("a", 4)) == 4
        assert await told("x") == "1"
        await pool.finish("a")

    session = "megarl.environments.python:PythonSession"
    play(scenario, environment=session, arguments={"timeout_s": 50.0}, call_timeout_s=5.0)
