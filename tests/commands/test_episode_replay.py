"""`megarl episode-check --samples`: episodes of a file that a real writer wrote, played again in real processes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.config.loading import load_recipe
from megarl.data.prompts import PromptSource, load_prompts
from megarl.episodes.runtimes import EnvironmentRuntime
from megarl.model.tokenizer import load_tokenizer
from megarl.rollout.worker import scored
from megarl.samples.buffer import PartialGroup
from megarl.samples.parquet import writing
from megarl.types import EpisodeProgress, Prompt, Sample, SampleGroup
from megarl.types.reward_result import RewardResult
from megarl.types.sampling import Sampling
from scripts.make_tiny_moe import make_tokenizer
from tests.samples.responses import response

pytestmark = pytest.mark.slow  # the reader of calls is SGLang's

RECIPE = Path(__file__).parents[2] / "recipes/quickstart_tools.yaml"
WORLD = """
import random
from megarl.environments import Environment, Observation

class Dice(Environment):
    "What is random comes from its seed."
    def __init__(self, unit="pips", worth=4, most=40, bonus=0, fails="", honest=True):
        self._dice = random.Random(self.seed if honest else None)
        self._unit, self._worth, self._most, self._bonus = unit, worth, most, bonus
        self._fails, self._sum = fails, 0
    def reset(self, row):
        if self._fails == "reset":
            raise ValueError("no dice")
        return f"{row['opening']} {self._dice.randrange(10**9)}" if row.get("opening") else None
    def roll(self, count: int) -> Observation:
        "Roll some dice."
        rolled = sum(self._dice.randint(1, 6) for _ in range(count))
        self._sum += rolled
        return Observation(f"{rolled} {self._unit}", reward=count / self._worth, done=self._sum > self._most)
    def reply(self, text):
        return f"you said {text}, and have {self._sum}"
    def reward(self):
        if self._fails == "reward":
            raise ValueError("no idea")
        return self._sum / 10 + self._bonus

class Once(Dice):
    replayable = False

def double(number: int, *, times: int = 2) -> int:
    "Twice a number."
    return number * times
"""
ROWS = [
    {"prompt": "go", "answer": "8", "opening": "begin"},
    {"prompt": "on", "answer": "8", "opening": ""},
]
CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
ENVIRONMENT = ("episode.tools=[]", "episode.environment=replay_world:Dice", "reward.function=null")
TOOLS = ("episode.tools=[replay_world:double]",)


def call(name: str, **arguments: object) -> str:
    return CALL.format(name, json.dumps(arguments))


ROLL = call("roll", count=2)
SCRIPTS = (  # the turns of the samples of a group
    [ROLL + call("roll", count="x"), "hello <user>", "bye"],
    [call("roll", count=20)],  # which ends the episode
    ["cut..."],
    [call("halve", number=1)] * 3,  # bad calls
)


class Script:
    """A sampler of given turns, by the number of the sample; a text that ends with dots has no stop token."""

    def __init__(self, tokenizer: Any, scripts: Sequence[Sequence[str]]) -> None:
        self._tokenizer = tokenizer
        self._scripts = scripts

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        return None

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        text = self._scripts[place][number]
        is_cut = text.endswith("...")
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if is_cut:
            ids = (ids * 40)[: sampling.max_tokens]
        else:
            ids.append(self._tokenizer.eos_token_id)
        assert len(ids) <= sampling.max_tokens
        return response(
            context_ids,
            np.array(ids),
            np.full(len(ids), -1.0, np.float32),
            self.text(ids),
            finished=not is_cut,
            version=3,
        )

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        return None

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands are started: a world, its data, and a model without weights."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "replay_world.py").write_text(WORLD)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = make_tokenizer(tools=True)
    tokenizer.save_pretrained(folder / "model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
    }
    (folder / "model/config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield folder


def keys(*more: str) -> list[str]:
    base_keys = (
        "model.path=model data.train=rows.jsonl data.eval={} data.messages=null episode.workers=1"
    )
    sizes = "data.max_prompt_tokens=80 rollout.max_response_tokens=140 episode.max_turns=3"
    limits = "episode.max_tokens=400 episode.max_observation_tokens=60"
    return [*f"{base_keys} {sizes} {limits}".split(), *more]


def played(*more: str, scripts: Sequence[Sequence[str]] = SCRIPTS) -> list[SampleGroup]:
    """Every row of the data with an episode for each script, as an engine's process plays and scores them."""
    recipe = load_recipe(RECIPE, keys(*more))
    runtime = EnvironmentRuntime(recipe)
    try:
        tokenizer = load_tokenizer(recipe.model.path)
        source = PromptSource("data.train", "rows.jsonl")
        prompts = load_prompts(
            source, tokenizer, max_prompt_tokens=80, tools=runtime.thread.schemas
        ).prompts
        runner = runtime.runner(Script(tokenizer, scripts))

        async def group(number: int, prompt: Prompt) -> SampleGroup:
            sampling = Sampling(
                len(scripts), recipe.rollout.max_response_tokens, stream=(1, number)
            )
            episodes = await asyncio.gather(
                *(runner.run(prompt, sampling, place) for place in range(len(scripts)))
            )
            # of the function, where it decides
            rewards = [episode.reward_result or RewardResult(0.5, False) for episode in episodes]
            samples = [episode.sample for episode in episodes]
            return scored(prompt, samples, rewards, recipe.reward, may_lose_all=True)[1]

        async def every() -> list[SampleGroup]:
            return [await group(number, prompt) for number, prompt in enumerate(prompts)]

        return asyncio.run(every())
    finally:
        runtime.shutdown()


@pytest.fixture(scope="module")
def dice(folder: Path) -> list[SampleGroup]:
    return played(*ENVIRONMENT)


def write(*steps: Sequence[SampleGroup | PartialGroup], vocab_size: int | None = None) -> None:
    with writing(
        Path("samples.parquet"), vocab_size or len(make_tokenizer(tools=True)), 1.0
    ) as file:
        for step in steps:
            file.write(step)


def check(*more: str) -> Result:
    before = set(psutil.Process().children(recursive=True))
    line = ["episode-check", str(RECIPE), "--samples", "samples.parquet", *keys(*more)]
    done = CliRunner().invoke(app, line)
    assert not set(psutil.Process().children(recursive=True)) - before
    assert done.exit_code == (2 if done.stderr else 0), done.output
    return done


def told(done: Result) -> str:
    """The line on standard error, without the file's name and what to do."""
    (line,) = done.stderr.splitlines()
    return line.removeprefix("samples.parquet: ").rpartition("; ")[0]


@pytest.mark.parametrize("history", ["append", "render"])
def test_episodes_of_an_unchanged_environment_come_out_the_same(history: str) -> None:
    groups = played(*ENVIRONMENT, f"episode.history={history}")
    samples = [sample for group in groups for sample in group.samples]
    facts = [sample.facts for sample in samples if sample.facts]
    assert {fact.end for fact in facts} == {"max_turns", "done", "cut", "bad_calls"}
    assert len({fact.seed for fact in facts}) == 2, "one for each prompt"
    openings = [
        len(group.samples[0].rows[0].prompt_ids) - len(group.prompt.token_ids) for group in groups
    ]
    assert openings[0] > openings[1] == 0, "reset said something"
    write(groups[:1], groups[1:])
    same = "8 of 8 episodes came out the same\n"
    assert check(*ENVIRONMENT, f"episode.history={history}").stdout == same
    if history == "append":
        note = "rewards are not compared: a reward model has added its scores\n"
        assert (
            check(*ENVIRONMENT, "episode.arguments={bonus: 1}", "reward_model.path=model").stdout
            == note + same
        )


@pytest.mark.parametrize(
    ("key", "same", "says"),
    [
        ("episode.arguments={unit: dots}", 6, r"before turn 2 the file has '.*</tool_call><eos><tool>\d+ pips<eos>"
         r"<tool>The call of roll could .* at token \d+, and now there is '.*<tool>\d+ dots<eos><tool>"),
        ("episode.arguments={worth: 8}", 4, "at turn 1 the file has the reward 0.5, and now there is the reward 0.25"),
        ("episode.arguments={bonus: 1}", 0, r"at the end the file has the reward \d\.\d \(\w+\), and now there is "
         r"the reward \d\.\d \(correct\)"),
        ("episode.arguments={fails: reward}", 0, r"after turn 3 the file has the end `max_turns`, and now there is the "
         r"end `environment` \(reward raised ValueError: no idea\)"),
        ("episode.arguments={fails: reset}", 0, r"before turn 1 the file has another turn, and now there is the end "
         r"`environment` \(reset raised ValueError: no dice\)"),
        ("episode.arguments={most: 0}", 6, "before turn 2 the file has another turn, and now there is the end `done`"),
        ("episode.arguments={most: 400}", 6, "after turn 1 the file has the episode's end, and now there is a further"
         r" turn after '.*\d pips<eos><assistant>'"),
        ("episode.arguments={honest: false}", None, "before turn 1 the file has '.*begin "),
        ("rollout.max_response_tokens=20", 0, r"in turn 1 the file has \d+ tokens, and now there is room for 20"),
        ("episode.max_turns=2", 4, "before turn 3 the file has another turn, and now there is the end `max_turns`"),
    ],
)  # fmt: skip
def test_the_first_difference_is_told(
    dice: list[SampleGroup], key: str, same: int | None, says: str
) -> None:
    """same: how many come out the same nevertheless; None: it depends on chance."""
    write(dice)
    done = check(*ENVIRONMENT, key)
    assert re.fullmatch(
        f"{r'[0-7]' if same is None else same} of 8 episodes came out the same\n", done.stdout
    )
    assert re.match(rf"step 1, group 0, sample \d \(rows.jsonl:1\): {says}", told(done)), told(done)


def test_a_difference_is_shown_in_one_line_without_control_characters(
    dice: list[SampleGroup],
) -> None:
    """The file has what a model wrote, and the recipe's arguments may hold anything."""
    write(dice)
    tokenizer = load_tokenizer("model")
    tokenizer.add_tokens(["\x1b[2J\n\u202e"])
    tokenizer.save_pretrained("other")
    shutil.copy("model/config.json", "other")
    done = check(*ENVIRONMENT, "model.path=other", 'episode.arguments={unit: "\\e[2J\\n\\u202e"}')
    assert r"\x1b[2J\n\u202e" in told(done) and not set("\x1b\u202e") & set(done.stderr)


def test_functions_are_called_again_and_rewards_of_functions_are_not_compared() -> None:
    """Functions have no seed."""
    groups = played(*TOOLS, scripts=[[call("double", number=4), "8"], ["no idea"]])
    write([without_seeds(group) for group in groups])
    note = "rewards are not compared: `megarl reward-check --samples` judges those of a function anew\n"
    assert check(*TOOLS).stdout == note + "4 of 4 episodes came out the same\n"
    done = check(*TOOLS, "episode.arguments={times: 3}")
    assert done.stdout == note + "2 of 4 episodes came out the same\n"
    assert told(done).startswith(
        "step 1, group 0, sample 0 (rows.jsonl:1): before turn 2 the file has "
    )
    assert check(*TOOLS, "--rows", "1").stdout == note + "2 of 2 episodes came out the same\n"


def test_an_environment_that_failed_must_fail_again() -> None:
    """Its episodes are in the file where reward.on_failure penalises them."""
    keep = (*ENVIRONMENT, "reward.on_failure=penalise", "reward.penalty=-1")
    write(played(*keep, "episode.arguments={fails: reward}"))
    done = check(*keep, "episode.arguments={fails: reward}")
    assert done.stdout == "8 of 8 episodes came out the same\n"
    done = check(*keep)
    assert done.stdout == "0 of 8 episodes came out the same\n"
    assert told(done).endswith(
        "after turn 3 the file has the end `environment`, and now there is the end `max_turns`"
    )


def test_what_cannot_be_played_again_is_left_out_and_counted(dice: list[SampleGroup]) -> None:
    """As in the file of a checkpoint's buffer, whose groups may have open episodes."""
    whole = dice[0].samples[0]
    assert whole.facts
    opened = replace(
        whole,
        is_open=True,
        finished=False,
        facts=None,
        open_episode=EpisodeProgress(1, {"sampled_tokens": whole.num_trained}, "answer", said=()),
    )
    late = replace(whole, facts=replace(whole.facts, end="timeout"))
    other = replace(whole, facts=replace(whole.facts, seed=None))
    twice = replace(whole.facts, sampled_tokens=2 * whole.facts.sampled_tokens)
    agents = replace(whole, rows=whole.rows * 2, facts=twice)
    reward_result = RewardResult(float(dice[0].rewards_G[0]), bool(dice[0].correct_G[0]))
    reward_results = reward_result, None, reward_result, reward_result, reward_result
    write(
        [PartialGroup(dice[0].prompt, (whole, opened, late, other, agents), reward_results)],
        [dice[1]],
    )
    assert check(*ENVIRONMENT).stdout.splitlines() == [
        "samples left out: 1 that are open, 1 that ended as `timeout`, 1 without the seed of their environment, "
        "1 of an agent or of several conversations",
        "5 of 5 episodes came out the same",
    ]


def without_seeds(group: SampleGroup) -> SampleGroup:
    """As another program may write them."""
    return replace(
        group,
        samples=tuple(
            replace(sample, facts=replace(sample.facts, seed=None))
            for sample in group.samples
            if sample.facts
        ),
    )


def without_episodes(group: SampleGroup) -> SampleGroup:
    plain = response(group.prompt.token_ids, np.arange(3), text="x")
    return replace(group, samples=(plain,) * len(group.samples))


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("dice", "model.path=gone", "gone"),
        ("vocabulary", "", "it was sampled from a vocabulary of 7, and that of model.path has"),
        ("no episodes", "", "none of its samples can be played again: 8 that are no episodes"),
        ("older", "", "none of its samples can be played again: 8 without the seed of their environment"),
        ("dice", "data.prompt=answer", "the prompt of rows.jsonl:1 has 'go<eos><assistant>' at token "),
        ("dice", "data.prompt=question", "the prompt of rows.jsonl:1 cannot be made again (there is no column 'ques"),
        ("dice", f"episode.environment=null {TOOLS[0]}", "the prompt of rows.jsonl:1 has 'roll<eos><user>go<eos><ass"),
        ("dice", "episode.environment=replay_world:Once", "episode.environment: it is not replayable"),
        ("dice", "--turns turns.jsonl", "--turns: the turns are those of --samples; leave one of them out"),
        ("dice", "--samples rows.jsonl", "rows.jsonl: not a complete file of samples"),
        ("dice", "episode.environment=null episode.agent=replay_world:run", "what an agent has done cannot be"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused(
    dice: list[SampleGroup], kind: str, arguments: str, says: str
) -> None:
    if kind == "vocabulary":
        write(dice, vocab_size=7)
    else:
        changes = {"no episodes": without_episodes, "older": without_seeds}
        write([changes[kind](group) if kind in changes else group for group in dice])
    done = check(*ENVIRONMENT, *arguments.split())
    assert says in done.stderr and not done.stdout and len(done.stderr.splitlines()) == 1
