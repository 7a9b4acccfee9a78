"""What the controller asks of ranks, and what they return: one object for each call, which both sides know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megarl.numerics.parts import TRAINING, output_file
from megarl.training.batching import Key, TokenValues, Update
from megarl.types import IntArray, SampleGroup, TrainSequence
from megarl.types.remote import RemoteCall

State = TypeVar("State")


@dataclass(frozen=True)
class TokenValuesCall(RemoteCall):
    """Compute something of each token of a rank's share.

    updates: of a step; their micro_batches[0] are this data-parallel rank's. groups: by their number in the step.
    readers: the samples of each data-parallel rank that trains on the result; none on ranks that do not report.
    """

    algorithm: str
    updates: Sequence[Update]
    groups: Mapping[int, SampleGroup]
    readers: Sequence[frozenset[Key]] = ()


@dataclass(frozen=True)
class TokenValuesResult(Generic[State]):
    """by_reader: for each reader the values of its tokens. state: what the rank's own next call reuses."""

    by_reader: Sequence[TokenValues]
    state: State

    def __iter__(self) -> Iterator[Any]:
        """The parts, each of which gets a reference of its own, so that each moves alone."""
        return iter([*self.by_reader, self.state])


@dataclass(frozen=True)
class TrainCall(RemoteCall, Generic[State]):
    """All optimizer updates of a step.

    updates, groups: as of `TokenValuesCall`. state: of the rank's own call before, for the same updates. token_values:
    those that the ranks of another model computed for this rank's tokens, a piece from each.
    """

    algorithm: str
    updates: Sequence[Update]
    groups: Mapping[int, SampleGroup]
    lr: float
    state: State
    token_values: Sequence[TokenValues] = ()

    @property
    def values_by_sample(self) -> TokenValues:
        """The token values of all pieces; each sample is in one of them."""
        return {key: value_T for piece in self.token_values for key, value_T in piece.items()}


@dataclass(frozen=True)
class ScoreCall(RemoteCall):
    """Score all samples of these groups."""

    groups: Sequence[SampleGroup]


@dataclass(frozen=True)
class RecordLayersCall(RemoteCall):
    """Record the outputs of layers for one micro-batch, the same on all data-parallel ranks.

    folder: of the files, one of each rank. token_ids: of each sequence. experts: of each sequence [T, layers with
    experts, experts of a token], to be replayed; None: routers choose. num_terms: in which the sums over TP ranks are
    recorded, a multiple of those of both sides, so that the ranks can be told from each other.
    """

    folder: Path
    token_ids: Sequence[IntArray]
    experts: Sequence[np.ndarray] | None = None
    num_terms: int = 1

    def file(self, rank: int) -> Path:
        """Of one rank."""
        return output_file(self.folder, TRAINING, rank)

    def sequences(self, cp: int) -> list[TrainSequence]:
        """cp: data-parallel ranks that split the row, 1 where the layout's own do."""
        return [
            TrainSequence(
                token_ids_T=token_ids_T,
                loss_mask_T=np.zeros(len(token_ids_T), np.bool_),
                loss_weight_T=np.zeros(len(token_ids_T), np.float32),
                engine_logp_T=np.zeros(len(token_ids_T), np.float32),
                cp=cp,
                experts_TMK=self.experts[number] if self.experts else None,
            )
            for number, token_ids_T in enumerate(self.token_ids)
        ]
