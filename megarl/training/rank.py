"""What the rank processes of all models have in common: a part of a Megatron model, loaded, run, moved and saved."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl import device
from megarl.algos.losses import LossResult
from megarl.algos.statistics import GRAD_NORM, LOSS, Statistics
from megarl.checkpoints import hf_import, peft
from megarl.checkpoints.snapshots import Digest, digests
from megarl.config import Recipe
from megarl.disk import DiskPulse, visible_folder, writing
from megarl.model.families import family_of
from megarl.model.shape import ModelShape
from megarl.parallel import groups, host_offload, model, state_bytes
from megarl.parallel.fp8_layers import EngineNumbers
from megarl.parallel.packing import PackedRow, unpack
from megarl.parallel.pipeline import Norms
from megarl.parallel.rank_model import RankModel
from megarl.parallel.routing import Choices
from megarl.placement.roles import Role, engine_precision
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, megatron_map
from megarl.resharding.memory_handles import SourceHandles, map_params
from megarl.timeline import recorder
from megarl.training.batching import Update
from megarl.training.matrix_parts import matrix_parts
from megarl.training.update_guard import UpdateGuard
from megarl.types import ByteArray, FloatArray, TrainSequence, regrouped
from megarl.types.arrays import TokenArrays
from megarl.types.tensors import NamedTensors

MicroBatches = Sequence[Sequence[TrainSequence]]
_LOOK_S = 0.02  # a checkpoint ends so much later, at most, because its disk is attended to
_SHORT_S = 1.0  # no disk is asked about a call that does not take longer


def _engine_numbers(
    recipe: Recipe, shape: ModelShape, layout: TrainLayout, rank: int
) -> EngineNumbers | None:
    """The engines' numbers, where the rank computes with these."""
    if recipe.train.numbers == "plain":
        return None
    precision = engine_precision(recipe)
    params = megatron_map.fp8_params(shape, layout, rank, precision, model.TRANSFORMER_ENGINE)
    return EngineNumbers(params, precision.scales, recipe.train.fp8_backward)


class TrainingRank:
    """Rank `rank` of the Megatron world of a role. Every method but `params` is collective.

    The constructor meets the other ranks at the store at `meet`, builds this rank's part of the model on its GPU slot,
    and loads the weights of the role's Hugging Face checkpoint. is_published: engines map the parameters, which stay
    where they are. reference: another checkpoint of the same shape, whose weights wait in host memory. With `lora` the
    frozen weights of a model that is not published are the policy's, undefined until `share`. Raises UserError for a
    checkpoint or Megatron option that does not fit.
    """

    def __init__(
        self,
        rank: int,
        role: Role,
        meet: device.Address,
        *,
        is_published: bool = False,
        reference: str | None = None,
    ) -> None:
        gc.freeze()  # what the imports made is never garbage, and walking it takes half a second
        recipe = role.recipe
        shape = role.shape
        size = role.lora
        self.rank = rank
        self.shape = shape
        self.layout = role.layout
        self._recipe = recipe
        # the number of the last call of `save` or `finish_save` that has ended
        self._last_disk_call = 0
        self._store = device.join_store(meet, recipe.run.timeout_s)
        of_rank = shape, self.layout, rank
        has_muon = recipe.train.optimizer_name == "muon"
        self._model = RankModel(
            rank,
            role,
            self._store,
            tp_split_params=megatron_map.split_params(*of_rank, model.TRANSFORMER_ENGINE),
            numbers=_engine_numbers(recipe, *of_rank),
            is_published=is_published,
            pairs=lora_map.pairs(*of_rank, size, model.TRANSFORMER_ENGINE) if size else (),
            matrix_parts=matrix_parts(*of_rank, model.TRANSFORMER_ENGINE) if has_muon else (),
        )
        self._pack = self._model.pack
        self._guard = UpdateGuard(self._model, self.layout, recipe.run.compare_replicas_every)
        shards = megatron_map.shards(shape, self.layout, rank, model.TRANSFORMER_ENGINE)
        wrapper = family_of(shape).wrapper
        if is_published or not size:
            hf_import.load_hf(recipe.model.path, shards, self.params(), wrapper=wrapper)
        if size and recipe.lora and recipe.lora.path:
            factors = lora_map.shards(shape, self.layout, rank, size, model.TRANSFORMER_ENGINE)
            peft.load(recipe.lora.path, shape, factors, self.factors())
            peft.load_head(recipe.lora.path, shape, shards, self.params())
        if role.trains:
            self._model.make_optimizer()
        self._state: state_bytes.StateBytes | None = None
        self._reference: dict[str, Tensor] = {}
        if reference:
            self._reference = host_offload.host_buffers_like(self.params())
            hf_import.load_hf(reference, shards, self._reference, wrapper=wrapper)
        self.offload = self._model.offload
        self.onload = self._model.onload
        self.held_bytes = device.held_bytes

    def params(self) -> dict[str, Tensor]:
        """This rank's weights by the map's names: views of long-lived buffers that every step updates in place."""
        return self._model.params()

    def factors(self) -> dict[str, Tensor]:
        """This rank's factors of adapters, likewise; none without `lora`."""
        return self._model.factors()

    def share(self, handles: SourceHandles) -> None:
        """Compute with the frozen weights of another process of this GPU, of the same layout, in place of own ones."""
        self._model.share(map_params(handles))

    def load(self, folder: Path) -> None:
        """Resume from a checkpoint, as of `RankModel`."""
        self._model.load(folder)

    def load_weights(self, folder: Path) -> None:
        """Only the weights of a checkpoint, or the factors of adapters."""
        self._model.load_weights(folder)

    def save(self, folder: Path, number: int) -> None:
        """Begin to write this rank's part of a checkpoint into an empty folder; training may go on meanwhile.

        number: of this call, for `attend_disk`. Raises UserError, as `finish_save`, where the disk is full or the
        folder is gone; training may go on then, too.
        """
        # threads and files of this process: no call could return them
        self._saved_in = folder
        with self._disk_call(number):
            self._pending = self._model.save(folder)

    def has_saved(self) -> bool:
        """Whether `finish_save` would wait for no file of this rank."""
        return self._pending.is_written()

    def finish_save(self, number: int) -> dict[str, Digest]:
        """Wait until the files of all ranks are written; the digests of this rank's own. number: as of `save`."""
        with self._disk_call(number):
            self._pending.finish()
            return digests(self._saved_in, self._pending.files)

    async def attend_disk(self, number: int, folder: Path) -> None:
        """Return when the call of `save` or `finish_save` with this number has ended; later ones have higher numbers.

        Raises Silence where the folder's disk, as this node sees it, has not answered for run.timeout_s meanwhile:
        such a call would never end.
        """
        began = time.monotonic()
        pulse = None
        while self._last_disk_call < number:
            await asyncio.sleep(_LOOK_S)
            if pulse:
                pulse.check("a checkpoint")
            elif time.monotonic() - began > _SHORT_S:
                pulse = DiskPulse(visible_folder(folder), self._recipe.run.timeout_s - _SHORT_S)

    @contextmanager
    def _disk_call(self, number: int) -> Iterator[None]:
        try:
            with writing(visible_folder(self._saved_in), "a checkpoint"):
                yield
        finally:
            self._last_disk_call = number

    def begin_copy(self) -> tuple[int, bytes]:
        """Begin to hand out a copy of the state, by `copied_bytes`; its size in bytes, and its small parts.

        The rank must not compute until all of it is copied. Not collective, as all that concerns copies.
        """
        self._state = self._model.state_bytes()
        return self._state.num_bytes, state_bytes.small_state(self._model.optimizer)

    def copied_bytes(self, start: int, end: int) -> ByteArray:
        """A part of the copy that was begun."""
        assert self._state
        return self._state.read(start, end)

    def end_copy(self) -> None:
        """Let go of the tensors of a copy, so that their memory can be freed."""
        self._state = None

    def begin_restore(self, num_bytes: int) -> None:
        """Begin to take a copy of a rank in this place of the same layout. Raises RuntimeError for another size."""
        self._state = self._model.state_bytes()
        if self._state.num_bytes != num_bytes:
            raise RuntimeError(
                f"a copy of {num_bytes} bytes is not of this rank, which has {self._state.num_bytes}"
            )

    def restore_bytes(self, start: int, content: ByteArray) -> None:
        """Take a part of the copy."""
        assert self._state
        self._state.write(start, content)

    def finish_restore(self, small: bytes) -> None:
        """Take the small parts, after all bytes."""
        state_bytes.set_small_state(self._model.optimizer, small)
        self.end_copy()

    def token_outputs(
        self,
        micro_batches: MicroBatches,
        choices: Sequence[Choices] | None = None,
        temperature: float = 1.0,
    ) -> list[FloatArray] | None:
        """One array per sequence, in order: the model's output for every token given those before it (the first: 0).

        The output is log p, p = softmax(logits / temperature), or the score of a classifier. None on all but the last
        pipeline stage.
        """

        def keep(row: PackedRow, output_T: Tensor, *_: Tensor) -> tuple[Tensor, list[FloatArray]]:
            return output_T.sum(), unpack(row, output_T)

        # the experts to replay come by `choices`: the rows' own would take memory for the samples of all updates
        rows = [replace(self._pack(batch), experts_LMK=None) for batch in micro_batches]
        done = self._model.pipeline.run(rows, keep, choices=choices, temperature=temperature)
        if self._model.is_last_stage:
            return [array for arrays in done.results for array in arrays]
        return None

    def outputs_by_share(
        self,
        shares: Sequence[MicroBatches],
        choices: Sequence[Choices] | None = None,
        temperature: float = 1.0,
    ) -> list[list[FloatArray] | None]:
        """`token_outputs` of each update's share, in one pass: the pipeline fills and drains once, not once an update.

        choices: for the micro-batches of all shares, in order.
        """
        if not shares:
            return []
        outputs = self.token_outputs([*chain(*shares)], choices, temperature)
        if outputs is None:
            return [None for _ in shares]
        return [*regrouped(outputs, [[*chain(*share)] for share in shares])]

    def _update(
        self,
        rows: Sequence[PackedRow],
        loss: Callable[..., LossResult],
        norms: Norms,
        lr: float,
        **options: Any,
    ) -> tuple[Statistics, NamedTensors]:
        """One optimizer update. loss: of a packed row and the pipeline's outputs for it; options: as of `Pipeline.run`.

        Returns grad_norm (before clipping), and on the last stage the loss and its statistics over all data-parallel
        ranks; and the routers' sums on this rank. Raises as the guard, before the optimizer's step.
        """

        def on_outputs(*row_and_outputs: Any) -> LossResult:
            loss_sum, stats = loss(*row_and_outputs)
            return loss_sum, {LOSS: loss_sum.detach() / norms.denominator, **stats}

        self._model.zero_grad()
        done = self._model.pipeline.run(rows, on_outputs, norms=norms, **options)
        with recorder.span("check of faults"):
            self._guard.check()
        grad_norm = self._model.step(lr)
        statistics: Statistics = {}
        if self._model.is_last_stage:
            statistics = groups.reduce_stats(done.results, self._copies(rows))
        return statistics | {GRAD_NORM: (grad_norm,)}, done.routing_sums

    def _copies(self, rows: Sequence[PackedRow]) -> list[int]:
        """How many data-parallel ranks have each row."""
        return [row.cp // self.layout.cp for row in rows]

    def _rows(self, micro_batches: MicroBatches, *arrays: TokenArrays | None) -> list[PackedRow]:
        """The packed rows; arrays: as of `pack`, but for the sequences of all micro-batches."""
        of_batches = [
            [None] * len(micro_batches) if flat is None else regrouped(flat, micro_batches)
            for flat in arrays
        ]
        return [self._pack(*of_batch) for of_batch in zip(micro_batches, *of_batches, strict=True)]


def norms_of(update: Update) -> Norms:
    """What the loss sums of an update are divided by."""
    return Norms(update.denominator, update.tokens, update.loss_tokens)
