"""One rank of the reward model: a sequence classifier's score of each response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl import device
from megarl.model.tokenizer import chat_ids, load_tokenizer
from megarl.parallel import groups
from megarl.parallel.packing import PackedRow
from megarl.placement.roles import Role
from megarl.training.batching import SampleRef, plan_updates
from megarl.training.calls import ScoreCall
from megarl.training.flops import train_work
from megarl.training.rank import TrainingRank
from megarl.types import FloatArray, IntArray, SampleGroup, TrainSequence


class RewardModelRank(TrainingRank):
    """A rank of the reward model, which does not train. Raises as a TrainingRank.

    With `lora` it computes with the policy's frozen weights, once `share` has named them.
    """

    def __init__(self, rank: int, role: Role, meet: device.Address) -> None:
        super().__init__(rank, role, meet)
        self._tokenizer = load_tokenizer(role.recipe.model.path)
        positions = role.model.required_facts.max_positions
        longest = min(positions, role.recipe.train.tokens_per_micro_batch)
        self._longest = longest // self.layout.tokens_align * self.layout.tokens_align

    def score(self, call: ScoreCall) -> list[FloatArray] | None:
        """The scores of all samples of each group, in order. A data-parallel rank may have no groups.

        None on all but the last pipeline stage.
        """
        token_ids = [
            self._token_ids(group, sample.text) for group in call.groups for sample in group.samples
        ]
        scores = np.zeros(len(token_ids), np.float32)
        batches = self._micro_batches([len(ids) for ids in token_ids])
        rows = self._rows([[_sequence(token_ids[index]) for index in batch] for batch in batches])
        done = self._model.pipeline.run(rows, _last_scores)
        if not self._model.is_last_stage:
            return None
        for batch, batch_scores in zip(batches, done.results, strict=True):
            scores[batch] = batch_scores
        if not call.groups:
            return []
        cuts = np.cumsum([len(group.samples) for group in call.groups])[:-1]
        return np.split(scores, cuts)

    def _token_ids(self, group: SampleGroup, response: str) -> IntArray:
        return np.asarray(
            chat_ids(self._tokenizer, group.prompt.messages, response)[-self._longest :], np.int64
        )

    def _micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """The samples of each row; as many rows on every data-parallel rank, since they exchange tokens for experts."""
        layout = self.layout
        multiple = self.layout.batch_multiple
        batches: list[list[int]] = []
        if lengths:
            (plan,) = plan_updates(
                [SampleRef(index, 0, length, 1) for index, length in enumerate(lengths)],
                updates=1,
                dp=1,
                token_budget=self._recipe.train.tokens_per_micro_batch,
                aggregation="sequence_mean",
                work=train_work(self.shape),
                align=layout.tokens_align,
                multiple=multiple,
            )
            batches = [[ref.group for ref in batch] for batch in plan.micro_batches[0]]
        most = torch.tensor(max(len(batches), multiple), device=device.DEVICE)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.dp_group())
        return batches + [[] for _ in range(int(most) - len(batches))]


def _sequence(ids_T: IntArray) -> TrainSequence:
    """Tokens that nothing is learnt from."""
    zeros_T = np.zeros(len(ids_T), np.float32)
    return TrainSequence(ids_T, zeros_T.astype(np.bool_), zeros_T, zeros_T)


def _last_scores(row: PackedRow, score_T: Tensor) -> tuple[Tensor, FloatArray]:
    """The score of each sequence: its last token's."""
    ends = [start + length - 1 for start, length in zip(row.starts, row.lengths, strict=True)]
    return score_T.sum(), score_T[ends].float().cpu().numpy()
