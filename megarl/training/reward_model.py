"""One rank of the reward model: a sequence classifier's score of each response."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megarl import device
from megarl.checkpoints import hf_import
from megarl.config import Recipe
from megarl.parallel import groups, model
from megarl.parallel.hf_config import hf_facts, scorer_shape
from megarl.parallel.rank_model import RankModel
from megarl.parallel.sequences import PackedRow, pack
from megarl.resharding import megatron_map
from megarl.rollout.prompts import conversation, load_tokenizer
from megarl.training.batching import SampleRef, plan_updates
from megarl.training.flops import train_work
from megarl.types import FloatArray, IntArray, SampleGroup, TrainSequence


class RewardModelRank:
    """Rank `rank` of the reward model's world, whose recipe this is. Every method is called on all ranks together."""

    def __init__(self, rank: int, recipe: Recipe, meet: device.Address, first_gpu: int = 0) -> None:
        gc.freeze()  # as in a PolicyRank
        path = recipe.model.path
        self._recipe, self._shape, self._tokenizer = recipe, scorer_shape(path), load_tokenizer(path)
        store = device.join_store(meet, recipe.run.timeout_s)
        self._model = RankModel(
            rank, recipe, self._shape, store, slot=first_gpu + rank, trains=False, is_published=False
        )
        layout = self._model.layout
        shards = megatron_map.shards(self._shape, layout, rank, model.TRANSFORMER_ENGINE)
        hf_import.load_hf(path, shards, self._model.params())
        longest = min(hf_facts(path).max_positions, recipe.train.tokens_per_micro_batch)
        self._longest = longest // layout.tokens_align * layout.tokens_align
        self.offload, self.onload, self.held_bytes = self._model.offload, self._model.onload, device.held_bytes

    def score(self, *groups_of_rank: SampleGroup) -> list[FloatArray] | None:
        """The scores of all samples of each group, in order: of this data-parallel rank, of which there may be none.

        None on all but the last pipeline stage.
        """
        token_ids = [
            self._token_ids(group, sample.text) for group in groups_of_rank for sample in group.samples
        ]
        scores = np.zeros(len(token_ids), np.float32)
        batches = self._micro_batches([len(one) for one in token_ids])
        rows = [self._pack([token_ids[index] for index in batch]) for batch in batches]
        results = self._model.pipeline.run(rows, _at_the_ends)
        if not self._model.is_last_stage:
            return None
        for batch, found in zip(batches, results, strict=True):
            scores[batch] = found
        cuts = np.cumsum([len(group.samples) for group in groups_of_rank])[:-1]
        return np.split(scores, cuts) if groups_of_rank else []

    def _token_ids(self, group: SampleGroup, response: str) -> IntArray:
        return np.asarray(conversation(self._tokenizer, group.prompt.messages, response)[-self._longest :], np.int64)

    def _micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which samples share a row; as many rows on every data-parallel rank, which exchange tokens for experts."""
        layout, multiple = self._model.layout, self._model.layout.pp if self._model.layout.vpp > 1 else 1
        batches: list[list[int]] = []
        if lengths:
            (plan,) = plan_updates(
                [SampleRef(index, 0, length, 1) for index, length in enumerate(lengths)],
                updates=1,
                dp=1,
                token_budget=self._recipe.train.tokens_per_micro_batch,
                aggregation="sequence_mean",
                work=train_work(self._shape),
                align=layout.tokens_align,
                multiple=multiple,
            )
            batches = [[ref.group for ref in batch] for batch in plan.micro_batches[0]]
        most = torch.tensor(max(len(batches), multiple), device=device.DEVICE)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.dp_group())
        return batches + [[] for _ in range(int(most) - len(batches))]

    def _pack(self, token_ids: Sequence[IntArray]) -> PackedRow:
        def sequence(ids_T: IntArray) -> TrainSequence:
            nothing_T = np.zeros(len(ids_T), np.float32)
            return TrainSequence(ids_T, nothing_T.astype(np.bool_), nothing_T, nothing_T)

        return pack([sequence(ids_T) for ids_T in token_ids], split=self._model.split, device=device.DEVICE)


def _at_the_ends(row: PackedRow, score_T: torch.Tensor) -> tuple[torch.Tensor, FloatArray]:
    """The score of each sequence is that of its last token."""
    ends = [start + length - 1 for start, length in zip(row.starts, row.lengths, strict=True)]
    return score_T.sum(), score_T[ends].float().cpu().numpy()
