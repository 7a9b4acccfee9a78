"""A run as the JSON object that the page's program reads."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from megarl.algos import ALGORITHMS
from megarl.report.planned import Planned
from megarl.report.recipe_rows import recipe_rows
from megarl.report.run_files import FolderContents, columns
from megarl.report.sample_file import FileSamples
from megarl.report.token_texts import TokenTexts
from megarl.tracking.health import Health
from megarl.tracking.secrets import redacted, without_secrets
from megarl.types.json_objects import JsonObject


def run_data(
    run: FolderContents,
    planned_figures: Planned | None = None,
    file_samples: FileSamples | None = None,
) -> JsonObject:
    """One run for the page. planned_figures: what follows from its recipe alone; None: that is left out.

    file_samples: samples that are shown in place of those of samples.jsonl.

    metrics: by name, a number or null for each record. samples: lines of samples.jsonl, whose episodes are flat.
    losses: null where they cannot be read. slots, minimum_wire_bytes, planned_memory: as of `Planned`. signs: lines
    that say how the run looks sick.
    """
    recipe = run.recipe
    planned_figures = planned_figures or Planned()
    if file_samples is None:
        file_samples = _logged_samples(run)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": recipe.run.steps if recipe else None,
        "signs": _signs(run),
        "notes": [
            redacted(note) for note in run.notes + planned_figures.notes + file_samples.notes
        ],
        "metrics": columns(run.records),
        "samples": file_samples.samples,
        "expert_load": file_samples.expert_load,
        "losses": None
        if run.losses is None
        else [without_secrets(asdict(loss)) for loss in run.losses],
        "recipe": [asdict(row) | {"differs": row.differs} for row in recipe_rows(recipe)]
        if recipe
        else [],
        "recipe_text": redacted(run.recipe_text),
        "slots": planned_figures.slots,
        "minimum_wire_bytes": planned_figures.minimum_wire_bytes,
        "planned_memory": planned_figures.memory,
    }


def _signs(run: FolderContents) -> list[str]:
    """What the terminal said while the run went on."""
    if run.recipe is None or run.recipe.algorithm.name not in ALGORITHMS:
        return []
    algorithm = ALGORITHMS[run.recipe.algorithm.name]
    health = Health(algorithm.learns_from_rewards)
    signs: list[str] = []
    for record in run.records:
        numbers = {name: math.nan if value is None else value for name, value in record.items()}
        health, new_signs = health.after(numbers)
        signs += new_signs
    return signs


def _logged_samples(run: FolderContents) -> FileSamples:
    """The lines of samples.jsonl."""
    texts = None
    if run.recipe and any(sample.get("rows") for sample in run.samples):
        texts = TokenTexts(run.recipe.model.path)
    samples = [_sample(sample, texts) for sample in run.samples]
    return FileSamples(samples=samples, notes=texts.notes if texts else [])


def _sample(sample: JsonObject, texts: TokenTexts | None) -> JsonObject:
    """A line of samples.jsonl; what it has of an episode stands beside the rest, and tokens have their texts."""
    flat = {name: value for name, value in sample.items() if name not in ("episode", "rows")}
    if texts:
        flat["rows"] = [_row(row, texts) for row in sample.get("rows", ())]
    episode: Any = sample.get("episode")
    if not isinstance(episode, dict):
        return flat
    return episode | flat


def _row(row: JsonObject, texts: TokenTexts) -> JsonObject:
    """As of `file_samples`, with the trainer's log-probabilities."""
    return {
        "tokens": texts.of(row["token_ids"]),
        "logp": row["engine_logp"],
        "trainer_logp": row["trainer_logp"],
        "trained": row["trained"],
        "parts": row["parts"],
    }
