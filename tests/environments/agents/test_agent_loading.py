"""What a recipe names as its agent is found and checked, and every fault is a line with its key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.agents.agent_loading import load_agent
from megarl.types import UserError


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("agent", "arguments", "error"),
    [
        (
            "odd_agents",
            {},
            "episode.agent: 'odd_agents' is not module:name; write module:name, for example",
        ),
        (
            "no_such_module:run",
            {},
            "episode.agent: no_such_module cannot be imported (ModuleNotFoundError",
        ),
        ("odd_agents:nothing", {}, "episode.agent: odd_agents has no 'nothing'"),
        (
            "odd_agents:plain",
            {},
            "episode.agent: odd_agents:plain is not an async def function that returns a value",
        ),
        (
            "odd_agents:generates",
            {},
            "episode.agent: odd_agents:generates is not an async def function that returns",
        ),
        (
            "odd_agents:Callable",
            {},
            "episode.agent: odd_agents:Callable is the class Callable, not an async def",
        ),
        (
            "odd_agents:prepared",
            {},
            "episode.agent: odd_agents:prepared is a list, not an async def function",
        ),
        (
            "odd_agents:takes_nothing",
            {},
            "episode.agent: odd_agents:takes_nothing cannot be called with (chat, row)",
        ),
        (
            "odd_agents:unprepared",
            {},
            "episode.agent: odd_agents:unprepared cannot be prepared (OSError: no disk)",
        ),
        (
            "odd_agents:needs",
            {},
            "episode.arguments: odd_agents:needs cannot be called with them: missing a required",
        ),
        (
            "odd_agents:run",
            {"x": 1},
            "episode.arguments: odd_agents:run cannot be called with them: got an unexpected",
        ),
        (
            "odd_agents:run",
            {"row": 1},
            "episode.arguments: odd_agents:run cannot be called with them: multiple values",
        ),
    ],
)
def test_what_cannot_be_used_is_an_error(agent: str, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as caught:
        load_agent(agent, arguments)
    assert str(caught.value).startswith(error) and "\n" not in str(caught.value)


def test_functions_and_objects_get_their_arguments() -> None:
    for name, arguments, value in [
        ("needs", {"tools": 3}, 3.0),
        ("called", {"worth": 2.0}, 2.0),
        ("called", {}, 1.0),
    ]:
        assert asyncio.run(load_agent(f"odd_agents:{name}", arguments)(None, {})) == value
