"""One rank of an auxiliary model: a critic or an implicit reward model, which learns together with the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.algos import hyperparameters_of
from megarl.algos.losses import LossResult
from megarl.algos.statistics import Statistics
from megarl.config import Recipe
from megarl.device import Address
from megarl.parallel import host_offload
from megarl.parallel.hf_config import read_model
from megarl.parallel.pipeline import Norms
from megarl.parallel.sequences import PackedRow, dealt, with_returns
from megarl.training import critic, implicit_reward
from megarl.training.batching import Key, Piece, Update, key_of, pieces_of, spread, train_sequences
from megarl.training.rank import MicroBatches, Received, TrainingRank, norms_of, refs_of
from megarl.types import Aggregation, FloatArray, Hyperparameters, SampleGroup, TrainSequence


@dataclass(frozen=True)
class AuxiliaryModel:
    """What one kind of auxiliary model computes and learns; name: for people; aggregation: of its loss.

    loss: (packed row, the pipeline's output for it, hyperparameters) -> loss sum and statistics.
    values: (its outputs, its reference's outputs, hyperparameters) -> token values, all an array for each sequence;
    None: the outputs are the token values. has_reference: its initial weights stay in host memory.
    returns: (sequences, old token values, token rewards if any, hyperparameters) -> the returns of each sequence.
    """

    name: str
    aggregation: Aggregation
    loss: Callable[[PackedRow, torch.Tensor, Hyperparameters], LossResult]
    values: Callable[[list[FloatArray], list[FloatArray], Hyperparameters], list[FloatArray]] | None = None
    returns: Callable[..., list[FloatArray]] | None = None
    has_reference: bool = False


AUXILIARY_MODELS = {  # by `Algorithm.critic`
    "values": AuxiliaryModel("critic", "token_mean", critic.loss, returns=critic.returns),
    "process_rewards": AuxiliaryModel(
        "implicit reward model",
        "sequence_mean",
        implicit_reward.loss,
        values=implicit_reward.process_rewards,
        has_reference=True,
    ),
}


@dataclass(frozen=True)
class ShareValues:
    """What a rank computed of its share of one update, an array for each sequence; None but on the last stage."""

    values: list[FloatArray] | None
    reference_logp: list[FloatArray] | None = None


class AuxiliaryRank(TrainingRank):
    """A rank of an auxiliary model on GPU slot first_gpu + rank. Raises as a TrainingRank.

    It begins with the weights of model.path: a classifier's, or a language model's with scores of 0.
    """

    def __init__(self, rank: int, recipe: Recipe, meet: Address, kind: str, first_gpu: int = 0) -> None:
        """kind: a key of AUXILIARY_MODELS."""
        self._auxiliary = AUXILIARY_MODELS[kind]
        self._hyperparameters = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
        path = recipe.model.path
        reference = path if self._auxiliary.has_reference else None
        shape = read_model(path, has_scores=kind == "values").shape
        super().__init__(rank, recipe, meet, shape, slot=first_gpu + rank, reference=reference)

    def values(
        self,
        updates: Sequence[Update],
        readers: Sequence[frozenset[Key]],
        group_ids: Sequence[int],
        *samples: SampleGroup,
    ) -> tuple[Piece | list[ShareValues], ...]:
        """The token values of this rank's samples, for each reader those of its own; last, all of them for `train`.

        readers: the samples of each data-parallel rank of the policy; none on ranks that do not report.
        """
        found = [self.values_of(share) for share in self._shares(updates, Received.of(group_ids, samples))]
        flat = [value_T for one in found for value_T in one.values or ()]
        return *pieces_of(refs_of(updates), flat if self._model.is_last_stage else None, readers), found

    def values_of(self, micro_batches: MicroBatches) -> ShareValues:
        """The token values of one update's share, aligned to the token that each is about (the first: 0)."""
        values, reference = self._token_outputs(micro_batches), None
        if self._reference:
            with host_offload.swapped_in(self.params(), self._reference):
                reference = self._token_outputs(micro_batches)
        if self._auxiliary.values and values is not None and reference is not None:
            values = self._auxiliary.values(values, reference, self._hyperparameters)
        return ShareValues(values, reference)

    def train(
        self,
        updates: Sequence[Update],
        lr: float,
        found: Sequence[ShareValues],
        group_ids: Sequence[int],
        *given: Any,
    ) -> list[Statistics]:
        """All optimizer updates of a step. Statistics of each as of `train_step`.

        found: of `values`, for the same updates. given: as of `Received`; the token values are the KL penalties of the
        policy's ranks, where an algorithm pays them in the reward.
        """
        received, statistics = Received.of(group_ids, given), []
        rewards_of, shares = received.token_values, self._shares(updates, received)
        for update, share, old in zip(updates, shares, found, strict=True):
            rewards = [spread(rewards_of[key_of(ref)], ref) for ref in refs_of([update])] if rewards_of else None
            statistics.append(self.train_step(share, old, norms_of(update), lr, rewards))
        return statistics

    def _shares(self, updates: Sequence[Update], received: Received) -> list[list[list[TrainSequence]]]:
        """This rank's sequences of each update."""
        aggregation = self._auxiliary.aggregation
        return [train_sequences(update.micro_batches[0], received.groups, aggregation) for update in updates]

    def train_step(
        self,
        micro_batches: MicroBatches,
        old: ShareValues,
        norms: Norms,
        lr: float,
        rewards: Sequence[FloatArray] | None = None,
    ) -> Statistics:
        """One update. old: of `values_of`, before the step's updates; rewards: of each token, if there are any.

        Returns grad_norm, and on the last stage the loss and its statistics over all data-parallel ranks. Raises
        FloatingPointError when the gradient is not finite.
        """
        returns, hyperparameters = None, self._hyperparameters
        if self._auxiliary.returns and old.values is not None:
            flat = [one for batch in micro_batches for one in batch]
            returns = self._auxiliary.returns(flat, old.values, rewards, hyperparameters)
        arrays = (dealt(one, micro_batches) for one in (old.reference_logp, returns, old.values))
        rows = [
            with_returns(self._pack(batch, reference_logp=reference_logp), *targets)
            for batch, reference_logp, *targets in zip(micro_batches, *arrays, strict=True)
        ]

        def loss(row: PackedRow, output_T: torch.Tensor, *_: torch.Tensor) -> LossResult:
            return self._auxiliary.loss(row, output_T, hyperparameters)

        return self._update(rows, loss, norms, lr)
