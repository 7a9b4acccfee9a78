"""What a recipe names is found and checked, and every fault is a line with its key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.environments import Environment
from megarl.environments.runtime.tool_loading import load_environment, load_tools
from megarl.types import UserError

CALCULATE = "megarl.environments.calculator:calculate"
Write = Callable[[str], None]


@pytest.fixture
def write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[str], str]:
    """Write a module with the usual imports; its name is another for each test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(body: str) -> str:
        name = f"user_{abs(hash(request.node.nodeid))}"
        head = "from __future__ import annotations\nfrom megarl.environments import Environment, Observation\n"
        (tmp_path / f"{name}.py").write_text(head + body)
        return name

    return make


GAME = '''
class Game(Environment):
    def __init__(self, size: int = 3):
        self.size = size

    def move(self, place: int) -> str:
        """Move."""
        return str(place)

    async def look(self) -> str:
        """Look."""
        return ""

    def _helper(self):
        return 1

    def reset(self, row):
        return None

    async def reward(self):
        return 1.0


class Other(Game):
    def jump(self, height: int) -> str:
        """Jump."""
        return str(height)

    def move(self, place: str) -> str:
        """Move by name."""
        return place
'''


def test_public_methods_are_tools_and_reserved_ones_are_not(write: Callable[[str], str]) -> None:
    toolbox = load_environment(f"{write(GAME)}:Game", {"size": 5})
    assert [*toolbox.tools] == ["move", "look"]
    assert toolbox.tools["look"].is_async and not toolbox.tools["move"].is_async
    assert toolbox.has == {"reset", "reward"} and toolbox.is_async == {"reward"}
    environment = toolbox.make(7)
    assert (
        isinstance(environment, Environment)
        and environment.seed == 7
        and vars(environment)["size"] == 5
    )


def test_an_environment_may_extend_another(write: Callable[[str], str]) -> None:
    toolbox = load_environment(f"{write(GAME)}:Other", {})
    assert {*toolbox.tools} == {"move", "look", "jump"}
    assert toolbox.tools["move"].schema["function"]["description"] == "Move by name."
    assert toolbox.has == {"reset", "reward"}


def test_each_tool_gets_the_arguments_that_it_takes(write: Callable[[str], str]) -> None:
    body = (
        'def one(a: int, *, b: int = 0, c: int = 0) -> str:\n    """One."""\n'
        'def two(a: int, *, c: int = 0) -> str:\n    """Two."""\n'
    )
    name = write(body)
    toolbox = load_tools([f"{name}:one", f"{name}:two", CALCULATE], {"b": 1, "c": 2})
    assert [*toolbox.tools] == ["one", "two", "calculate"]
    assert [dict(tool.bound) for tool in toolbox.tools.values()] == [{"b": 1, "c": 2}, {"c": 2}, {}]
    with pytest.raises(UserError, match="^episode.arguments: no tool takes 'd'"):
        load_tools([f"{name}:one"], {"d": 1})


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        ([], "no tool is named"),
        (["calculator"], "'calculator' is not module:name"),
        (["no_such_module:tool"], "ModuleNotFoundError: No module named 'no_such_module'"),
        (["megarl.environments.calculator:add"], "megarl.environments.calculator has no 'add'"),
        (["megarl.environments.guess:Guess"], "is the class Guess, not a function"),
        (["megarl.rollout.rewards:WHERE"], "is a str, not a function"),
        ([CALCULATE, CALCULATE], "two tools have the name 'calculate'"),
    ],
)
def test_tools_that_cannot_be_used_are_errors(paths: list[str], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load_tools(paths, {})
    assert caught.value.where == "episode.tools" and problem in caught.value.problem


def method(body: str) -> str:
    return f"class Game(Environment):\n    def reply(self, text): ...\n    {body}\n"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "class Game:\n    pass\n",
            "is the class Game, not a subclass of megarl.environments.Environment",
        ),
        ("def Game(): ...\n", "is a function, not a subclass"),
        (
            "class Game(Environment):\n    def reset(self, row): ...\n",
            "has neither a tool nor `reply`",
        ),
        (method("def move(self, place: int): return ''"), "the public method move of"),
        (method("def move(self, place):\n        'Move.'"), "the argument 'place' of"),
        (method("def move(self, *places: int):\n        'Move.'"), "takes *places"),
        (method("@staticmethod\n    def move(place: int):\n        'Move.'"), "is a staticmethod"),
        (
            method("@classmethod\n    def move(cls, place: int):\n        'Move.'"),
            "is a classmethod",
        ),
        (method("def reset(self): ..."), "reset cannot be called (too many positional arguments)"),
        (
            method("def close(self, how): ..."),
            "close cannot be called (missing a required argument: 'how')",
        ),
        ("raise RuntimeError('no display')\n", "cannot be imported (RuntimeError: no display)"),
        (
            method("@classmethod\n    def prepare(cls, **_): raise OSError('no index')"),
            "cannot be prepared (OSError",
        ),
    ],
)
def test_environments_that_cannot_be_used_are_errors(
    write: Callable[[str], str], body: str, problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_environment(f"{write(body)}:Game", {})
    assert caught.value.where == "episode.environment" and problem in caught.value.problem


def test_arguments_that_the_constructor_does_not_take_are_an_error(
    write: Callable[[str], str],
) -> None:
    with pytest.raises(UserError, match="^episode.arguments: .*unexpected keyword argument 'sise'"):
        load_environment(f"{write(GAME)}:Game", {"sise": 3})


def test_preparation_gets_the_arguments_and_raises_its_own_errors(
    write: Callable[[str], str],
) -> None:
    body = (
        "from megarl.types import UserError\n"
        'def find(word: str, *, index: str = "") -> str:\n    """Find."""\n'
        "def _prepare(index):\n    raise UserError('episode.arguments', f'no {index}', 'make it')\n"
        "find.prepare = _prepare\n"
    )
    with pytest.raises(UserError, match="^episode.arguments: no here; make it"):
        load_tools([f"{write(body)}:find"], {"index": "here"})
