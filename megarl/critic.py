"""One rank of the critic: the values of all tokens, and steps towards the returns."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl import checkpoint, credit, device
from megarl.algos import rules_of
from megarl.algos.losses import value_loss
from megarl.batching import Key, Piece, Update, key_of, train_sequences
from megarl.config import Recipe
from megarl.parallel import groups, model
from megarl.parallel.hf_config import scorer_shape
from megarl.parallel.pipeline import Norms
from megarl.parallel.rank import RankModel, Saving
from megarl.parallel.sequences import PackedRow, dealt, pack, unpack, with_returns
from megarl.resharding import megatron_map
from megarl.snapshots import Digest
from megarl.types import FloatArray, Metrics, SampleGroup, TrainSequence

MicroBatches = Sequence[Sequence[TrainSequence]]


class Critic:
    """Rank `rank` of the critic's world, whose recipe this is. Every method but `params` is called on all together.

    It begins with the weights of model.path: a classifier's, or a language model's and scores of 0.
    """

    def __init__(
        self, rank: int, recipe: Recipe, store_port: int, first_gpu: int = 0, value_clip: float | None = None
    ) -> None:
        gc.freeze()  # as in a Trainer
        path = recipe.model.path
        self.rank, self.shape, self._value_clip = rank, scorer_shape(path), value_clip
        self._rules = rules_of(recipe.algorithm.name, recipe.algorithm)
        store = device.join_store(store_port, recipe.run.timeout_s)
        self._model = RankModel(rank, recipe, self.shape, store, slot=first_gpu + rank, is_published=False)
        self.layout = self._model.layout
        checkpoint.load_hf(
            path, megatron_map.shards(self.shape, self.layout, rank, model.TRANSFORMER_ENGINE), self.params()
        )
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
        """The values of this rank's share of a step's samples, a piece for each of those who want some.

        Pieces are empty but on one of the ranks that hold the same. For `train`, all of it is kept.
        """
        by_id = dict(zip(group_ids, samples, strict=True))
        shares = [train_sequences(update.micro_batches[0], by_id, "token_mean") for update in updates]
        self._step = [(update, share, self.values_of(share)) for update, share in zip(updates, shares, strict=True)]
        at = self._model.at
        found: Piece = {}
        for update, _, values in self._step:
            if values is not None and (at.tp, at.cp) == (0, 0):
                refs = [ref for batch in update.micro_batches[0] for ref in batch]
                own = zip(refs, values, strict=True)
                found |= {key_of(ref): value_T[-ref.response_length :] for ref, value_T in own}
        return tuple({key: found[key] for key in found.keys() & reader} for reader in readers)

    def values_of(self, micro_batches: MicroBatches) -> list[FloatArray] | None:
        """One array per sequence, in order: the value of the state before every token (the first: 0).

        None on all but the last pipeline stage.
        """

        def keep(row: PackedRow, value_T: torch.Tensor) -> tuple[torch.Tensor, list[FloatArray]]:
            return value_T.sum(), unpack(row, value_T)

        results = self._model.pipeline.run([self._pack(batch) for batch in micro_batches], keep)
        return [array for arrays in results for array in arrays] if self._model.is_last_stage else None

    def train(self, lr: float) -> list[Metrics]:
        """All optimizer updates of a step, on the samples of the last `values`. Metrics of each as of `train_step`."""
        found = []
        for update, share, values in self._step:
            norms = Norms(update.denominator, update.tokens, update.loss_tokens)
            found.append(self.train_step(share, values, norms, lr))
        self._step = []
        return found

    def train_step(
        self, micro_batches: MicroBatches, values: Sequence[FloatArray] | None, norms: Norms, lr: float
    ) -> Metrics:
        """One update towards the returns that old values and rewards make by GAE.

        values: as of `values_of`. Returns grad_norm, and on the last stage the loss and `value_loss`'s statistics over
        all data-parallel ranks. Raises FloatingPointError when the gradient is not finite.
        """
        returns = None
        if values is not None:
            flat = [one for batch in micro_batches for one in batch]
            given = self._rules.critic_lambda
            lam = self._rules.gae_lambda if given is None else given
            _, returns = credit.by_values(flat, values, gamma=self._rules.gamma, lam=lam)

        def apply_loss(row: PackedRow, value_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert row.returns is not None
            loss_sum, stats = value_loss(value_T, row.returns, value_clip=self._value_clip)
            return loss_sum, {"loss": loss_sum.detach() / norms.denominator, **stats}

        targets = zip(micro_batches, dealt(returns, micro_batches), dealt(values, micro_batches), strict=True)
        rows = [with_returns(self._pack(batch), *pair) for batch, *pair in targets]
        self._model.zero_grad()
        stats = self._model.pipeline.run(rows, apply_loss, norms=norms)
        grad_norm = self._model.step(lr)
        return {**(groups.reduced(stats) if self._model.is_last_stage else {}), "grad_norm": grad_norm}

    def _pack(self, batch: Sequence[TrainSequence]) -> PackedRow:
        return pack(batch, split=self._model.split, device=device.DEVICE)

    def save(self, folder: Path) -> None:
        """Begin to write this rank's part of a checkpoint into an empty folder; training may go on meanwhile."""
        self._saving = Saving(folder, self._model)

    def finish_save(self) -> dict[str, Digest]:
        """Wait until the files of all ranks are written; the digests of this rank's own."""
        return self._saving.finish()
