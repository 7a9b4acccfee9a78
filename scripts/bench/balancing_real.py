"""scripts/bench/balancing.py on two real SGLang engines of a small model on CPU, with planted lengths."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import EngineConfig
from megarl.placement.engine_layout import EngineLayout
from megarl.plan.engine_simulation import SimulatedRequest
from megarl.rollout.load_balancing import CompletedSample
from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.engine import Engine

ROOT = Path(__file__).parents[2]
ENGINES, GROUPS, SLOTS = 2, 2, 4  # SLOTS: sequences that a group runs at once
PROMPTS, SAMPLES = 16, 4
MEDIAN, SIGMA, LONGEST, PROMPT_TOKENS = 40, 0.8, 200, 12

# the samples of each prompt, with their planted lengths
Prompts = Sequence[Sequence[SimulatedRequest]]


def compare_real(kinds: Mapping[str, type[Any]], seeds: int) -> list[dict[str, dict[str, float]]]:
    """Every dealer on the same lengths and the same engines, after a first round that is not counted."""
    with cpu_engines(ENGINES, GROUPS, SLOTS, context_tokens=512) as engines:
        return [_compare(engines, kinds, seed) for seed in range(-1, seeds)][1:]


@contextmanager
def cpu_engines(
    count: int, groups: int, slots: int, context_tokens: int, **sglang: Any
) -> Iterator[list[Engine]]:
    """Engines of the quickstart's model. slots: sequences that a group runs at once. sglang: server arguments."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, ROOT / "scripts" / "make_tiny_moe.py", "--out", folder], check=True
        )
        limits = {"max_running_requests": groups * slots, **sglang}
        common: dict[str, Any] = {
            "model_path": folder,
            "layout": EngineLayout(1, groups, 1, dp=groups),
            "dtype": "float32",
        }
        common |= {
            "context_tokens": context_tokens,
            "concurrency": groups * slots,
            "engine": EngineConfig(sglang=limits),
        }
        engines: list[Engine] = []
        try:
            for seed in range(count):
                engines.append(Engine(EngineSettings(**common, seed=seed)))
            yield engines
        finally:
            for engine in engines:
                engine.shutdown()


def _compare(
    engines: Sequence[Engine], kinds: Mapping[str, type[Any]], seed: int
) -> dict[str, dict[str, float]]:
    drawn = np.random.default_rng(abs(seed)).lognormal(np.log(MEDIAN), SIGMA, (PROMPTS, SAMPLES))
    prompts = [
        planted_prompt(PROMPT_TOKENS, lengths) for lengths in drawn.clip(2, LONGEST).astype(int)
    ]
    ordered = sorted(
        (sample for prompt in prompts for sample in prompt),
        key=lambda sample: -sample.response_tokens,
    )
    figures_by_name = {name: _figures(engines, kind, prompts) for name, kind in kinds.items()}
    figures_by_name["known, longest first"] = _figures(
        engines, kinds["megarl"], [[sample] for sample in ordered]
    )
    return figures_by_name


def planted_prompt(prompt_tokens: int, lengths: Iterable[int]) -> list[SimulatedRequest]:
    """Samples of a prompt, of these lengths."""
    return [SimulatedRequest(prompt_tokens, int(length)) for length in lengths]


def _figures(engines: Sequence[Engine], kind: type[Any], prompts: Prompts) -> dict[str, float]:
    ended, tokens = asyncio.run(sampled_phase(engines, kind, prompts, 2 * MEDIAN))
    ends = [end_s for end_s, _ in ended]
    tail = ends[-1] - ends[math.ceil(0.9 * len(ends)) - 1]
    return {"seconds": ends[-1], "tail_s": tail, "imbalance": float(tokens.max() / tokens.mean())}


async def sampled_phase(
    engines: Sequence[Engine], kind: type[Any], prompts: Prompts, longest: int
) -> tuple[list[tuple[float, CompletedSample]], np.ndarray]:
    """One round, dealt as megarl/fleet/sampling_phase.py deals it, without Ray.

    Returns (the seconds at which each sample was done, [engines, groups] tokens of prompts and responses).
    """
    top = kind([engine.capacity for engine in engines], longest)
    groups = engines[0]._settings.layout.dp
    for engine in engines:
        engine._manager.queue._balancer = kind(
            [engine._host.server.group_capacity] * groups, longest
        )
    began, waiting, running, ends = time.monotonic(), list(prompts), [], []
    tokens, unfinished = np.zeros((len(engines), groups)), [0] * len(engines)
    reports: dict[asyncio.Future[list[CompletedSample]], int] = {}

    def send() -> None:
        while (
            waiting
            and (number := top.assign(waiting[0][0].prompt_tokens, len(waiting[0]))) is not None
        ):
            unfinished[number] += len(waiting[0])
            running.append(asyncio.ensure_future(_generate(engines[number], waiting.pop(0))))
        for number in set(range(len(engines))) - {*reports.values()}:
            if unfinished[number]:  # so that no call is open when the round ends
                reports[asyncio.ensure_future(engines[number].take_completed())] = number

    send()
    while reports:
        done, _ = await asyncio.wait(reports, return_when=asyncio.FIRST_COMPLETED)
        for report in done:
            number, finished = reports.pop(report), report.result()
            unfinished[number] -= len(finished)
            for sample in finished:
                _take(top, number, sample, tokens)
                ends.append((time.monotonic() - began, sample))
        send()
    await asyncio.gather(*running)
    return ends, tokens


def _take(balancer: Any, engine: int, sample: CompletedSample, tokens: np.ndarray) -> None:
    balancer.finish(engine, sample.prompt_tokens, sample.response_tokens)
    tokens[engine, sample.group] += sample.prompt_tokens + sample.response_tokens


async def _generate(engine: Engine, samples: Sequence[SimulatedRequest]) -> Any:
    """The samples of a prompt, each of its planted length."""
    work = engine._host.server.async_generate(
        input_ids=[[7] * sample.prompt_tokens for sample in samples],
        sampling_params=[
            {"max_new_tokens": sample.response_tokens, "ignore_eos": True} for sample in samples
        ],
    )
    return await engine._host.run(work)
