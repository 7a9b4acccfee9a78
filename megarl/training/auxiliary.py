"""One rank of a model that learns beside the policy and says something of every token of its samples."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl import device
from megarl.algos import hyperparameters_of
from megarl.algos.statistics import GRAD_NORM, Statistics
from megarl.checkpoints import hf_import
from megarl.checkpoints.rank_files import RankFiles
from megarl.checkpoints.snapshots import Digest
from megarl.config import Recipe
from megarl.parallel import groups, model
from megarl.parallel.pipeline import Norms
from megarl.parallel.rank_model import RankModel
from megarl.parallel.sequences import PackedRow, pack
from megarl.resharding import megatron_map
from megarl.training.batching import Key, Piece, SampleRef, Update, key_of, pieces_of, spread, train_sequences
from megarl.types import Aggregation, FloatArray, ModelShape, SampleGroup, TrainSequence

MicroBatches = Sequence[Sequence[TrainSequence]]


class AuxiliaryRank(ABC):
    """Rank `rank` of a world whose recipe this is. Every method but `params` is called on all ranks together.

    It begins with the weights of model.path. aggregation: what its loss is the mean of.
    """

    aggregation: Aggregation

    def __init__(self, rank: int, recipe: Recipe, meet: device.Address, shape: ModelShape, first_gpu: int) -> None:
        gc.freeze()  # as in a PolicyRank
        self.rank, self.shape = rank, shape
        self._rules = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
        store = device.join_store(meet, recipe.run.timeout_s)
        self._model = RankModel(rank, recipe, shape, store, slot=first_gpu + rank, is_published=False)
        self.layout = self._model.layout
        self._shards = megatron_map.shards(shape, self.layout, rank, model.TRANSFORMER_ENGINE)
        hf_import.load_hf(recipe.model.path, self._shards, self.params())
        self._model.make_optimizer()
        self.offload, self.onload, self.held_bytes = self._model.offload, self._model.onload, device.held_bytes
        self.load = self._model.load

    def params(self) -> dict[str, torch.Tensor]:
        """This rank's weights by the map's names."""
        return self._model.params()

    def values(
        self,
        updates: Sequence[Update],
        readers: Sequence[frozenset[Key]],
        group_ids: Sequence[int],
        *samples: SampleGroup,
    ) -> tuple[Piece, ...]:
        """What it says of this rank's share of a step's samples, a piece for each of those who want some.

        Pieces are empty but on one of the ranks that hold the same. For `train`, all of it is kept.
        """
        by_id = dict(zip(group_ids, samples, strict=True))
        shares = [train_sequences(update.micro_batches[0], by_id, self.aggregation) for update in updates]
        self._step = [(update, share, self.values_of(share)) for update, share in zip(updates, shares, strict=True)]
        refs = [ref for update in updates for ref in _refs(update)]
        said = [value_T for _, _, values in self._step for value_T in values or ()]
        return pieces_of(refs, said if self._model.is_reporting_rank else None, readers)

    @abstractmethod
    def values_of(self, micro_batches: MicroBatches) -> list[FloatArray] | None:
        """One array per sequence, in order: what it says of every token (the first: 0).

        None on all but the last pipeline stage.
        """

    def train(self, lr: float, *pieces: Piece) -> list[Statistics]:
        """All optimizer updates of a step, on the samples of the last `values`. Metrics of each as of `train_step`.

        pieces: the responses' tokens' own rewards, where they have some.
        """
        found, rewards = [], {key: value_T for piece in pieces for key, value_T in piece.items()}
        for update, share, values in self._step:
            norms = Norms(update.denominator, update.tokens, update.loss_tokens)
            refs = _refs(update)
            own = [spread(rewards[key_of(ref)], ref) for ref in refs] if rewards else None
            found.append(self.train_step(share, values, norms, lr, own))
        self._step = []
        return found

    @abstractmethod
    def train_step(
        self,
        micro_batches: MicroBatches,
        values: Sequence[FloatArray] | None,
        norms: Norms,
        lr: float,
        rewards: Sequence[FloatArray] | None = None,
    ) -> Statistics:
        """One update. values: as of `values_of`; rewards: of each token, where they have some.

        Returns grad_norm, and on the last stage the loss and its statistics over all data-parallel ranks. Raises
        FloatingPointError when the gradient is not finite.
        """

    def _update(self, rows: Sequence[PackedRow], loss: Callable[..., Any], norms: Norms, lr: float) -> Statistics:
        """One optimizer update by the pipeline's loss of each row; what `train_step` returns."""
        self._model.zero_grad()
        stats = self._model.pipeline.run(rows, loss, norms=norms)
        grad_norm = self._model.step(lr)
        return {**(groups.reduced(stats) if self._model.is_last_stage else {}), GRAD_NORM: (grad_norm,)}

    def _pack(
        self, batch: Sequence[TrainSequence], reference_logp: Sequence[FloatArray] | None = None
    ) -> PackedRow:
        return pack(batch, split=self._model.split, device=device.DEVICE, reference_logp=reference_logp)

    def save(self, folder: Path) -> None:
        """Begin to write this rank's part of a checkpoint into an empty folder; training may go on meanwhile."""
        self._saving = RankFiles(folder, self._model)

    def finish_save(self) -> dict[str, Digest]:
        """Wait until the files of all ranks are written; the digests of this rank's own."""
        return self._saving.finish()


def _refs(update: Update) -> list[SampleRef]:
    """Every sample of this rank's share, in order."""
    return [ref for batch in update.micro_batches[0] for ref in batch]
