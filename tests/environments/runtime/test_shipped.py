"""The shipped tools and games through real worker processes, with the default limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import RewardResult
from megarl.environments.runtime.environment_thread import EnvironmentThread

pytestmark = pytest.mark.slow
Play = Callable[..., Any]
SESSION = "megarl.environments.python:PythonSession"


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
        found = await pool.call(name, calls)
        assert not any(one.error for one in found), found
        await pool.finish(name)
        return [one.text for one in found]

    async def scenario(pool: EnvironmentThread) -> None:
        found = await asyncio.gather(*(episode(pool, number) for number in range(12)))
        assert found == [[str(n * n), "[1] number three", str(n * n)] for n in range(12)]
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
    """Neither at once nor in the next phase: the interpreter that was ended with it is made again."""

    async def scenario(pool: EnvironmentThread) -> None:
        async def told(*cells: str) -> list[str]:
            return [
                one.text
                for one in await pool.call("a", [("python", {"code": cell}) for cell in cells])
            ]

        assert await pool.open("a", {}, 0) is None
        assert await told("x = 1", "x") == ["The code printed nothing.", "1"]
        slow = "import time\nx = 2\ntime.sleep(100)"
        assert await told(slow, slow) == ["python took longer than 5 s."] * 2
        assert await told("x") == ["1"]
        assert await told(slow) == ["python took longer than 5 s."]
        assert await pool.resume("a", {}, 0, await pool.leave("a", 5)) == 5
        assert await told("x") == ["1"]
        await pool.finish("a")

    play(scenario, environment=SESSION, arguments={"timeout_s": 50.0}, call_timeout_s=5.0)


def test_games_of_guessing(play: Play) -> None:
    async def episode(pool: EnvironmentThread, number: int) -> RewardResult | None:
        name = str(number)
        text = await pool.open(name, {}, number)
        assert text and "from 1 to 100" in text
        low, high = 1, 100
        while True:
            middle = (low + high) // 2
            answer = await pool.reply(name, f"<answer>{middle}</answer>")
            assert answer and answer.error is None
            if answer.done:
                return await pool.finish(name)
            low, high = (middle + 1, high) if "larger" in answer.text else (low, middle - 1)

    async def scenario(pool: EnvironmentThread) -> None:
        assert pool.has_reply
        found = await asyncio.gather(*(episode(pool, number) for number in range(50)))
        assert found == [RewardResult(1.0, True)] * 50

    play(scenario, environment="megarl.environments.guess:Guess", workers=2)
