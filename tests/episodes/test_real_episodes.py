"""Episodes on a real engine: what is trained is what was sampled, after exactly the tokens that the row has."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.episode import EpisodeConfig
from megarl.environments.agents.agent_processes import AgentSettings
from megarl.environments.agents.agent_thread import AgentThread
from megarl.environments.endpoint.chat_endpoint import ChatEndpoint
from megarl.environments.runtime.environment_processes import EnvironmentSettings
from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.episodes.agent_runner import AgentRunner
from megarl.episodes.agent_tools import ToolSets
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.rows import EpisodeResult
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.model.hf_config import end_token_ids
from megarl.model.tokenizer import load_tokenizer
from megarl.rollout.sglang.engine import Engine
from megarl.samples import accounting
from megarl.types import Prompt
from megarl.types.reward_result import RewardResult
from megarl.types.sampling import Sampling
from tests.parallel import checkpoints
from tests.tiny_engines import Reference, write_tokenizer

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STOPS = [1, *range(20, 34)]  # many, so that a model of random weights ends its turns
TURN_TOKENS, EPISODES = 24, 12
AGENT = """
import asyncio
import contextlib

import openai


async def run(chat, row):
    messages = chat.prompt
    for _ in range(3):
        message = await chat(messages)
        messages = [*messages, message, {"role": "user", "content": "more"}]
    await asyncio.gather(*(chat([{"role": "user", "content": word}]) for word in ("left", "right")))
    async with openai.AsyncOpenAI(base_url=chat.url, api_key=chat.key, max_retries=0) as client:
        with contextlib.suppress(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=chat.prompt, temperature=0.3)
            return 0.0
        first = await client.chat.completions.create(model="policy", messages=chat.prompt)
        said = first.choices[0].message.model_dump()
        follows = [*chat.prompt, said, {"role": "user", "content": "more"}]
        second = await client.chat.completions.create(model="policy", messages=follows, stop=list("nopqrstu"))
        said = second.choices[0].message.content
        if second.choices[0].finish_reason == "stop" and set(said) & set("nopqrstu"):
            return 0.0
        follows += [{"role": "assistant", "content": said}, {"role": "user", "content": "and"}]
        await client.chat.completions.create(model="policy", messages=follows)
    return 0.5
"""
ONCE = """
from megarl.environments import Environment

class Once(Environment):
    def reply(self, text):
        return None

    def reward(self):
        return 0.5
"""
# the seeded one first, as where it is the only one: pytest would start it twice
ENGINES = {"seeded": True}, {}, {"dp": 2}
GAME = EnvironmentSettings(environment="megarl.environments.guess:Guess", workers=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talker")
    write_tokenizer(folder, TEMPLATE)
    path = checkpoints.write(folder, "qwen3-moe")
    file = path / "generation_config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | {"eos_token_id": STOPS}))
    return path


@pytest.fixture(scope="module")
def game() -> Iterator[EnvironmentThread]:
    thread = EnvironmentThread(GAME)
    yield thread
    thread.shutdown()


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AgentThread, ChatEndpoint]]:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "asking_agent.py").write_text(AGENT)
    sys.path.append(str(folder))
    thread, endpoint = AgentThread(AgentSettings("asking_agent:run", workers=1)), ChatEndpoint()
    yield thread, endpoint
    thread.shutdown()
    endpoint.shutdown()
    sys.path.remove(str(folder))


@pytest.fixture(scope="module", params=ENGINES, ids=["seeded", "plain", "dp2"])
def engine(
    request: pytest.FixtureRequest, build_engine: Callable[..., Engine], model: Path
) -> Iterator[Engine]:
    built = build_engine(2, 1, model_path=str(model), routed_experts=True, **request.param)
    yield built
    built.shutdown()


def play(
    engine: Engine,
    game: EnvironmentThread,
    model: Path,
    stream: tuple[int, ...],
    phase_tokens: int | None = None,
    **limits: Any,
) -> list[EpisodeResult]:
    """A group of episodes, after as many phases as they take; the template of a rendered history shows the ends of
    earlier turns alone."""
    tokenizer = load_tokenizer(str(model))
    if limits.get("history") == "render":
        tokenizer.chat_template = TEMPLATE.replace(
            "m.content", "m.content[-3 if m.role == 'assistant' else 0:]"
        )
    turn_tokenizer = TurnTokenizer(tokenizer, end_token_ids(str(model)))
    config = EpisodeConfig.model_validate(
        {"environment": GAME.environment, "max_tokens": 400, "max_turns": 5} | limits
    )
    episodes = EpisodeRunner(config, engine, game, turn_tokenizer, None, max_prompt_tokens=300)
    prompt = Prompt("row 1", "", tuple(turn_tokenizer.first("go")), "", {"prompt": "go"}, "go")
    sampling = Sampling(EPISODES, TURN_TOKENS, stream=stream, phase_tokens=phase_tokens)

    async def phase(begun: list[EpisodeResult | None]) -> list[EpisodeResult]:
        going = [
            place for place, result in enumerate(begun) if result is None or result.sample.is_open
        ]
        samples = [result.sample if result else None for result in begun]
        played = await asyncio.gather(
            *(episodes.run(prompt, sampling, place, samples[place]) for place in going)
        )
        new = dict(zip(going, played, strict=True))
        return [new.get(place) or result for place, result in enumerate(begun)]  # type: ignore[misc]

    results = asyncio.run(phase([None] * EPISODES))
    while any(result.sample.is_open for result in results):
        results = asyncio.run(phase(list(results)))
    return results


def test_every_trained_token_was_sampled_after_its_row(
    engine: Engine, game: EnvironmentThread, model: Path, request: pytest.FixtureRequest
) -> None:
    """By the logprobs of transformers over the whole row: a token after another prefix would have another one."""
    played = play(engine, game, model, (1, 2))
    assert max(result.sample.facts.turns for result in played if result.sample.facts) > 2
    check_rows(played, Reference(model))
    assert not any(len(result.sample.rows) > 1 for result in played)
    facts = [result.sample.facts for result in played if result.sample.facts]
    reusable, cached = (
        sum(getattr(episode_facts, name) for episode_facts in facts)
        for name in ("reusable_tokens", "cached_tokens")
    )
    if "seeded" in request.node.name:
        assert reusable and cached == 0, "seeded engines on CPU have no prefix cache"
    else:
        assert 0 < cached <= reusable, (
            "a turn is sampled in the attention group that has the turns before"
        )


def test_rows_of_rendered_histories_are_what_was_sampled(
    engine: Engine, game: EnvironmentThread, model: Path
) -> None:
    """Each row after the tokens that the engine was given, whatever the template makes of the turns before."""
    played = play(engine, game, model, (1, 2), history="render")
    assert max(len(result.sample.rows) for result in played) > 2
    check_rows(played, Reference(model))


def test_rows_of_agents_are_what_was_sampled(
    engine: Engine, agents: tuple[AgentThread, ChatEndpoint], model: Path
) -> None:
    """By calls and by the OpenAI client, in one row where a request goes on, in rows of their own otherwise."""
    tokenizer, stops = load_tokenizer(str(model)), end_token_ids(str(model))
    config = EpisodeConfig.model_validate({"agent": "asking_agent:run", "max_tokens": 400})
    runner = AgentRunner(config, engine, *agents, ToolSets(tokenizer, stops), max_prompt_tokens=300)
    prompt = Prompt(
        "row 1", "", tuple(TurnTokenizer(tokenizer, stops).first("go")), "", {"prompt": "go"}, "go"
    )
    sampling = Sampling(EPISODES, TURN_TOKENS, stream=(4, 2))

    async def together() -> list[EpisodeResult]:
        return await asyncio.gather(
            *(runner.run(prompt, sampling, place) for place in range(EPISODES))
        )

    played = asyncio.run(together())
    check_rows(played, Reference(model))
    for result in played:
        assert result.reward_result == RewardResult(0.5, False) and result.sample.facts
        assert result.refused_fields == {"temperature": 1}
        assert result.sample.facts.turns == 8 and result.sample.facts.end in ("answered", "cut")
        accounting.check(prompt, [result.sample])
    check_stop_texts(played, tokenizer, stops)
    assert min(len(result.sample.rows) for result in played) < 8, (
        "some requests go on with what was said"
    )
    asked = asyncio.run(engine.take_completed())
    assert len(asked) >= EPISODES


def check_stop_texts(
    played: Sequence[EpisodeResult], tokenizer: Any, stops: Collection[int]
) -> None:
    """Turns that a stop text has ended: all of their tokens are trained, and the conversation goes on after them.

    Such a turn is followed by the end that the template writes, which was not sampled, and by the user's "and".
    """
    ended = []
    for row in (row for result in played for row in result.sample.rows):
        response = row.response_ids_T.tolist()
        trained = row.trained_T.tolist()
        for place in range(len(response) - 1):
            if trained[place] and not trained[place + 1] and response[place] not in stops:
                assert tokenizer.decode(response[place + 1 : place + 6]) == "<eos><user>and"
                ended.append(tokenizer.decode([response[place]]))
    assert ended and all(set(token) & set("nopqrstu") for token in ended), (
        "of special tokens a part is enough"
    )


def check_rows(played: Sequence[EpisodeResult], reference: Reference) -> None:
    """Every trained token has the logprob that transformers gives it after the row's tokens before it.

    But for tokens behind one whose experts rounding decides: nearly all rows have none.
    """
    num_compared = 0
    num_trained = 0
    for result in played:
        sample = result.sample
        assert sample.facts and result.reward_result is not None
        assert sample.num_trained == sample.facts.sampled_tokens - sample.facts.dropped_unawaited
        for row in sample.rows:
            response = row.response_ids_T.tolist()
            trained_T, before = row.trained_T, list(row.prompt_ids)
            assert trained_T[-1] and before
            expected_T = reference.decided_logprobs(before, response).numpy()
            compared_T = trained_T & ~np.isnan(expected_T)
            np.testing.assert_allclose(
                row.engine_logp_T[compared_T], expected_T[compared_T], atol=1e-4
            )
            assert not row.engine_logp_T[~trained_T].any()
            num_compared += int(compared_T.sum())
            num_trained += int(trained_T.sum())
            assert sum(part.num_tokens for part in row.parts) == len(response)
            assert row.routed_experts is not None
            assert len(row.routed_experts) == len(before) + len(response) - 1
    assert num_compared > 0.8 * num_trained


def test_experts_of_turns_are_those_of_the_whole_row(
    engine: Engine, game: EnvironmentThread, model: Path
) -> None:
    """The engine reads a whole row at once, and chooses the same for every token but where two are as good."""
    row = max(
        (result.sample.only_row for result in play(engine, game, model, (5,))),
        key=lambda row: len(row.response_ids_T),
    )
    token_ids = [*row.prompt_ids, *row.response_ids_T.tolist()]
    (again,) = asyncio.run(engine.generate(token_ids, Sampling(1, 1)))
    assert row.routed_experts is not None and again.only_row.routed_experts is not None
    whole = again.only_row.routed_experts[: len(token_ids) - 1]
    assert (np.sort(whole, -1) == np.sort(row.routed_experts, -1)).mean() > 0.99


is_seeded = pytest.mark.parametrize("engine", ENGINES[:1], ids=["seeded"], indirect=True)


@is_seeded
def test_one_turn_without_tools_is_a_single_response(
    engine: Engine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: tokens, logprobs and experts are those of a sample that is no episode, and so is what is trained."""
    (tmp_path / "one_turn.py").write_text(ONCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    once = EnvironmentThread(EnvironmentSettings(environment="one_turn:Once", workers=1))
    try:
        played = play(engine, once, model, (6, 1), max_turns=1)
    finally:
        once.shutdown()
    prompt_ids = TurnTokenizer(load_tokenizer(str(model)), end_token_ids(str(model))).first("go")
    plain = asyncio.run(engine.generate(prompt_ids, Sampling(EPISODES, TURN_TOKENS, stream=(6, 1))))
    for result, sample in zip(played, plain, strict=True):
        row, plain_row = result.sample.only_row, sample.only_row
        for name in ("prompt_ids", "response_ids_T", "engine_logp_T", "trained_T"):
            np.testing.assert_array_equal(getattr(row, name), getattr(plain_row, name))
        assert row.routed_experts is not None and plain_row.routed_experts is not None
        np.testing.assert_array_equal(row.routed_experts, plain_row.routed_experts)
        assert (result.sample.text, row.parts) == (sample.text, plain_row.parts)
        assert result.sample.finished == sample.finished and result.reward_result == RewardResult(
            0.5, False
        )
    assert any(sample.finished for sample in plain)


@is_seeded
def test_seeded_episodes_repeat_to_the_bit(
    engine: Engine, game: EnvironmentThread, model: Path
) -> None:
    """Whether they are sampled at once, or in phases that cut their turns."""
    first, again, other = (play(engine, game, model, stream) for stream in ((3, 1), (3, 1), (3, 2)))
    parts = play(engine, game, model, (3, 1), 7)
    ids = [
        [result.sample.only_row.response_ids_T.tolist() for result in group]
        for group in (first, again, parts, other)
    ]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    for one, two, cut in zip(first, again, parts, strict=True):
        np.testing.assert_array_equal(
            one.sample.only_row.engine_logp_T, two.sample.only_row.engine_logp_T
        )
        np.testing.assert_allclose(
            one.sample.only_row.engine_logp_T, cut.sample.only_row.engine_logp_T, atol=1e-4
        )
    for one, *others in zip(first, again, parts, strict=True):
        for two in others:
            assert (
                one.sample.only_row.routed_experts is not None
                and two.sample.only_row.routed_experts is not None
            )
            assert (
                one.sample.only_row.routed_experts == two.sample.only_row.routed_experts
            ).mean() > 0.99
            assert one.reward_result == two.reward_result and one.sample.text == two.sample.text
            assert one.sample.facts and two.sample.facts
            apart = {"tool_s": 0.0, "reusable_tokens": 0, "cached_tokens": 0}
            assert replace(one.sample.facts, **apart) == replace(two.sample.facts, **apart)
            assert one.sample.transcript == two.sample.transcript
    prefills = [sum(result.sample.prefills for result in group) for group in (first, parts)]
    assert prefills[1] > prefills[0], "turns were cut"
