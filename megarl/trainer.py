"""One training rank's process: its part of the model, the optimizer, logprobs and steps."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megarl import checkpoint, device
from megarl.algos import ALGORITHMS
from megarl.batching import Update, train_sequences
from megarl.config import Recipe
from megarl.parallel import cpu, groups, model, pipeline
from megarl.parallel.hf_config import model_shape
from megarl.parallel.placement import train_layout
from megarl.parallel.sequences import PackedRow, PackedTargets, pack, unpack
from megarl.resharding import megatron_map
from megarl.resharding.member import Member
from megarl.resharding.publish import SourceHandles, publish
from megarl.resharding.session import Session
from megarl.types import FloatArray, Metrics, SampleGroup, TrainSequence

MicroBatches = Sequence[Sequence[TrainSequence]]
# (logp_T, old_logp_T, targets) -> (loss sum, statistics: sums, or maxima where the name ends in _max)
Loss = Callable[[torch.Tensor, torch.Tensor, PackedTargets], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Published:
    """What an engine process needs to map this rank's parameters, and whose names they go by."""

    source: SourceHandles
    transformer_engine: bool


class Trainer:
    """Rank `rank` of the training world. Every method but `params` is called on all ranks together.

    The constructor meets the other ranks at the store on `store_port`, builds this rank's part of the model and loads
    its weights from the HF checkpoint. Raises UserFault for a checkpoint or Megatron option that does not fit.
    """

    def __init__(self, rank: int, recipe: Recipe, store_port: int) -> None:
        gc.freeze()  # what the imports made is never garbage, and walking it takes half a second
        if device.DEVICE == "cpu":
            cpu.patch_megatron()
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        train, path = recipe.train, recipe.model.path
        dtype = model.DTYPES[recipe.model.dtype]
        self.rank, self.device, self._recipe = rank, device.DEVICE, recipe
        self.shape = model_shape(path)
        self.layout = train_layout(recipe)
        self.is_last_stage = self.layout.coords(rank).pp == self.layout.pp - 1
        config = model.transformer_config(path, self.shape, self.layout, dtype, train.megatron)
        store = device.join_store(store_port, recipe.run.timeout_s)
        groups.join(store, rank, self.layout, recipe.run.seed, recipe.run.timeout_s)

        (chunk,) = model.build_chunks(config, path, self.shape, self.layout, rank)
        self._model = model.wrap(config, chunk)
        shards = megatron_map.shards(self.shape, self.layout, rank, model.TRANSFORMER_ENGINE)
        checkpoint.load_hf(path, shards, self.params())
        self._optimizer = model.build_optimizer(self._model, train, dtype)
        self._member: Member | None = None

    def params(self) -> dict[str, torch.Tensor]:
        """This rank's weights by the map's names: views of long-lived buffers that every step updates in place."""
        return model.params([self._model.module])

    def train(
        self, algorithm: str, updates: Sequence[Update], lr: float, group_ids: Sequence[int], *samples: SampleGroup
    ) -> Metrics:
        """All optimizer updates of one step; an update's micro_batches[0] are this data-parallel rank's.

        samples[i] is the group that micro-batches call group_ids[i]. Metrics as of `train_step`, over all updates.
        """
        row = ALGORITHMS[algorithm]
        by_id = dict(zip(group_ids, samples, strict=True))
        parts = [train_sequences(update.micro_batches[0], by_id, row.mean_over) for update in updates]
        # Only later updates of a step train a policy that is no longer the one that the ratio is to.
        old = [self.logprobs(part) for part in parts] if len(parts) > 1 else [None]
        loss = self._loss(row.loss)
        steps = zip(parts, updates, old, strict=True)
        return _over_updates([self.train_step(part, one.denominator, lr, loss, logp) for part, one, logp in steps])

    def _loss(self, loss: Callable[..., object]) -> Loss:
        """A loss names the `algorithm` keys of the recipe that it reads as its keyword-only parameters."""
        keys = [p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return partial(loss, **{key: getattr(self._recipe.algorithm, key) for key in keys})  # type: ignore[return-value]

    def logprobs(self, micro_batches: MicroBatches) -> list[FloatArray] | None:
        """One array per sequence, in order: log p of every token given those before it (the first: 0).

        None on all but the last pipeline stage.
        """

        def keep(row: PackedRow, logp_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, list[FloatArray]]:
            return logp_T.sum(), unpack(row, logp_T)

        rows = [self._pack(batch) for batch in micro_batches]
        results = pipeline.run(self._model, rows, keep, vocab_size=self.shape.vocab_size, denominator=None)
        return [array for arrays in results for array in arrays] if self.is_last_stage else None

    def train_step(
        self,
        micro_batches: MicroBatches,
        denominator: float,
        lr: float,
        loss: Loss,
        old_logp: Sequence[FloatArray] | None = None,
    ) -> Metrics:
        """One optimizer update on this data-parallel rank's micro-batches (as many as on every other rank).

        The gradient is that of the loss sums over all ranks / denominator. old_logp holds the policy before this
        step's updates as `logprobs` returned it; None means that this is the first update, so old = current.
        Returns grad_norm (before clipping) and, on the last stage, loss, entropy (sum over masked tokens) and the
        loss's statistics over all data-parallel ranks. Raises FloatingPointError when the gradient is not finite.
        """

        def apply_loss(
            row: PackedRow, logp_T: torch.Tensor, entropy_T: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            old_logp_T = logp_T.detach() if row.old_logp_T is None else row.old_logp_T
            loss_sum, stats = loss(logp_T, old_logp_T, row.targets)
            entropy = (entropy_T * row.targets.loss_mask_T).sum()
            return loss_sum, {"loss": loss_sum.detach() / denominator, "entropy": entropy, **stats}

        self._model.zero_grad_buffer()
        left = iter(old_logp) if old_logp is not None else None
        rows = [self._pack(batch, [next(left) for _ in batch] if left else None) for batch in micro_batches]
        stats = pipeline.run(self._model, rows, apply_loss, vocab_size=self.shape.vocab_size, denominator=denominator)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = self._optimizer.step()
        self._optimizer.zero_grad()
        if grad_norm is None or not math.isfinite(grad_norm):
            raise FloatingPointError(f"training rank {self.rank}: the gradient norm is {grad_norm}")
        reduced = _reduce(stats, groups.dp_group()) if self.is_last_stage else {}
        return {**reduced, "grad_norm": float(grad_norm)}

    def _pack(self, batch: Sequence[TrainSequence], old_logp: Sequence[FloatArray] | None = None) -> PackedRow:
        return pack(batch, multiple=self.layout.tp, device=self.device, old_logp=old_logp)

    def publish(self) -> Published:
        """Let another process of this GPU map the parameters; they stay where they are for this one."""
        return Published(publish(self.params()), model.TRANSFORMER_ENGINE)

    def reshard(self, session: Session, version: int, attempt: int) -> None:
        """Take part in an exchange for a GPU without an engine: this rank only sends. attempt: never the same twice."""
        if self._member is None:
            self._member = Member(session, self.params())
        self._member.run(version, attempt)

    def offload(self) -> None:
        """Free the gradients and, on a GPU, move the optimizer's state to the host; parameters stay where they are."""
        self._model.offload_grad_buffers()
        model.move_optimizer(self._optimizer, self._model, "cpu")

    def onload(self) -> None:
        """Undo offload; gradients come back as zeros."""
        model.move_optimizer(self._optimizer, self._model, self.device)
        self._model.restore_grad_buffers()


def _over_updates(updates: Sequence[Metrics]) -> Metrics:
    """Loss and gradient norm as means, other statistics as sums, names ending in _max by maximum."""
    merged: Metrics = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        merged[name] = max(values) if name.endswith("_max") else sum(values)
        if name in ("loss", "grad_norm"):
            merged[name] /= len(values)
    return merged


def _reduce(stats: Sequence[dict[str, torch.Tensor]], group: dist.ProcessGroup) -> Metrics:
    """Micro-batches' statistics over this rank and its data-parallel peers: names ending in _max by maximum."""
    reduced: Metrics = {}
    for op, is_max in ((dist.ReduceOp.SUM, False), (dist.ReduceOp.MAX, True)):
        names = [name for name in stats[0] if name.endswith("_max") == is_max]
        if not names:
            continue
        table = torch.stack([torch.stack([one[name].detach().double() for name in names]) for one in stats])
        totals = table.amax(0) if is_max else table.sum(0)
        dist.all_reduce(totals, op=op, group=group)
        reduced |= dict(zip(names, totals.tolist(), strict=True))
    return reduced
