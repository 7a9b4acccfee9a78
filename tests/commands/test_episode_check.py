"""`megarl episode-check` on good tools and environments, and on those that do what none should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.commands.episode_turns import example

RECIPE = Path(__file__).parents[2] / "recipes/quickstart_tools.yaml"
CALCULATE, GUESS = "megarl.environments.calculator:calculate", "megarl.environments.guess:Guess"
TOOLS = """
import os, random, time
from typing import Literal
from megarl.environments import Environment

def repeat(text: str, unit: Literal["x", "y"], count: int = 2) -> str:
    "Repeat a text."
    return text[:9] * min(count, 2) + unit
async def hang(text: str, *, fifo: str = "") -> str:
    "Take too long, without holding up others."
    if fifo:
        open(fifo, "w").write(str(os.getpid()))
        time.sleep(1000)
    import asyncio
    await asyncio.sleep(1000)
def end(text: str) -> str:
    "End the process."
    os._exit(3)
def brittle(text: str) -> str:
    "End the process over a long text."
    return text if len(text) < 99 else os._exit(4)
def garbage(text: str):
    "Return no text."
    return object()
def draw() -> int:
    "A random number."
    return random.getrandbits(60)

class Dice(Environment):
    "Numbers that do not come from its seed."
    def roll(self) -> int:
        "Roll."
        return random.getrandbits(60)
class Honest(Dice):
    "The same, and says so."
    replayable = False
class Process(Environment):
    "What is the same in one process alone."
    def where(self) -> int:
        "The process."
        return os.getpid()
class Fair(Environment):
    "A state, random numbers from its seed, replies and a reward."
    def __init__(self):
        self._dice, self._sum = random.Random(self.seed), 0
    def reset(self, row):
        return "Begin with " + row["prompt"]
    def roll(self) -> int:
        "Roll."
        self._sum += self._dice.randrange(10**9)
        return self._sum
    def reply(self, text):
        if "\\x00" in text:
            raise ValueError("a zero")
        return "ended" if len(text) > 99 else f"{self._sum} so far"
    def reward(self):
        return self._sum / 10**10
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd_episodes.py").write_text(TOOLS)
    write(tmp_path / "rows.jsonl", [{"prompt": f"q{n}", "answer": str(n)} for n in range(3)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(name: str, **arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def command(
    *tools: str, environment: str = "", messages: str = "", rewards_itself: bool = False
) -> list[str]:
    return [
        "episode-check",
        str(RECIPE),
        "data.train=rows.jsonl",
        "data.eval={}",
        f"data.messages={messages or 'null'}",
        f"episode.tools={list(tools)}",
        f"episode.environment={environment or 'null'}",
        f"reward.function={'null' if rewards_itself else 'megarl.rollout.rewards.exact:score'}",
        "episode.call_timeout_s=5",
    ]


def run(*arguments: str, code: int = 0) -> Result:
    before = set(psutil.Process().children(recursive=True))
    done = CliRunner().invoke(app, list(arguments))
    assert not set(psutil.Process().children(recursive=True)) - before
    assert done.exit_code == code, done.output
    return done


def test_good_tools_have_nothing_to_mend() -> None:
    done = run(*command(CALCULATE, "odd_episodes:repeat"), "--rows", "1")
    assert 'unit, required: {"enum": ["x", "y"], "type": "string"}' in done.stdout
    assert 'count, optional: {"default": 2, "type": "integer"}' in done.stdout
    assert 'repeat {"text": "a", "unit": "x", "count": 1}: ax (' in done.stdout
    assert "JSON of 100000 levels: repeat was not called: its arguments are no JSON" in done.stdout
    assert (
        "unknown tool: There is no tool 'no_such_tool'. The tools are: calculate, repeat."
        in done.stdout
    )
    assert "reward of rows.jsonl:1 for '0', answer '0': 1, correct" in done.stdout
    assert done.stdout.endswith("result: nothing to correct\n")


def test_an_environment_is_replayed_and_its_replies_are_tried() -> None:
    done = run(*command(environment=GUESS, rewards_itself=True), "--rows", "2")
    assert "reset: Guess my number, a whole number from 1 to 100." in done.stdout
    assert "reward of the environment: 0, not correct" in done.stdout
    assert (
        done.stdout.count("the same results in another run, also after the end of its process") == 2
    )
    done = run(
        *command(environment="odd_episodes:Fair", rewards_itself=True), "--rows", "1", code=2
    )
    assert done.stdout.endswith("result: 1 to correct\n")
    assert (
        "also after the end of its process" in done.stdout and "method reward: plain" in done.stdout
    )
    assert (
        "reply, control characters and special tokens: reply raised ValueError: a zero; let the"
        in done.stderr
    )


def test_what_goes_wrong_is_one_line_each() -> None:
    tools = [f"odd_episodes:{name}" for name in ("hang", "end", "brittle", "garbage")]
    done = run(*command(*tools), "--rows", "1", code=2)
    assert [line.partition(";")[0] for line in done.stderr.splitlines()] == [
        "episode.tools: rows.jsonl:1: hang took longer than 5 s.",
        "episode.tools: rows.jsonl:1: end ended its process (exit code 3).",
        "episode.tools: rows.jsonl:1: garbage returned a value of type object, which is neither text nor JSON.",
        "episode.tools: brittle, 1 MB of text: brittle ended its process (exit code 4).",
    ]
    assert done.stdout.endswith("result: 4 to correct\n")


@pytest.mark.parametrize(
    ("environment", "shown", "error"),
    [
        (
            "odd_episodes:Dice",
            "replayable: yes",
            "a second run with the same seed gives other",
        ),
        (
            "odd_episodes:Process",
            "",
            "a replay after the end of its process gives other results",
        ),
        ("odd_episodes:Honest", "replayable: no", ""),
    ],
)
def test_results_that_differ_break_a_promise(environment: str, shown: str, error: str) -> None:
    done = run(*command(environment=environment), "--rows", "1", code=2 if error else 0)
    assert shown in done.stdout
    assert error in done.stderr and len(done.stderr.splitlines()) == bool(error)


def test_a_function_promises_nothing() -> None:
    done = run(*command("odd_episodes:draw"), "--rows", "1")
    assert "a second run with the same seed gives other results: draw gave '" in done.stdout
    assert done.exit_code == 0, done.output


def test_turns_of_a_file_are_played(folder: Path) -> None:
    write(
        folder / "turns.jsonl",
        [[call("calculate", expression="6*7"), {"role": "assistant", "content": "0"}]],
    )
    done = run(*command(CALCULATE), "--turns", "turns.jsonl")
    assert 'calculate {"expression": "6*7"}: 42 (' in done.stdout
    assert "reward of rows.jsonl:1 for '0', answer '0': 1, correct" in done.stdout


def test_a_reward_function_gets_the_episode(folder: Path) -> None:
    """The example of docs/rewards.md, which looks for the answer among the results of the calls."""
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
    example = next(
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "episode[" in block
    )
    shown = "\n\ndef shown(*arguments, episode):\n    open('seen', 'w').write(__import__('json').dumps(episode))\n"
    (folder / "page_rewards.py").write_text(
        example + shown + "    return score(*arguments, episode=episode)\n"
    )
    write(folder / "rows.jsonl", [{"prompt": "q", "answer": "42"}])
    turns = [
        call("calculate", expression="6*7"),
        call("calculate", number=6),
        call("gone"),
        {"content": "42"},
    ]
    write(folder / "turns.jsonl", [turns])
    done = run(*command(CALCULATE), "reward.function=page_rewards:shown", "--turns", "turns.jsonl")
    assert "reward of rows.jsonl:1 for '42', answer '42': 0.97, correct" in done.stdout
    episode = json.loads((folder / "seen").read_text())
    assert (episode["calls"], episode["call_errors"]) == (3, 2)
    assert episode["end"] == "answered" and episode["tool_s"] > 0
    outcomes = [
        (tool_call["arguments"], tool_call["error"])
        for turn in episode["turns"]
        for tool_call in turn["calls"]
    ]
    assert outcomes == [
        ({"expression": "6*7"}, None),
        ({"number": 6}, "arguments"),
        (None, "bad_call"),
    ]
    assert [turn["text"] for turn in episode["turns"]] == ["", "", "", "42"]


def test_demonstrations_are_compared_with_what_the_tools_give(folder: Path) -> None:
    def told(result: str) -> list[dict[str, Any]]:
        end = {"role": "assistant", "content": result}
        return [
            call("calculate", expression="6*7"),
            {"role": "tool", "tool_call_id": "1", "content": result},
            end,
        ]

    write(
        folder / "rows.jsonl",
        [{"prompt": "q", "answer": "42", "shown": told(result)} for result in ("42", "41")],
    )
    done = run(*command(CALCULATE, messages="shown"), code=2)
    assert done.stderr.splitlines() == [
        'data.messages: rows.jsonl:2: the result of calculate {"expression": "6*7"} is '
        "'41' in the data, and now '42'; record the demonstrations again, or mend the tool"
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("episode=null", "episode: the recipe has none"),
        ("data.train=gone.jsonl", "data.train: gone.jsonl is not a file"),
        ("data.answer=gone", "there is no column 'gone'"),
        (
            "data.messages=gone",
            "data.messages: rows.jsonl:1: there is no column 'gone' (and 2 more such rows)",
        ),
        (
            "episode.environment=a:b",
            "episode: it names tools and environment; name one of the three",
        ),
        ("reward.function=null", "reward.function: is not set"),
        ("reward.function=odd_episodes:gone", "reward.function: odd_episodes has no 'gone'"),
        ("--turns gone.jsonl", "--turns: gone.jsonl cannot be read"),
        ("--turns rows.jsonl", "--turns: rows.jsonl:1: the messages are {'prompt': 'q0'"),
    ],
)
def test_errors_end_with_2(arguments: str, says: str) -> None:
    done = run(*command(CALCULATE), *arguments.split(), code=2)
    assert says in done.stderr


@pytest.mark.slow
def test_texts_are_shown_as_the_tokenizer_of_the_model_reads_them(folder: Path) -> None:
    from tests.tiny_engines import write_tokenizer  # imports SGLang

    write_tokenizer(folder / "model")
    turns = [
        call("repeat", text="<eos>", unit="x", count=1),
        call("repeat", text="a" * 9, unit="y", count=2),
    ]
    write(folder / "turns.jsonl", [turns])
    done = run(*command("odd_episodes:repeat"), "model.path=model", "--turns", "turns.jsonl")
    assert '"count": 1}: < eos>x (' in done.stdout
    assert (
        '"count": 2}: aaaaaaaaaaaaaaaaaay (' in done.stdout
        and ", without 3 tokens in its middle)" in done.stdout
    )


def test_ctrl_c_leaves_no_process(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    keys = ["episode.arguments={fifo: fifo}", "episode.call_timeout_s=600"]
    line = [sys.executable, "-m", "megarl.cli", *command("odd_episodes:hang"), *keys]
    with subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        worker = int((folder / "fifo").read_text())
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "megarl: interrupted\n")
    assert not psutil.pid_exists(worker)


def test_values_are_made_up_by_their_types() -> None:
    person = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 18}},
        "required": ["age"],
    }
    schema = {
        "type": "object",
        "properties": {
            "people": {"type": "array", "items": {"$ref": "#/$defs/Person"}, "minItems": 2},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "number"}],
                "minItems": 2,
            },
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "word": {"type": "string", "minLength": 3},
            "less": {"type": "number", "maximum": -2},
            "kind": {"const": "k"},
            "any": {},
        },
    }
    assert example(schema, {"Person": person}) == {
        "people": [{"age": 18}, {"age": 18}],
        "pair": ["a", 1.0],
        "maybe": True,
        "word": "aaa",
        "less": -2.0,
        "kind": "k",
        "any": "a",
    }
