"""What one rank has of an operation's output, and files of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.types import FloatArray, IntArray

Terms = tuple[int, int, int]
TRAINING = "training"
ENGINE = "engine"


@dataclass(frozen=True, eq=False)
class OutputPart:
    """N tokens and F features of an output.

    layer: from 0, or BEFORE_LAYERS or AFTER_LAYERS. tokens_N: their numbers in the micro-batch. first_feature: the
    number of the first of the F in the whole output. terms (first, end, count): the values are the sum of so many of
    the terms that make up the output, as the ranks of a row-parallel layer have them; None: they are the output.
    """

    layer: int
    operation: str
    rank: int
    tokens_N: IntArray
    values_NF: FloatArray
    first_feature: int = 0
    terms: Terms | None = None

    @property
    def end_feature(self) -> int:
        return self.first_feature + self.values_NF.shape[1]


def output_file(folder: Path, side: str, rank: int) -> Path:
    """Of one rank. side: TRAINING or ENGINE."""
    return folder / f"{side}-{rank}.npz"


def read_side(folder: Path, side: str) -> list[OutputPart]:
    """The parts of all ranks of a side whose files are in a folder."""
    return [part for file in sorted(folder.glob(f"{side}-*.npz")) for part in read_parts(file)]


def write_parts(path: Path, parts: Sequence[OutputPart]) -> None:
    """Into an .npz file: values_I and tokens_I of part I, and `parts`, the rest of all parts in JSON."""
    arrays: dict[str, np.ndarray] = {}
    facts = []
    for number, part in enumerate(parts):
        arrays[f"values_{number}"] = part.values_NF
        arrays[f"tokens_{number}"] = part.tokens_N
        facts.append([part.layer, part.operation, part.rank, part.first_feature, part.terms])
    text = json.dumps(facts).encode()
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, parts=np.frombuffer(text, np.uint8), **arrays)


def read_parts(path: Path) -> list[OutputPart]:
    """What `write_parts` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        facts = json.loads(arrays["parts"].tobytes())
        return [
            OutputPart(
                layer=layer,
                operation=operation,
                rank=rank,
                tokens_N=arrays[f"tokens_{number}"],
                values_NF=arrays[f"values_{number}"],
                first_feature=first_feature,
                terms=tuple(terms) if terms else None,
            )
            for number, (layer, operation, rank, first_feature, terms) in enumerate(facts)
        ]
