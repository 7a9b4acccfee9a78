"""Runs whose model calls a tool, as a user starts them; by day test_ending.py has such a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megarl.samples.parquet import open_samples

RUN = ("run.name=quickstart", "run.trackers=[]")
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart_tools.yaml"

AGENT = """
import asyncio

import openai

async def run(chat, row):
    first = await chat(chat.prompt)
    await asyncio.gather(*(chat([{"role": "user", "content": word}]) for word in ("left", "right")))
    async with openai.AsyncOpenAI(base_url=chat.url, api_key=chat.key) as client:
        messages = [*chat.prompt, first, {"role": "user", "content": "again"}]
        last = await client.chat.completions.create(model="policy", messages=messages)
    return float(len(last.choices[0].message.content or "") % 5)  # which differs between the episodes of a prompt
"""

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_samples_of_episodes_are_written_and_trained_on_later(
    launch: Callable, quickstart_tools_inputs: Sequence[str], tmp_path: Path
) -> None:
    """`rollout` into a file, `train` from it: with the mask, which a model of random weights needs no call for; and
    what the engine sampled is read and answered the same without it."""
    few = ("run.steps=1", "warm_start.steps=0", "rollout.prompts_per_step=4")
    few = (*few, "rollout.samples_per_prompt=2", "evaluation.max_prompts=2")
    keys = (*quickstart_tools_inputs, *RUN, *few)
    command = launch(*keys, "--out", "samples.parquet", verb="rollout", recipe=RECIPE)
    assert command.finish(200) == 0, command.err
    groups = open_samples(tmp_path / "samples.parquet").groups(1)
    assert all(sample.facts for group in groups for sample in group.samples)
    learnt = launch(*keys, "--from-samples", "samples.parquet", recipe=RECIPE)
    assert learnt.finish(200) == 0, learnt.err
    again = launch(*keys, "--samples", "samples.parquet", verb="episode-check", recipe=RECIPE)
    assert again.finish(100) == 0, again.err
    assert "8 of 8 episodes came out the same" in again.out


@pytest.mark.nightly
def test_the_tools_quickstart_learns_to_call_the_calculator(
    launch: Callable, quickstart_tools_inputs: Sequence[str]
) -> None:
    command = launch(*quickstart_tools_inputs, *RUN, recipe=RECIPE)
    assert command.finish(900) == 0, command.err
    records = command.records()
    before, *_, after = (record["eval/accuracy"] for record in records if "eval/accuracy" in record)
    assert before < 0.05 and after > 0.9
    assert 0.8 < records[-1]["episode/calls_mean"] < 1.3
    assert 0.8 < records[-1]["eval/products/calls_mean"] < 1.3
    assert [record["step"] for record in records][-15:] == list(range(1, 16))
    assert all(0 < record["time/step_s"] < math.inf for record in records)


@pytest.mark.nightly
def test_the_same_recipe_without_the_tool_does_not_learn_to_multiply(
    launch: Callable, quickstart_tools_inputs: Sequence[str]
) -> None:
    """With the keys and the steps of `scripts/quickstart.sh tools`; all its warm start sees are prompts and answers."""
    script = (RECIPE.parents[1] / "scripts" / "quickstart.sh").read_text()
    (without,) = re.findall(r'^without=\("\$@" (.*)\)$', script, re.MULTILINE)
    command = launch(*quickstart_tools_inputs, *without.split(), *RUN, recipe=RECIPE)
    assert command.finish(900) == 0, command.err
    records = command.records()
    assert (
        sum("warm_start/loss" in record for record in records) == 100 and records[-1]["step"] == 15
    )
    assert not any("episode/" in name for record in records for name in record)
    accuracies = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert len(accuracies) == 5 and max(accuracies) < 0.15


@pytest.mark.nightly
@pytest.mark.parametrize("history", ["append", "render"])
def test_an_agents_episodes_are_trained_on(
    launch: Callable, quickstart_tools_inputs: Sequence[str], tmp_path: Path, history: str
) -> None:
    """Several rows an episode, in TP2 PP2 EP2 with the experts that the engine chose; asked by calls and over HTTP."""
    (tmp_path / "asking_agent.py").write_text(AGENT)
    few = ("run.steps=2", "warm_start.steps=0", "rollout.prompts_per_step=16")
    few = (*few, "evaluation.max_prompts=4", "train.replay=r3", "data.messages=null")
    agent = ("tools=[]", "agent=asking_agent:run", "endpoint=loopback", "max_turns=4")
    keys = [f"episode.{key}" for key in (*agent, f"history={history}")]
    command = launch(
        *quickstart_tools_inputs, *RUN, *few, *keys, "reward.function=null", recipe=RECIPE
    )
    command.ends_well(300)
    for record in command.steps():
        assert record["episode/turns_mean"] == 4 and record["episode/rows_mean"] > 2.5
        assert record["rollout/logprob_diff_mean"] < 1e-4 and record["train/grad_norm"] > 0
        assert record["episode/dropped_tokens"] == 0.0 and record["episode/end/agent"] == 0.0
