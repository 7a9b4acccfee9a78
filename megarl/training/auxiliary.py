"""One rank of an auxiliary model, which learns together with the policy: a critic or an implicit reward model.

The critic's score of the state before each token is learnt from the returns. Of PRIME's implicit reward model (arXiv
2502.01456) the log-ratio to its initial weights rewards each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.algos import AUXILIARY_MODELS, hyperparameters_of
from megarl.algos.losses import LossResult, outcome_loss, value_loss
from megarl.algos.statistics import Statistics
from megarl.device import Address
from megarl.parallel import host_offload
from megarl.parallel.packing import PackedRow
from megarl.parallel.pipeline import Norms
from megarl.placement.roles import Role
from megarl.training import credit
from megarl.training.batching import (
    Update,
    key_of,
    refs_of,
    spread,
    values_by_reader,
)
from megarl.training.calls import TokenValuesCall, TokenValuesResult, TrainCall
from megarl.training.rank import MicroBatches, TrainingRank, norms_of
from megarl.training.train_sequences import train_sequences
from megarl.types import FloatArray, Hyperparameters, SampleGroup, TrainSequence
from megarl.types.arrays import TokenArrays


@dataclass(frozen=True)
class ShareValues:
    """What a rank computed of its share of one update, an array for each sequence; None but on the last stage.

    reference_logp: by the initial weights of an implicit reward model.
    """

    values: list[FloatArray] | None
    reference_logp: list[FloatArray] | None = None


class AuxiliaryRank(TrainingRank):
    """A rank of an auxiliary model. Raises as a TrainingRank.

    It begins with the weights of model.path: a classifier's, or a language model's with scores of 0. With `lora` it
    computes with the policy's frozen weights, once `share` has named them.
    """

    def __init__(self, rank: int, role: Role, meet: Address, kind: str) -> None:
        """kind: a key of AUXILIARY_MODELS."""
        recipe = role.recipe
        self._kind = AUXILIARY_MODELS[kind]
        self._hyperparameters = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
        reference = None if self._kind.has_scores else recipe.model.path
        super().__init__(rank, role, meet, reference=reference)

    def values(self, call: TokenValuesCall) -> TokenValuesResult[list[ShareValues]]:
        """The token values of this rank's samples, for each reader those of its own; the state has all, for `train`.

        The readers are the ranks of the policy.
        """
        shares = self.values_of(self._shares(call.updates, call.groups))
        values = None
        if self._model.is_last_stage:
            values = [value_T for share in shares for value_T in share.values or ()]
        dp_rank = self._model.at.dp
        by_reader = values_by_reader(refs_of(call.updates), values, call.readers, dp_rank)
        return TokenValuesResult(by_reader, shares)

    def values_of(self, shares: Sequence[MicroBatches]) -> list[ShareValues]:
        """The token values of each update's share, aligned to the token that each is about (the first: 0)."""
        values = self.outputs_by_share(shares)
        if self._kind.has_scores:
            return [ShareValues(own) for own in values]
        with host_offload.swapped_in(self.params(), self._reference):
            reference = self.outputs_by_share(shares)
        return [self._rewards(*pair) for pair in zip(values, reference, strict=True)]

    def _rewards(
        self, values: list[FloatArray] | None, reference: list[FloatArray] | None
    ) -> ShareValues:
        """The process rewards of an implicit reward model."""
        if values is None or reference is None:
            return ShareValues(None)
        beta = self._hyperparameters.prime_beta
        pairs = zip(values, reference, strict=True)
        return ShareValues(
            [beta * (own_T - reference_T) for own_T, reference_T in pairs], reference
        )

    def train(self, call: TrainCall[list[ShareValues]]) -> list[Statistics]:
        """All optimizer updates of a step. Statistics of each as of `train_step`.

        The state is that of `values`, for the same updates. The token values are the KL penalties of the policy's
        ranks, where an algorithm pays them in the reward.
        """
        statistics = []
        penalties = call.values_by_sample
        shares = self._shares(call.updates, call.groups)
        for update, share, old in zip(call.updates, shares, call.state, strict=True):
            rewards = None
            if penalties:
                rewards = [spread(penalties[key_of(ref)], ref) for ref in refs_of([update])]
            statistics.append(self.train_step(share, old, norms_of(update), call.lr, rewards))
        return statistics

    def _shares(
        self, updates: Sequence[Update], groups: Mapping[int, SampleGroup]
    ) -> list[list[list[TrainSequence]]]:
        """This rank's sequences of each update."""
        aggregation = self._kind.aggregation
        return [train_sequences(update.micro_batches[0], groups, aggregation) for update in updates]

    def train_step(
        self,
        micro_batches: MicroBatches,
        old: ShareValues,
        norms: Norms,
        lr: float,
        rewards: TokenArrays | None = None,
    ) -> Statistics:
        """One update. old: of `values_of`, before the step's updates; rewards: of each token, if there are any.

        Returns grad_norm, and on the last stage the loss and its statistics over all data-parallel ranks. Raises
        SilentFault as the guard of updates.
        """
        hyperparameters = self._hyperparameters
        has_scores = self._kind.has_scores
        returns = None
        old_values = old.values if has_scores else None
        if old_values is not None:
            flat = [sequence for batch in micro_batches for sequence in batch]
            returns = critic_returns(flat, old_values, rewards, hyperparameters)

        def loss(row: PackedRow, output_T: Tensor, *_: Tensor) -> LossResult:
            if has_scores:
                return value_loss(output_T, row.targets, value_clip=hyperparameters.value_clip)
            return outcome_loss(output_T, row.targets, beta=hyperparameters.prime_beta)

        rows = self._rows(micro_batches, None, old.reference_logp, returns, old_values)
        statistics, _ = self._update(rows, loss, norms, lr)
        return statistics


def critic_returns(
    sequences: Sequence[TrainSequence],
    old_values: TokenArrays,
    rewards: TokenArrays | None,
    hyperparameters: Hyperparameters,
) -> list[FloatArray]:
    """By GAE, of the values before the step's updates. rewards: KL penalty of each token, if there are any."""
    if hyperparameters.critic_lambda is None:
        lam = hyperparameters.gae_lambda
    else:
        lam = hyperparameters.critic_lambda
    rewards = credit.with_turn_rewards(sequences, rewards)
    return credit.gae_advantages(
        sequences, old_values, gamma=hyperparameters.gamma, lam=lam, rewards=rewards
    )[1]
