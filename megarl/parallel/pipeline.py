"""Packed micro-batches through Megatron's pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.parallel import groups
from megarl.parallel.logprobs import label_logprobs
from megarl.parallel.sequences import PackedRow

Result = TypeVar("Result")
# (row, logp_T, entropy_T) -> (loss sum, what to return of this micro-batch)
OnLogprobs = Callable[[PackedRow, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Result]]


def run(
    model: DistributedDataParallel,
    rows: Sequence[PackedRow],
    on_logprobs: OnLogprobs[Result],
    *,
    vocab_size: int,
    denominator: float | None,
) -> list[Result]:
    """Forward every row, and backward unless denominator is None; the results on the last stage, [] elsewhere.

    Gradients are left in the model's buffers: of the loss sums over all rows and data-parallel ranks, divided by
    denominator. Every data-parallel rank must bring the same number of rows: experts are exchanged between them.
    """
    model.config.finalize_model_grads_func = partial(_sum_then_divide, denominator)
    with torch.set_grad_enabled(denominator is not None):
        return get_forward_backward_func()(
            forward_step_func=partial(_forward, on_logprobs, vocab_size),
            data_iterator=iter(rows),
            model=model,
            num_microbatches=len(rows),
            seq_length=1,  # variable_seq_lengths: the stages tell each other the real one
            micro_batch_size=1,
            forward_only=denominator is None,
        )


def _forward(
    on_logprobs: OnLogprobs[Any], vocab_size: int, rows: Iterator[PackedRow], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Megatron's forward_step_func: the stage's output, and what the last stage makes of it."""
    row = next(rows)
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=row.bounds,
        cu_seqlens_kv=row.bounds,
        max_seqlen_q=row.max_length,
        max_seqlen_kv=row.max_length,
    )
    output = model(input_ids=row.token_ids_T[None], position_ids=None, attention_mask=None, packed_seq_params=packing)

    def loss(logits_1TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        logp_T, entropy_T = label_logprobs(logits_1TV[0], row.labels_T, vocab_size=vocab_size, group=groups.tp_group())
        loss_sum, result = on_logprobs(row, logp_T, entropy_T)
        return loss_sum, torch.zeros((), dtype=torch.int, device=loss_sum.device), result

    return output, loss


def _sum_then_divide(denominator: float | None, chunks: list[Any], num_tokens: object, **kwargs: Any) -> None:
    """Megatron's finalize_model_grads with the caller's denominator in place of Megatron's token count."""
    finalize_model_grads(chunks, None, **kwargs)
    if denominator is not None:
        for chunk in chunks:
            chunk.scale_gradients(1.0 / denominator)
