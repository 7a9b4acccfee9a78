"""Outputs of layers in real Megatron worlds against those of one rank: clean, and with errors that are planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megarl.numerics import operations
from megarl.numerics.differences import Difference, compare, first_difference
from megarl.numerics.parts import OutputPart, read_parts
from megarl.placement.train_layout import TrainLayout
from megarl.types import IntArray
from tests.parallel import checkpoints
from tests.parallel.precision import dtype
from tests.parallel.worlds import recipe, run_world

pytestmark = pytest.mark.slow

VOCAB_SIZE = 200
ONE_RANK = TrainLayout(1, 1, 1, 1)
LENGTHS = (3, 12, 1, 8)


class Fault(NamedTuple):
    """A planted error: in the weight of a rank whose name ends so, and what is to be named."""

    weight: str
    rank: int
    layer: int
    operation: str
    ranks: tuple[int, ...]
    deviating: tuple[int, ...] = ()


def sequences() -> list[IntArray]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, VOCAB_SIZE, length) for length in LENGTHS]


def record(trainer: Any, folder: Path, faults: Mapping[str, tuple[str, int]]) -> None:
    """Without an error into `clean`, then with each into a folder of its name."""
    from megarl.training.calls import RecordLayersCall

    trainer.record_layers(RecordLayersCall(folder / "clean", sequences()))
    for name, (weight, rank) in faults.items():
        params = trainer.params()
        (found,) = [params[key] for key in params if key.endswith(weight)] or [torch.zeros(())]
        kept = found.clone()
        if trainer.rank == rank:
            assert found.dim()
            # a row alone, which a mean over everything would hide
            found[0] *= 1.5
        trainer.record_layers(RecordLayersCall(folder / name, sequences()))
        found.copy_(kept)


def recorded(
    path: Path, folder: Path, layout: TrainLayout, faults: Mapping[str, tuple[str, int]]
) -> Callable[[str], list[OutputPart]]:
    for name in ("clean", *faults):
        (folder / name).mkdir(parents=True)
    run_world(recipe(path, layout), record, folder, faults)

    def parts(name: str) -> list[OutputPart]:
        files = sorted((folder / name).iterdir())
        assert len(files) == layout.world_size
        return [part for file in files for part in read_parts(file)]

    return parts
