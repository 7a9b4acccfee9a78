"""What episodes cost beside the engine: a turn of ours, the splice against rendering all anew, and calls that hang.

The loop of episodes, the worker processes with the calculator, the reading of calls and the splice are those of a run.
The engine is scripted: it answers each turn at once (or after --turn-s) with a call, and the last with a text. Its
tokenizer and chat template are the quickstart's with tools, one token a character.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.config.episode import EpisodeConfig
from megarl.environments.runtime.environment_processes import EnvironmentSettings
from megarl.environments.runtime.environment_thread import EnvironmentThread
from megarl.episodes.episode_runner import EpisodeRunner
from megarl.episodes.rows import EpisodeResult
from megarl.episodes.template import user
from megarl.episodes.tool_calls import CallFormat
from megarl.episodes.turn_tokenizer import ToolResult, TurnTokenizer
from megarl.types import Prompt, Row, Sample, SamplePart
from megarl.types.sampling import Sampling
from scripts.bench.slow_tools import HANGS
from scripts.make_tiny_moe import make_tokenizer

ROOT = Path(__file__).parents[2]
CALCULATOR, SLOW = "megarl.environments.calculator:calculate", "scripts.bench.slow_tools:compute"
QUESTION, ANSWER = "what is the product?", "it is 408"
LOOK_S = 0.005  # between two looks at the loop's lag
TURN_TOKENS = 256
Figures = dict[str, float]


def call_text(name: str, expression: str) -> str:
    """A turn with one call, in the form of the quickstart's chat template."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


@dataclass(frozen=True)
class Scripted:
    """In place of the engine: each episode calls the tool in all turns but its last. hung: numbers of calls that hang.

    The call of turn t of episode e of n is number t x n + e.
    """

    tokenizer: Any
    tool: str
    turns: int
    episodes: int
    turn_s: float = 0.0
    hung: Collection[int] = ()

    @cached_property
    def _samples(self) -> dict[tuple[int, int], Sample]:
        return {at: self._sample(*at) for at in product(range(self.turns), range(self.episodes))}

    def prepare(self) -> None:
        """Make all answers, so that the bench does not time it."""
        assert len(self._samples) == self.turns * self.episodes

    async def turn(
        self,
        conversation: str,
        number: int,
        context_ids: Sequence[int],
        sampling: Sampling,
        place: int,
        rows: int,
    ) -> Sample:
        # A fixed spread of the seconds, so that not all turns end together.
        await asyncio.sleep(self.turn_s * (0.5 + (place * 0.618 + number * 0.382) % 1))
        sample = self._samples[number, place]
        row = replace(sample.only_row, prompt_ids=list(context_ids))
        return replace(sample, rows=(row,))

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    async def begin(self, conversation: str, prompt_tokens: int) -> None:
        """Every episode has a place at once."""

    async def complete(self, conversation: str, prompt_tokens: int, response_tokens: int) -> None:
        """Nothing is kept of an episode."""

    def _sample(self, number: int, place: int) -> Sample:
        text = self._text(number, place)
        ids = [
            *self.tokenizer(text, add_special_tokens=False)["input_ids"],
            self.tokenizer.eos_token_id,
        ]
        logp_T = np.full(len(ids), -1.0, np.float32)
        parts = (SamplePart(1, len(ids)),)
        row = Row.response((), np.asarray(ids, np.int64), logp_T, parts)
        return Sample((row,), text, finished=True)

    def _text(self, number: int, place: int) -> str:
        if number == self.turns - 1:
            return ANSWER
        is_hung = number * self.episodes + place in self.hung
        return call_text(self.tool, HANGS if is_hung else f"{place + 12}*{number + 34}")


class Lag:
    """How much later than asked for the event loop wakes a task, while `watch` runs."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def watch(self) -> None:
        while True:
            asked = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.seconds.append(max(0.0, time.perf_counter() - asked))

    def p99_ms(self) -> float:
        return 1e3 * float(np.quantile(self.seconds, 0.99)) if self.seconds else 0.0


class Bench:
    """Episodes of one tool with `workers` processes; to be closed."""

    def __init__(self, tool: str, workers: int, call_timeout_s: float = 10.0) -> None:
        self.tokenizer: Any = make_tokenizer(tools=True)
        self._tool = tool
        settings = EnvironmentSettings(
            tools=(tool,), workers=workers, call_timeout_s=call_timeout_s
        )
        self._thread = EnvironmentThread(settings)
        stop_ids, schemas = {self.tokenizer.eos_token_id}, self._thread.schemas
        self._turn_tokenizer = TurnTokenizer(self.tokenizer, stop_ids, schemas)
        self._calls = CallFormat.find(self.tokenizer, stop_ids, schemas)

    def close(self) -> None:
        self._thread.shutdown()

    def play(
        self, count: int, turns: int, *, turn_s: float = 0.0, hung: Collection[int] = ()
    ) -> Figures:
        """Seconds of `count` episodes that begin together, and of a turn of theirs.

        turn_ms: of the wall, over all turns. turn_cpu_ms: of this process, whose threads share a core's interpreter.
        """
        engine = Scripted(self.tokenizer, self._tool.partition(":")[2], turns, count, turn_s, hung)
        engine.prepare()
        gc.collect()
        gc.freeze()  # as an engine's process does when it has started
        config = EpisodeConfig(tools=(self._tool,), max_turns=turns, max_tokens=TURN_TOKENS * turns)
        episodes = EpisodeRunner(
            config, engine, self._thread, self._turn_tokenizer, self._calls, max_prompt_tokens=1024
        )
        prompt = Prompt(
            "row 1",
            QUESTION,
            tuple(self._turn_tokenizer.first(QUESTION)),
            "",
            {"prompt": QUESTION},
            QUESTION,
        )
        lag, began_cpu_s, began_s = Lag(), time.process_time(), time.perf_counter()
        played = asyncio.run(_together(episodes, prompt, count, lag))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        facts = [episode.sample.facts for episode in played if episode.sample.facts]
        total = sum(fact.turns for fact in facts)
        ends = {
            f"ends_{end}": float(number)
            for end, number in Counter(fact.end for fact in facts).items()
        }
        return {
            "turns": float(total),
            "wall_s": wall_s,
            "turn_ms": 1e3 * wall_s / total,
            "turn_cpu_ms": 1e3 * cpu_s / total,
            "lag_p99_ms": lag.p99_ms(),
            "call_errors": float(sum(fact.call_errors for fact in facts)),
            **ends,
        }


async def _together(
    episodes: EpisodeRunner, prompt: Prompt, count: int, lag: Lag
) -> list[EpisodeResult]:
    watch = asyncio.create_task(lag.watch())
    sampling = Sampling(count, TURN_TOKENS, stream=(1, 1))
    try:
        return await asyncio.gather(
            *(episodes.run(prompt, sampling, place) for place in range(count))
        )
    finally:
        watch.cancel()


def tokenising_against_rendering(turns: int, repeats: int) -> Figures:
    """Median milliseconds of what follows the call of the last turn: spliced, or all messages rendered and tokenised.

    tokens: of the whole conversation.
    """
    tokenizer: Any = make_tokenizer(tools=True)
    eos = tokenizer.eos_token_id
    turn_tokenizer = TurnTokenizer(tokenizer, {eos}, [_schema()])
    style, messages = turn_tokenizer.template.call_style, list[dict[str, Any]]([user(QUESTION)])
    for number in range(turns):
        call = style.call("calculate", {"expression": f"{number + 12}*34"}, 0)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": "calculate",
                "content": str(number * 34),
            }
        )
    result, template = (
        [ToolResult(messages[-1]["content"], "calculate", None)],
        turn_tokenizer.template,
    )

    def tokenised() -> list[int]:
        return turn_tokenizer.tool_results(result, after=eos)

    def rendered() -> list[int]:
        return template.ids(template.text(messages, prompt=True))

    assert rendered()[-len(tokenised()) :] == tokenised(), "both give the model the same tokens"
    tokenise_ms, render_ms = (_median_ms(work, repeats) for work in (tokenised, rendered))
    return {
        "tokens": float(len(rendered())),
        "tokenise_ms": tokenise_ms,
        "render_ms": render_ms,
        "ratio": render_ms / tokenise_ms,
    }


def _schema() -> Mapping[str, Any]:
    """Of the calculator, as far as the template shows it."""
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }
    return {
        "type": "function",
        "function": {"name": "calculate", "description": "", "parameters": parameters},
    }


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    work()  # what is computed once
    times_ms = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    return median(times_ms)


def hung_calls(
    count: int, turns: int, share: float, call_timeout_s: float, workers: int
) -> dict[str, Figures]:
    """A group of episodes without and with calls that hang, every 1 / share-th, and how much longer it takes.

    It is the time of the scripted group alone, not of a training step.
    """
    calls = count * (turns - 1)
    number = max(1, round(share * calls))
    hung = {place * calls // number for place in range(number)}
    bench = Bench(SLOW, workers, call_timeout_s)
    try:
        bench.play(workers, 2)  # the processes' first calls
        none, some = (bench.play(count, turns, hung=places) for places in ((), hung))
    finally:
        bench.close()
    some["hung"], some["ratio"] = float(number), some["wall_s"] / none["wall_s"]
    return {"no call hangs": none, f"{number} of {calls} calls hang": some}


def show(rows_by_part: Mapping[str, Mapping[str, Figures]]) -> None:
    """A table for each part."""
    for part, rows in rows_by_part.items():
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        print(f"\n{part}\n{'':28}", *(f"{name:>13}" for name in columns))
        for name, row in rows.items():
            print(f"{name:28}", *(f"{row.get(column, 0.0):13.4g}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument(
        "--turns", type=int, default=4, help="of each episode; all but the last have a call"
    )
    parser.add_argument(
        "--turn-s",
        type=float,
        default=0.0,
        help="seconds in which the scripted engine samples a turn",
    )
    parser.add_argument(
        "--conversations", type=int, nargs="+", default=[8, 32, 128], help="turns, for the splice"
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--group", type=int, default=128, help="episodes of the group some of whose calls hang"
    )
    parser.add_argument("--hung-share", type=float, default=0.01)
    parser.add_argument("--call-timeout-s", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: part, row, figure"
    )
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)  # of the processes that load the tools
    rows_by_part: dict[str, dict[str, Figures]] = {
        "tokenising": {
            f"{turns} turns": tokenising_against_rendering(turns, args.repeats)
            for turns in args.conversations
        }
    }
    bench = Bench(CALCULATOR, args.workers)
    try:
        bench.play(args.workers, 2)  # the processes' first calls
        rows_by_part["turns"] = {
            f"{count} episodes": bench.play(count, args.turns, turn_s=args.turn_s)
            for count in args.episodes
        }
    finally:
        bench.close()
    rows_by_part["hung"] = hung_calls(
        args.group, args.turns, args.hung_share, args.call_timeout_s, args.workers
    )
    print(json.dumps(rows_by_part)) if args.json else show(rows_by_part)


if __name__ == "__main__":
    main()
