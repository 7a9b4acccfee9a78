"""Folders of runs, written as a run writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.printable import json_line
from megarl.report.page import page
from megarl.report.run_data import run_data
from megarl.report.run_files import read_run
from megarl.tracking.metrics import rollout_metrics
from megarl.tracking.run_log import RunLog
from megarl.types import EpisodeFacts, TranscriptEntry
from tests.tracking.test_metrics import group
from tests.tracking.test_run_log import UNTRACKED, quiet, recipe_in

FACTS = EpisodeFacts(2, 1, 0, 0.1, "answered", 5)
SAMPLE: dict[str, Any] = {
    "step": 1, "group": 0, "sample": 0, "prompt": "1+1=", "answer": "2", "response": "2", "reward": 1.0,
    "advantage": 0.5, "correct": True, "length": 2, "finished": True, "version": 0,
}  # fmt: skip

TOKENS = {
    "token_ids": [9, 1], "engine_logp": [-1.0, -0.5], "trainer_logp": [-1.25, -0.5], "trained": [1, 1],
    "parts": [[0, 1], [1, 2]],
}  # fmt: skip


def episode(text: str) -> tuple[TranscriptEntry, ...]:
    """Two turns with a call, in all of which is the text."""
    call = {"name": text, "arguments": {"x": text}, "result": text, "error": text}
    return (
        {"role": "assistant", "text": text, "calls": [call], "reward": 0.5},  # type: ignore[list-item]
        {"role": "user", "text": text, "calls": [], "reward": 0.0},
    )


def a_run(folder: Path, *overrides: str, text: str = "p", steps: int = 4) -> Path:
    """The folder of a run of some steps. text: the prompts, and what the episodes of the last step say."""
    with RunLog(recipe_in(folder, UNTRACKED, f"run.steps={steps}", *overrides), quiet()) as log:
        with log.start() as record, record.phase("eval"):
            record.add({"eval/accuracy": 0.0, "reshard/wire_bytes": 8e6})
        for step in range(1, steps + 1):
            with log.step(step) as record:
                with record.phase("rollout"):
                    groups = [group(text, [1.0, 0.0], [2, 3])]
                with record.phase("train"):
                    record.add(rollout_metrics(groups, compares_samples=True))
                record.add(
                    {"rollout/logprob_diff_mean": 1e-7, "rollout/logprob_diff_max": step * 1e-6}
                )
                record.add(
                    {"train/entropy": 1 / step, "train/grad_norm": 1.0, "stale/share_0": 1.0}
                )
                record.add({"memory/before_train_bytes": 2**30, "memory/after_train_bytes": 2**31})
                experts = {f"experts/busiest_layer_{layer}": 1.0 + layer for layer in range(12)}
                record.add({"experts/busiest": 12.0, "experts/unused": 0.0} | experts)
                record.add({"reshard/wire_bytes": 8e6, "reshard/local_bytes": 4e6})
                if step == steps:
                    transcripts = (episode(text), episode(text))
                    groups = [replace(groups[0], facts=(FACTS, FACTS), transcripts=transcripts)]
                record.samples(groups)
                record.learnt_from({(0, 0): 0.5, (0, 1): -0.5})
                record.tokens({(0, 0, 0): TOKENS})
    return log.folder


def add_samples(folder: Path, count: int) -> None:
    """Write further samples into a run's folder, evenly over 1,000 steps."""
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        for number in range(count):
            words = f"number {number} " + "and a rather long response " * 20
            of_step = {"step": 1 + number * 1000 // count, "group": number, "response": words}
            reward = {"reward": (number % 10) / 10, "length": 10 + number % 500}
            file.write(json_line(SAMPLE | of_step | reward) + "\n")


def add_record(folder: Path, record: dict[str, float]) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def page_of(*folders: Path, out: Path) -> Path:
    """The page of some runs, written to `out`."""
    runs = [run_data(read_run(folder)) for folder in folders]
    out.write_text(page(runs), encoding="utf-8")
    return out
