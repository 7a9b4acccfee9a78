"""Log-probabilities and entropy from logits whose vocabulary is split over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _VocabParallel(torch.autograd.Function):
    """log softmax at the labels, with the softmax's sums taken over the group; the gradient is g (onehot - p)."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, labels_T: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, num_local = logits_TV.shape
        shifted_TV = logits_TV.float()
        # A rank whose slice is all padding has no maximum of its own.
        peak_T = shifted_TV.amax(-1) if num_local else shifted_TV.new_full((num_tokens,), float("-inf"))
        dist.all_reduce(peak_T, op=dist.ReduceOp.MAX, group=group)
        shifted_TV = shifted_TV - peak_T[:, None]
        exp_TV = shifted_TV.exp()

        is_local_T = (labels_T >= first) & (labels_T < first + num_local)
        column_T = torch.where(is_local_T, labels_T - first, 0)
        sums_3T = shifted_TV.new_zeros(3, num_tokens)
        sums_3T[0] = exp_TV.sum(-1)
        sums_3T[1] = (exp_TV * shifted_TV).sum(-1)
        if num_local:
            sums_3T[2] = torch.where(is_local_T, shifted_TV.gather(-1, column_T[:, None])[:, 0], 0.0)
        dist.all_reduce(sums_3T, group=group)

        sum_T, weighted_T, label_T = sums_3T
        log_sum_T = sum_T.log()
        ctx.save_for_backward(exp_TV.div_(sum_T[:, None]), column_T, is_local_T)
        ctx.logits_dtype = logits_TV.dtype
        entropy_T = log_sum_T - weighted_T / sum_T
        ctx.mark_non_differentiable(entropy_T)
        return label_T - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        softmax_TV, column_T, is_local_T = ctx.saved_tensors
        gradient_T = gradients[0]
        logits_grad_TV = softmax_TV * -gradient_T[:, None]
        if logits_grad_TV.shape[1]:
            at_label_T = torch.where(is_local_T, gradient_T, 0.0)
            logits_grad_TV.scatter_add_(-1, column_T[:, None], at_label_T[:, None])
        return logits_grad_TV.to(ctx.logits_dtype), None, None, None


def label_logprobs(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, *, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp_T, entropy_T), float32 [T], of local logits [T, padded vocabulary / group size].

    Columns at or beyond vocab_size are Megatron's padding and take no part. logp_T has a gradient, entropy_T has none.
    """
    per_rank = logits_TV.shape[1]
    first = dist.get_rank(group) * per_rank
    num_valid = max(0, min(per_rank, vocab_size - first))
    logp_T, entropy_T = _VocabParallel.apply(logits_TV[:, :num_valid], labels_T, first, group)  # type: ignore[misc]
    return logp_T, entropy_T
