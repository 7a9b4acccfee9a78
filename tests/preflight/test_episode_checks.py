"""What is wrong with the episodes of a recipe is told before a run, by its key; tools are loaded as in a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.commands.dry_run import dry_run
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.data.inputs import read_data
from megarl.episodes.template import ChatTemplate
from megarl.model.tokenizer import load_tokenizer
from megarl.preflight.episode_checks import demonstration_errors, read_episode
from megarl.preflight.reward_checks import reward_errors
from megarl.types import UserError
from tests.episodes.chatml_families import QWEN_3
from tests.episodes.families import stop_ids, tokenizer_of

ROOT = Path(__file__).parents[2]
AGENT = "episode.tools=[] episode.agent=some:agent"
GUESS = "megarl.environments.guess:Guess"

TOOLS = '''
from megarl.environments import Environment

def halve(number: int) -> int:
    """Half of a number, rounded down."""
    return number // 2

def silent(number: int) -> int:
    return number

async def ask(chat, row, words="go"):
    await chat([*chat.prompt, {"role": "user", "content": words}])

def plain(chat, row):
    return 1.0

class Unready(Environment):
    @classmethod
    def prepare(cls):
        raise RuntimeError("it is not ready")

    def reply(self, text):
        return None
'''


@pytest.fixture(autouse=True)
def own_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))


def recipe(inputs: Sequence[str], *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / "quickstart_tools.yaml", [*inputs, *overrides])


def told(inputs: Sequence[str], *overrides: str, proves: bool = False) -> list[str]:
    tools_recipe = recipe(inputs, *overrides)
    tokenizer = load_tokenizer(tools_recipe.model.path) if proves else None
    return [str(error) for error in read_episode(tools_recipe, tokenizer).errors]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "episode.tools=[]",
            "episode: it names no tools, environment or agent; name one of the three",
        ),
        (
            f"episode.environment={GUESS}",
            "episode: it names tools and environment; name one of the three",
        ),
        (
            "episode.max_tokens=10",
            "episode.max_tokens: 10 is less than a turn may have: rollout.max_response_tokens",
        ),
        (
            f"{AGENT} rollout.phase_tokens=8",
            "rollout.phase_tokens: 8, but an agent's episode is sampled whole",
        ),
        (
            f"{AGENT} rollout.ahead=1",
            "rollout.ahead: 1, but an agent's episode is sampled whole; leave it out",
        ),
        (
            "rollout.phase_tokens=8 episode.phase_tool_s=5",
            "episode.phase_tool_s: 5, and a longer call, which may",
        ),
        ("episode.tools=[odd_tools:halv]", "episode.tools: "),
        ("episode.tools=[odd_tools:silent]", "episode.tools: odd_tools:silent has no docstring"),
        ("episode.arguments.base=2", "episode.arguments: no tool takes 'base'"),
        (
            "episode.agent=odd_tools:ask",
            "episode: it names tools and agent; name one of the three",
        ),
        (
            "episode.tools=[] episode.agent=odd_tools:plain",
            "episode.agent: odd_tools:plain is",
        ),
        (
            "episode.tools=[] episode.agent=odd_tools:ask episode.arguments.base=2",
            "episode.arguments",
        ),
        (
            "episode.endpoint=loopback",
            "episode.endpoint: loopback, but only an agent asks there; leave it out",
        ),
    ],
    ids=lambda value: None if ": " in value else value,
)
def test_an_error_names_its_key(
    quickstart_tools_inputs: Sequence[str], overrides: str, says: str
) -> None:
    (line,) = told(quickstart_tools_inputs, *overrides.split())
    assert line.startswith(says), line


@pytest.mark.slow
def test_what_is_right_is_read_and_proven(quickstart_tools_inputs: Sequence[str]) -> None:
    """Several tools, an environment without tools, and a recipe without episodes; none leaves a process behind."""
    tools_recipe = recipe(
        quickstart_tools_inputs,
        "episode.tools=[megarl.environments.calculator:calculate, odd_tools:halve]",
    )
    episode = read_episode(tools_recipe, load_tokenizer(tools_recipe.model.path))
    assert [tool["function"]["name"] for tool in episode.tools] == ["calculate", "halve"]
    assert not episode.errors and not episode.has_reward
    assert any("calls are read as SGLang's hermes" in note for note in episode.notes)
    game = recipe(
        quickstart_tools_inputs,
        "episode.tools=[]",
        f"episode.environment={GUESS}",
        "reward.function=null",
    )
    played = read_episode(game, load_tokenizer(game.model.path))
    assert played.has_reward and not played.tools and not played.errors
    assert read_episode(recipe(quickstart_tools_inputs, "episode=null"), None).tools == ()


def test_what_only_the_runs_machine_has_is_not_asked_for_elsewhere(
    quickstart_tools_inputs: Sequence[str],
) -> None:
    """A corpus of which there is no file here: everything else is checked."""
    pytest.importorskip("bm25s")
    keys = [
        "episode.tools=[megarl.environments.search:search]",
        "episode.arguments={corpus: gone.jsonl}",
    ]
    (line,) = told(quickstart_tools_inputs, *keys)
    assert line.startswith("episode.arguments: corpus: there is no file gone.jsonl")
    episode = read_episode(recipe(quickstart_tools_inputs, *keys), None, prepares=False)
    assert not episode.errors and [tool["function"]["name"] for tool in episode.tools] == ["search"]
    game = recipe(
        quickstart_tools_inputs, "episode.tools=[]", "episode.environment=odd_tools:Unready"
    )
    (error,) = read_episode(game, None).errors
    assert "it is not ready" in str(error) and not read_episode(game, None, prepares=False).errors


def test_a_template_that_writes_no_calls_is_refused(
    quickstart_tools_inputs: Sequence[str], tiny_model: Path
) -> None:
    (line,) = told(quickstart_tools_inputs, f"model.path={tiny_model}", proves=True)
    assert line.startswith(
        "episode.tools: the chat template leaves tool calls out of the text without an error; use a"
    )


def test_what_the_template_would_leave_out_later_is_told(
    quickstart_tools_inputs: Sequence[str], tmp_path: Path
) -> None:
    """Qwen3's drops the reasoning of turns before a user's message; a rendered history drops it, too."""
    tokenizer_of(QWEN_3).save_pretrained(tmp_path)
    config = json.loads(
        (Path(recipe(quickstart_tools_inputs).model.path) / "config.json").read_text()
    )
    config |= {"vocab_size": len(tokenizer_of(QWEN_3)), "eos_token_id": sorted(stop_ids(QWEN_3))}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def kept(history: str) -> list[str]:
        keys = [
            f"model.path={tmp_path}",
            "episode.tools=[]",
            f"episode.environment={GUESS}",
            "reward.function=null",
        ]
        tools_recipe = recipe(quickstart_tools_inputs, *keys, f"episode.history={history}")
        episode = read_episode(tools_recipe, load_tokenizer(tools_recipe.model.path))
        assert not episode.errors
        return [note for note in episode.notes if "leave out later" in note]

    (note,) = kept("append")
    start = "episode: episodes keep what the chat template would leave out later"
    assert note == f"{start}: the reasoning of a turn after a user's message"
    assert kept("render") == []


def test_prompts_are_rendered_with_the_tools(quickstart_tools_inputs: Sequence[str]) -> None:
    """By the same tokens as the splice's first; without them a model would not know of the tools."""
    tools_recipe = recipe(quickstart_tools_inputs)
    tokenizer = load_tokenizer(tools_recipe.model.path)
    episode = read_episode(tools_recipe, tokenizer)
    prompts = read_data(tools_recipe, tokenizer, tools=episode.tools).train_prompts
    assert episode.turn_tokenizer
    for prompt in prompts[:20]:
        assert list(prompt.token_ids) == episode.turn_tokenizer.first(prompt.messages)
        assert "calculate" in ChatTemplate(tokenizer).decode(prompt.token_ids)


def test_an_environments_rewards_leave_nothing_to_a_function(
    quickstart_tools_inputs: Sequence[str],
) -> None:
    tools_recipe = recipe(quickstart_tools_inputs)
    (error,) = reward_errors(tools_recipe, [], has_own=True)
    assert str(error).startswith(
        "reward.function: is set, and episode.environment gives the rewards itself"
    )
    without_function = recipe(quickstart_tools_inputs, "reward.function=null")
    assert reward_errors(without_function, [], has_own=True) == []
    (error,) = reward_errors(without_function, [])
    assert str(error).startswith("reward.function: is not set, and nothing else gives rewards")


def test_demonstrations_are_read_before_a_run(
    quickstart_tools_inputs: Sequence[str], tmp_path: Path
) -> None:
    """All rows; those of one kind are one fault, which names the first."""

    def errors(rows: list[dict[str, Any]], *overrides: str) -> list[UserError]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tools_recipe = recipe(quickstart_tools_inputs, f"data.train={file}", *overrides)
        tokenizer = load_tokenizer(tools_recipe.model.path)
        episode = read_episode(tools_recipe, tokenizer)
        prompts = read_data(tools_recipe, tokenizer, tools=episode.tools).train_prompts
        return demonstration_errors(tools_recipe, episode, prompts)

    good = {"prompt": "2*3=", "answer": "6", "messages": [{"role": "assistant", "content": "6"}]}
    assert errors([good]) == []
    (error,) = errors(
        [good, {**good, "messages": [{"role": "user", "content": "6"}]}, {**good, "messages": "6"}]
    )[:1]
    assert error.where == "data.messages" and "rows.jsonl:2" in error.problem
    long = {**good, "messages": [{"role": "assistant", "content": "6" * 120}]}
    (error,) = errors([good, long])
    assert str(error).startswith(
        "episode.max_tokens: 96 is less than the longest demonstrated episode (121 tokens)"
    )
    assert errors([long], "warm_start.steps=0") == [], "nothing reads them"


def test_what_was_found_is_told_without_a_tokenizer(quickstart_tools_inputs: Sequence[str]) -> None:
    (note,) = read_episode(recipe(quickstart_tools_inputs), None).notes
    assert note == (
        "episode: tools calculate; at most 3 turns, 16 sampled tokens in a turn, 96 tokens after the prompt"
    )
    game = recipe(quickstart_tools_inputs, "episode.tools=[]", f"episode.environment={GUESS}")
    (note,) = read_episode(game, None).notes
    assert note.startswith("episode: megarl.environments.guess:Guess; at most 3 turns")


@pytest.mark.slow
def test_a_dry_run_tells_tools_turns_and_the_format_of_calls(
    quickstart_tools_inputs: Sequence[str],
) -> None:
    """And what is assumed of them: half of a call in each of 512 episodes of half of three turns."""
    lines: list[str] = []
    dry_run(recipe(quickstart_tools_inputs), lines.append)
    tools, calls, turns, load = (line for line in lines if line.startswith("episode: "))
    assert "tools calculate" in tools and "hermes" in calls
    assert turns == "episode: 1.5 turns in the mean, with 4 observation tokens (assumed)"
    limit = "each up to 10 s of a core (episode.call_timeout_s): up to 2,560 s of cores"
    assert load == f"episode: 256 calls a step (assumed), {limit}"
