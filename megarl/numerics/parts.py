"""What one rank has of an operation's output, and files of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

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

    @property
    def is_empty(self) -> bool:
        return not self.values_NF.size

    def loaded(self) -> OutputPart:
        return self


@dataclass(frozen=True, eq=False)
class StoredPart:
    """A part in a file, whose arrays are read anew by each `loaded`. shape: (N, F)."""

    layer: int
    operation: str
    rank: int
    shape: tuple[int, int]
    first_feature: int
    terms: Terms | None
    arrays: NpzFile
    number: int

    @property
    def end_feature(self) -> int:
        return self.first_feature + self.shape[1]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def loaded(self) -> OutputPart:
        return OutputPart(
            layer=self.layer,
            operation=self.operation,
            rank=self.rank,
            tokens_N=self.arrays[f"tokens_{self.number}"],
            values_NF=self.arrays[f"values_{self.number}"],
            first_feature=self.first_feature,
            terms=self.terms,
        )


AnyPart = OutputPart | StoredPart


def output_file(folder: Path, side: str, rank: int) -> Path:
    """Of one rank. side: TRAINING or ENGINE."""
    return folder / f"{side}-{rank}.npz"


def read_side(folder: Path, side: str) -> list[StoredPart]:
    """The parts of all ranks of a side whose files are in a folder."""
    return [part for file in sorted(folder.glob(f"{side}-*.npz")) for part in read_parts(file)]


def write_parts(path: Path, parts: Sequence[OutputPart]) -> None:
    """Into an .npz file: values_I and tokens_I of part I, and `parts`, the rest of all parts in JSON."""
    arrays: dict[str, np.ndarray] = {}
    facts = []
    for number, part in enumerate(parts):
        arrays[f"values_{number}"] = part.values_NF
        arrays[f"tokens_{number}"] = part.tokens_N
        shape = part.values_NF.shape
        facts.append([part.layer, part.operation, part.rank, shape, part.first_feature, part.terms])
    text = json.dumps(facts).encode()
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, parts=np.frombuffer(text, np.uint8), **arrays)


def read_parts(path: Path) -> list[StoredPart]:
    """What `write_parts` wrote, without the arrays, which would not fit into memory; the file stays open for them."""
    arrays = np.load(path, allow_pickle=False)
    facts = json.loads(arrays["parts"].tobytes())
    return [
        StoredPart(
            layer=layer,
            operation=operation,
            rank=rank,
            shape=tuple(shape),
            first_feature=first_feature,
            terms=tuple(terms) if terms else None,
            arrays=arrays,
            number=number,
        )
        for number, (layer, operation, rank, shape, first_feature, terms) in enumerate(facts)
    ]
