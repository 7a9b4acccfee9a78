"""The tokens with which a run's training ranks and engines are compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megarl.config import Recipe
from megarl.model.tokenizer import load_tokenizer
from megarl.printable import Say
from megarl.samples.parquet import open_samples
from megarl.types import IntArray, UserError

_SEED = 20
_FEWEST_SEQUENCES = 4


def compared_tokens(
    *,
    recipe: Recipe,
    run: Path,
    samples: Path | None,
    step: int | None,
    weights_step: int,
    num_tokens: int,
    vocab_size: int,
    say: Say,
) -> list[IntArray]:
    """Tokens of the run's own samples, else random ones; each sequence has at most a quarter of all.

    samples: a file in place of the run's samples.jsonl; of it the samples of `step`, None: of its newest step. Raises
    UserError for a file that is none, or has no such step. weights_step: of the checkpoint whose weights compute, 0 for
    those that the run began with; of samples.jsonl the samples of this step are taken, or of the newest before it.
    """
    longest = max(num_tokens // _FEWEST_SEQUENCES, 2)
    if samples:
        found = _of_file(samples, step)
        source = str(samples)
    else:
        found, source = _of_log(recipe, run / "samples.jsonl", weights_step)
    if not found:
        rng = np.random.default_rng(_SEED)
        found = [rng.integers(0, vocab_size, longest) for _ in range(_FEWEST_SEQUENCES)]
        source = f"random tokens, as {source}"
    cut = []
    room = num_tokens
    for token_ids_T in found:
        kept_T = np.asarray(token_ids_T, np.int64)[: min(longest, room)]
        room -= len(kept_T)
        if len(kept_T):
            cut.append(kept_T)
    say(f"{sum(map(len, cut))} tokens in {len(cut)} sequences, from {source}")
    return cut


def _of_file(path: Path, step: int | None) -> list[IntArray]:
    """Raises UserError where there is none, or none of the step."""
    file = open_samples(path)
    number = step or file.num_steps
    if number > file.num_steps:
        raise UserError(
            "--samples",
            f"{path} has {file.num_steps} steps, and none {number}",
            "name another file",
        )
    return [
        np.concatenate([np.asarray(row.prompt_ids, np.int64), row.response_ids_T])
        for group in file.groups(number)
        for row in group.samples[0].rows[:1]
    ]


def _of_log(recipe: Recipe, path: Path, weights_step: int) -> tuple[list[IntArray], str]:
    """The texts of a run's samples, tokenised, and where they are from; without any: why there are none.

    Those of the step of the weights, or of the newest before it; for step 0, whose weights sampled the first step, of
    the first that has some.
    """
    if not path.is_file():
        return [], "the run has no samples"
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    if not lines:
        return [], "samples.jsonl has none"
    steps = {line["step"] for line in lines}
    if weights_step == 0:
        step = min(steps)
    else:
        step = max((step for step in steps if step <= weights_step), default=0)
    if step not in steps:
        return [], f"samples.jsonl has none of step {weights_step}, nor of one before it"
    texts = [
        f"{line.get('prompt', '')}{line.get('response', '')}"
        for line in lines
        if line["step"] == step
    ]
    tokenizer = load_tokenizer(recipe.model.path)
    found = [np.asarray(tokenizer(text)["input_ids"], np.int64) for text in texts if text]
    return found, f"step {step} of samples.jsonl"
