"""Running packed micro-batches through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from megarl.parallel import groups, lora
from megarl.parallel.cp_gather import gather_row, gather_whole
from megarl.parallel.finiteness import Finiteness
from megarl.parallel.logprobs import hidden_logprobs
from megarl.parallel.model import Chunk, Score
from megarl.parallel.packing import PackedRow
from megarl.parallel.paired_passes import ChunkPass
from megarl.parallel.routing import Choices, Routing
from megarl.parallel.shared_rows import RowParams
from megarl.timeline import recorder
from megarl.types.tensors import NamedTensors

Result = TypeVar("Result")
Shape = list[int]
NOTHING: Shape = [0, 0, 0]  # the shape of a tensor that is not received
# (row, logp_T, entropy_T) -> (loss sum, this micro-batch's result); of a model with a score head: (row, score_T) -> ...
OnOutputs = Callable[..., tuple[Tensor, Result]]


@dataclass(frozen=True)
class Norms:
    """The normalisation of an update's loss sums: the main denominator, and token counts for the other losses."""

    denominator: float
    tokens: int  # of all sequences, prompt and response
    loss_tokens: int  # tokens in the loss mask


@dataclass(frozen=True)
class Pass(Generic[Result]):
    """What a pass over rows gives on this rank.

    results: of each row on the last stage, else none. routing_sums: the routers' statistics, over this rank's tokens.
    """

    results: list[Result]
    routing_sums: NamedTensors


@dataclass(frozen=True)
class Pipeline:
    """The model chunks of a training rank, with their routing.

    finiteness: sees what the passes compute. cp_by_length: whether rows are split over different numbers of ranks.
    aux_loss, z_loss and mtp_loss: weights of the auxiliary losses, each a mean over tokens.
    """

    chunks: Sequence[DistributedDataParallel | Chunk]
    routing: Routing
    finiteness: Finiteness
    cp_by_length: bool
    vocab_size: int
    aux_loss: float
    z_loss: float
    mtp_loss: float

    def run(
        self,
        rows: Sequence[PackedRow],
        on_outputs: OnOutputs[Result],
        *,
        norms: Norms | None = None,
        choices: Sequence[Choices] | None = None,
        temperature: float = 1.0,
    ) -> Pass[Result]:
        """Forward every row, and backward where norms are given.

        Leaves the gradients in the model's buffers: those of the loss sum over all rows and data-parallel ranks,
        divided by the denominator. Every data-parallel rank must pass the same number of rows, because tokens are
        exchanged between experts. choices: for each row the experts to replay, or where to record them. temperature: of
        the log-probabilities and the entropy that on_outputs gets.
        """
        routing_sums = self._start(norms)
        config = self.chunks[0].config
        config.finalize_model_grads_func = partial(
            _sum_then_divide, norms.denominator if norms else None
        )
        step = partial(self._forward, on_outputs, norms, temperature)
        feeds: list[Iterator[Any]] = [
            zip(rows, choices or [None] * len(rows), strict=True) for _ in self.chunks
        ]
        with torch.set_grad_enabled(norms is not None), _backward_spans():
            results = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=feeds,
                model=list(self.chunks),
                num_microbatches=len(rows),
                seq_length=1,  # unused with variable_seq_lengths; KnownShapes has the real lengths
                micro_batch_size=1,
                forward_only=norms is None,
                **self._communication(rows),
            )
        return Pass(results, routing_sums)

    def _communication(self, rows: Sequence[PackedRow]) -> dict[str, Any]:
        """The communicator between stages, and the process groups that Megatron then needs as well."""
        if groups.pp_group().size() == 1:
            return {}
        lengths = [len(row.token_ids_L) for row in rows]
        return {
            "p2p_communicator": KnownShapes(self.chunks[0].config, lengths),
            "pg_collection": groups.pipeline_groups(),
        }

    def _start(self, norms: Norms | None) -> NamedTensors:
        """Prepare a pass; returns the statistics that its routers will fill."""
        for chunk in self.chunks:
            _module(chunk).runs_mtp = norms is not None and self.mtp_loss > 0
        if norms is None:
            return self.routing.start(is_training=False)
        scale = norms.denominator / norms.tokens
        return self.routing.start(
            is_training=True, balance_scale=self.aux_loss * scale, z_scale=self.z_loss * scale
        )

    def _forward(
        self,
        on_outputs: OnOutputs[Any],
        norms: Norms | None,
        temperature: float,
        feed: Iterator[tuple[PackedRow, Choices | None]],
        model: torch.nn.Module,
        return_schedule_plan: bool = False,
    ) -> tuple[Any, Callable[[Tensor], Any]]:
        """Megatron's forward_step_func: the stage's output, and the loss function of the last stage.

        return_schedule_plan: in place of the output the pass that will compute it.
        """
        row, choices = next(feed)
        cp_group = groups.cp_group(row.cp) if self.cp_by_length else None
        tokens_1L = row.token_ids_L[None]
        inputs: dict[str, Any] = {
            "input_ids": tokens_1L,
            "position_ids": torch.zeros_like(tokens_1L),  # rotary embeddings do not read them
            "attention_mask": None,
            "packed_seq_params": RowParams.of(row, cp_group),
        }
        chunk = _module(model)
        see_output = partial(self.finiteness.see_output, chunk)
        loss = partial(self._loss, chunk, row, on_outputs, norms, temperature)
        if return_schedule_plan:
            self.routing.begin(row, choices)
            return ChunkPass(chunk, see_output, **inputs), loss
        with (
            recorder.span("forward", tokens=len(row.token_ids_L)),
            self.routing.passing(row, choices),
        ):
            output = model(**inputs)
        see_output(output)
        return output, loss

    def _loss(
        self,
        chunk: Chunk,
        row: PackedRow,
        on_outputs: OnOutputs[Any],
        norms: Norms | None,
        temperature: float,
        output: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        depths = 1 + (chunk.config.mtp_num_layers or 0) * chunk.runs_mtp
        # combined 1F1B widens what a chunk returns
        hidden, *ahead = output[:, 0].to(chunk.config.params_dtype).chunk(depths)
        if isinstance(chunk.output_layer, Score):
            outputs = (self._scores(chunk.output_layer, hidden, row),)
        else:
            outputs = self._logprobs(chunk, hidden, row, row.labels_L, temperature)
        loss_sum, result = on_outputs(row, *outputs)
        if ahead and norms:
            loss_sum = loss_sum + self._mtp_loss(chunk, row, ahead) * (
                norms.denominator / norms.loss_tokens
            )
        if norms:
            self.finiteness.see_loss(loss_sum)
        return loss_sum, torch.zeros((), dtype=torch.int, device=loss_sum.device), result

    def _scores(self, head: Score, hidden: Tensor, row: PackedRow) -> Tensor:
        """score_T of the whole row, on every tensor- and context-parallel rank."""
        score_L = gather_whole(head(hidden), groups.tp_group())
        score_T = gather_row(score_L, row.order_T, groups.cp_group(row.cp))
        return score_T.index_select(0, row.shared.place_T) if row.shared else score_T

    def _logprobs(
        self,
        chunk: Chunk,
        hidden: Tensor,
        row: PackedRow,
        labels_L: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """(logp_T, entropy_T) of the whole row, on every context-parallel rank."""
        shares = hidden_logprobs(
            hidden,
            chunk.output_weight(),
            labels_L,
            row.shared.parent_L if row.shared else None,
            vocab_size=self.vocab_size,
            group=groups.tp_group(),
            temperature=temperature,
        )
        logp_T, entropy_T = (
            gather_row(share_L, row.order_T, groups.cp_group(row.cp)) for share_L in shares
        )
        if row.shared:
            logp_T, entropy_T = (
                of_token_L.index_select(0, row.shared.next_T) for of_token_L in (logp_T, entropy_T)
            )
        return logp_T, entropy_T

    def _mtp_loss(self, chunk: Chunk, row: PackedRow, ahead: Sequence[Tensor]) -> Tensor:
        """The multi-token prediction loss: the mean over depths k of -log p of the token k + 1 positions ahead.

        Summed over the tokens of the loss mask, at temperature 1 (DeepSeek-V3, arXiv 2412.19437, eq. 24-25).
        """
        labels_T = gather_row(row.labels_L, row.order_T, groups.cp_group(row.cp))
        mask_T = row.targets.loss_mask_T
        segment_T = torch.bucketize(
            torch.arange(len(mask_T), device=mask_T.device), row.bounds[1:], right=True
        )
        places_L = torch.from_numpy(row.places).to(labels_T.device)
        total = labels_T.new_zeros((), dtype=torch.float32)
        for depth, hidden in enumerate(ahead, start=1):
            labels_L = labels_T.roll(-depth)[places_L]
            # The last positions of a sequence would predict tokens of the next one, those of the row its first ones.
            is_target_T = mask_T.roll(-depth) & (segment_T == segment_T.roll(-depth))
            is_target_T[-depth:] = False
            logp_T, _ = self._logprobs(chunk, hidden, row, labels_L)
            total = total - torch.where(is_target_T, logp_T, 0.0).sum() / len(ahead)
        # every such rank has it all
        self.routing.count("mtp_loss", total / (row.cp * groups.tp_group().size()))
        return total * self.mtp_loss


def _module(model: Any) -> Chunk:
    if isinstance(model, DistributedDataParallel):
        return cast(Chunk, model.module)
    return model


def _sum_then_divide(
    denominator: float | None, chunks: list[Any], num_tokens: object, **kwargs: Any
) -> None:
    """Megatron's finalize_model_grads with the caller's denominator in place of Megatron's token count."""
    with recorder.span("gradients over ranks"):
        finalize_model_grads(chunks, None, **kwargs)
        lora.sum_over_etp(chunks)
    if denominator is not None:
        for chunk in chunks:
            chunk.scale_gradients(1.0 / denominator)


@contextmanager
def _backward_spans() -> Iterator[None]:
    """Record the backward pass of each row inside the block, which Megatron's schedules call by this name.

    Passes in pairs (combined 1F1B) have another one, and are not recorded.
    """
    if not recorder.is_recording():
        yield
        return
    original = schedules.backward_step
    schedules.backward_step = recorder.spanned("backward")(original)
    try:
        yield
    finally:
        schedules.backward_step = original


class KnownShapes(P2PCommunicator):
    """Megatron's communicator for one pass over rows of `lengths` tokens on this rank, which every stage knows.

    For sequences of variable length Megatron's own communicator sends the shape before each tensor and waits for it on
    the host, which leaves the GPU idle.
    """

    def __init__(self, config: Any, lengths: Sequence[int]) -> None:
        super().__init__(groups.pp_group(), config)
        tp = config.tensor_model_parallel_size  # over which the sequence is split
        shapes = [[length // tp, 1, config.hidden_size] for length in lengths]
        stage = self.pp_group.rank()
        last = self.pp_group.size() - 1
        chunks = config.virtual_pipeline_model_parallel_size or 1
        group = config.microbatch_group_size_per_vp_stage
        orders = (
            receive_order(len(shapes), chunks, group, leads)
            for leads in (stage == 0, stage == last)
        )
        self._from_prev, self._from_next = (
            iter([shapes[row] for row in order]) for order in orders
        )

    def _communicate(self, **tensors: Any) -> Any:
        with recorder.span("stages exchange"):
            return super()._communicate(**tensors)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        from_prev = NOTHING
        from_next = NOTHING
        if recv_prev:
            from_prev = next(self._from_prev)
        if recv_next:
            from_next = next(self._from_next)
        return from_prev, from_next


def receive_order(rows: int, chunks: int, group: int, leads: bool) -> list[int]:
    """The rows whose tensors a stage receives in one direction (forward or backward), in the schedule's order.

    chunks: model chunks a stage. group: rows that pass one chunk before the next chunk's turn. leads: whether the stage
    is the first in this direction, which receives nothing for its first chunk.
    """
    table = get_schedule_table(rows, chunks, group)
    return [row for row, chunk in table if not leads or chunk < chunks - 1]
