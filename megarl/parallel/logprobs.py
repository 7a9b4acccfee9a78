"""Log-probabilities and entropy of a vocabulary that is split over the tensor-parallel ranks, without whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megarl.device import DEVICE
from megarl.parallel.cp_gather import gather_shared

# Of one chunk's float32 logits on a rank: a CPU wants them in its cache, a GPU few passes over the weight.
CHUNK_BYTES = (256 if DEVICE == "cuda" else 16) * 2**20
# all chunks' logits stay for the backward pass if they are no more than this
KEPT_BYTES = 256 * 2**20


class _HiddenLogprobs(torch.autograd.Function):
    """Chunks of tokens one after the other: where their logits are many, only one chunk's exist at a time.

    With l = log softmax(z / temperature), p = exp l and H = -sum p l, by z / temperature: dl_y = onehot_y - p and
    dH = -p (l + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        first: int,
        group: dist.ProcessGroup,
        chunk_tokens: int,
        keep: bool,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        chunks = []
        kept = []
        for hidden, labels in zip(
            hidden_TH.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True
        ):
            logits_CV = _logits(hidden, weight_VH, temperature)
            chunks.append(_chunk_statistics(logits_CV, labels, first))
            kept += [logits_CV] if keep else []
            del logits_CV
        peak_T, exp_T, weighted_T, label_T = (
            torch.cat(column) for column in zip(*chunks, strict=True)
        )
        whole_peak_T = peak_T.clone()
        dist.all_reduce(whole_peak_T, op=dist.ReduceOp.MAX, group=group)
        # sum exp(z - P) and sum (z - P) exp(z - P), from the sums about the rank's own peak p.
        shift_T = peak_T - whole_peak_T
        scale_T = torch.where(peak_T.isneginf(), 0.0, shift_T.exp())
        shift_T = torch.where(peak_T.isneginf(), 0.0, shift_T)
        is_local_T = (labels_T >= first) & (labels_T < first + len(weight_VH))
        sums_3T = torch.stack(
            [
                exp_T * scale_T,
                (weighted_T + exp_T * shift_T) * scale_T,
                torch.where(is_local_T, label_T - whole_peak_T, 0.0),
            ]
        )
        dist.all_reduce(sums_3T, group=group)
        total_T, weighted_T, label_T = sums_3T
        entropy_T = total_T.log() - weighted_T / total_T
        ctx.save_for_backward(
            hidden_TH, weight_VH, labels_T, whole_peak_T + total_T.log(), entropy_T, peak_T
        )
        ctx.first = first
        ctx.chunk_tokens = chunk_tokens
        ctx.kept = kept
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # most losses do not look at the entropy
        return label_T - total_T.log(), entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, labels_T, log_sum_T, entropy_T, peak_T = ctx.saved_tensors
        hidden_grad_TH = torch.empty_like(hidden_TH)
        is_frozen = not ctx.needs_input_grad[1]
        if is_frozen:
            weight_grad_VH = None
        else:
            weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        logp_grad_T, entropy_grad_T = (
            None if gradient is None else gradient / ctx.temperature for gradient in gradients
        )
        if logp_grad_T is None:
            logp_grad_T = torch.zeros_like(log_sum_T)
        columns = (hidden_TH, labels_T, log_sum_T, entropy_T, peak_T, logp_grad_T, hidden_grad_TH)
        parts = zip(*(column.split(ctx.chunk_tokens) for column in columns), strict=True)
        for index, (hidden, labels, log_sum, entropy, peak, logp_grad, hidden_grad) in enumerate(
            parts
        ):
            if entropy_grad_T is None:
                of_entropy = None
            else:
                of_entropy = (entropy, entropy_grad_T.split(ctx.chunk_tokens)[index])
            if ctx.kept:
                logp_CV = ctx.kept[index] - (log_sum - peak)[:, None]
            else:
                logp_CV = _logits(hidden, weight_VH, ctx.temperature).sub_(log_sum[:, None])
            grad_CV = _logits_grad(logp_CV, labels - ctx.first, logp_grad, of_entropy).to(
                hidden.dtype
            )
            del logp_CV
            torch.mm(grad_CV, weight_VH, out=hidden_grad)
            if weight_grad_VH is not None:
                weight_grad_VH += grad_CV.T @ hidden
            del grad_CV  # else it is there beside the next chunk's logits
        if weight_grad_VH is None:
            of_weight = None
        else:
            of_weight = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_TH, of_weight, None, None, None, None, None, None


def _logits_grad(
    logp_CV: Tensor,
    column_C: Tensor,
    logp_grad_C: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """-g p - g_H p (l + H), and g more at the label, where that is a column of this rank; of_entropy: (H, g_H).

    logp_CV is lost.
    """
    if of_entropy is None:
        grad_CV = logp_CV.exp_().mul_(-logp_grad_C[:, None])
    else:
        entropy_C, entropy_grad_C = of_entropy
        p_CV = logp_CV.exp()
        grad_CV = (
            logp_CV.add_(entropy_C[:, None])
            .mul_(entropy_grad_C[:, None])
            .add_(logp_grad_C[:, None])
        )
        grad_CV.mul_(p_CV).neg_()
    num_local = grad_CV.shape[1]
    if num_local:
        is_local_C = (column_C >= 0) & (column_C < num_local)
        at_label_C = torch.where(is_local_C, logp_grad_C, 0.0)
        grad_CV.scatter_add_(1, column_C.clamp(0, num_local - 1)[:, None], at_label_C[:, None])
    return grad_CV


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """Divided by the temperature in float32, as an engine's sampler divides them."""
    logits_CV = functional.linear(hidden_CH, weight_VH).float()
    if temperature == 1.0:
        return logits_CV
    return logits_CV.div_(temperature)


def _chunk_statistics(logits_CV: Tensor, labels_C: Tensor, first: int) -> tuple[Tensor, ...]:
    """(peak, sum exp, sum of (logit - peak) exp, the label's logit), about this rank's own columns.

    The logits become differences to the peak.
    """
    num_local = logits_CV.shape[1]
    if not num_local:  # all of its columns are padding
        nothing = logits_CV.new_zeros(len(logits_CV))
        return torch.full_like(nothing, float("-inf")), nothing, nothing, nothing
    column_C = (labels_C - first).clamp(0, num_local - 1)
    label_C = logits_CV.gather(1, column_C[:, None])[:, 0]
    peak_C = logits_CV.amax(1)
    logits_CV -= peak_C[:, None]
    exp_CV = logits_CV.exp()
    return peak_C, exp_CV.sum(1), exp_CV.mul_(logits_CV).sum(1), label_C


def hidden_logprobs(
    hidden_LH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    places_T: Tensor | None = None,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor]:
    """(logp_T, entropy_T), float32 [T] and differentiable, from the final hidden states and the output layer's weight.

    hidden_LH: this tensor-parallel rank's L = T / group size tokens (sequence parallelism); places_T: among the tokens
    of all ranks, that which predicts each label (None: one after another); weight_VH: its rows of the padded
    vocabulary, of which those at or beyond vocab_size take no part; temperature: that the logits are divided by,
    so that both results are those of the distribution that is sampled from. Logits of more than kept_bytes are computed
    again in the backward pass. Then there are, beside the gradients (the weight's in float32) and a chunk's part of the
    weight's, a chunk's logits twice, in bfloat16 half once more: on a GPU 0.7 GB for 32,768 tokens of a vocabulary of
    151,936 at TP 8, whose whole logits are 2.5 GB.
    """
    per_rank = len(weight_VH)
    first = dist.get_rank(group) * per_rank
    num_valid = max(0, min(per_rank, vocab_size - first))
    token_bytes = 4 * max(1, num_valid)
    chunk_tokens = max(1, chunk_bytes // token_bytes)
    keep = torch.is_grad_enabled() and len(labels_T) * token_bytes <= kept_bytes
    hidden_TH = gather_shared(hidden_LH, group)
    if places_T is not None:
        hidden_TH = hidden_TH.index_select(0, places_T)
    if num_valid == per_rank:
        valid_VH = weight_VH
    else:
        valid_VH = weight_VH[:num_valid]
    arguments = hidden_TH, valid_VH, labels_T, first, group, chunk_tokens, keep, temperature
    return _HiddenLogprobs.apply(*arguments)  # type: ignore[return-value]
