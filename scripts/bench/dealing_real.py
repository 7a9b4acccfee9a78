"""scripts/bench/dealing.py on two real SGLang engines of a small model on CPU, with planted lengths."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.rollout.dealing import CompletedSample
from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.engine import Engine

ROOT = Path(__file__).parents[2]
ENGINES, GROUPS, SLOTS = 2, 2, 4  # SLOTS: sequences that a group runs at once
PROMPTS, SAMPLES = 16, 4
MEDIAN, SIGMA, LONGEST, PROMPT_TOKENS = 40, 0.8, 200, 12


def compare_real(kinds: Mapping[str, type[Any]], seeds: int) -> list[dict[str, dict[str, float]]]:
    """Every dealer on the same lengths and the same engines, after a first round that is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "scripts" / "make_tiny_moe.py", "--out", folder], check=True)
        limits = {"max_running_requests": GROUPS * SLOTS}
        common = {"model_path": folder, "tp": GROUPS, "ep": 1, "dp": GROUPS, "dtype": "float32", "sglang": limits}
        engines: list[Engine] = []
        try:
            for seed in range(ENGINES):
                settings = EngineSettings(**common, seed=seed, context_tokens=512, concurrency=GROUPS * SLOTS)
                engines.append(Engine(settings))
            return [_compare(engines, kinds, seed) for seed in range(-1, seeds)][1:]
        finally:
            for engine in engines:
                engine.shutdown()


def _compare(engines: Sequence[Engine], kinds: Mapping[str, type[Any]], seed: int) -> dict[str, dict[str, float]]:
    drawn = np.random.default_rng(abs(seed)).lognormal(np.log(MEDIAN), SIGMA, (PROMPTS, SAMPLES))
    lengths = drawn.clip(2, LONGEST).astype(int)
    longest_first = np.sort(lengths.ravel())[::-1].reshape(-1, 1)
    found = {name: asyncio.run(_round(engines, kind, lengths.tolist())) for name, kind in kinds.items()}
    found["known, longest first"] = asyncio.run(_round(engines, kinds["megarl"], longest_first.tolist()))
    return found


async def _round(engines: Sequence[Engine], kind: type[Any], lengths: Sequence[Sequence[int]]) -> dict[str, float]:
    """One round, dealt as megarl/fleet/sampling_round.py deals it, without Ray."""
    top = kind([engine.capacity for engine in engines], 2 * MEDIAN)
    for engine in engines:
        engine._manager.queue._dealer = kind([engine._host.server.group_capacity] * GROUPS, 2 * MEDIAN)
    began, waiting, running, ends = time.monotonic(), list(lengths), [], []
    tokens = np.zeros((len(engines), GROUPS))
    reports = {asyncio.ensure_future(engine.take_completed()): number for number, engine in enumerate(engines)}
    while len(ends) < sum(map(len, lengths)):
        while waiting and (number := top.deal(PROMPT_TOKENS, len(waiting[0]))) is not None:
            running.append(asyncio.ensure_future(_generate(engines[number], waiting.pop(0))))
        done, _ = await asyncio.wait(reports, return_when=asyncio.FIRST_COMPLETED)
        for report in done:
            number, finished = reports.pop(report), report.result()
            for sample in finished:
                _take(top, number, sample, tokens)
                ends.append(time.monotonic() - began)
            reports[asyncio.ensure_future(engines[number].take_completed())] = number
    await asyncio.gather(*running)
    for report in reports:
        report.cancel()
    await asyncio.gather(*reports, return_exceptions=True)
    tail = ends[-1] - ends[math.ceil(0.9 * len(ends)) - 1]
    return {"seconds": ends[-1], "tail_s": tail, "imbalance": float(tokens.max() / tokens.mean())}


def _take(dealer: Any, engine: int, sample: CompletedSample, tokens: np.ndarray) -> None:
    dealer.finish(engine, sample.prompt_tokens, sample.response_tokens)
    tokens[engine, sample.group] += sample.prompt_tokens + sample.response_tokens


async def _generate(engine: Engine, lengths: Sequence[int]) -> Any:
    """The samples of a prompt, each of its planted length."""
    work = engine._host.server.async_generate(
        input_ids=[[7] * PROMPT_TOKENS] * len(lengths),
        sampling_params=[{"max_new_tokens": length, "ignore_eos": True} for length in lengths],
    )
    return await engine._host.run(work)
