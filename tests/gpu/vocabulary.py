"""Log-probabilities of a large vocabulary: what they take, and how far they are from float32."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megarl.device import BACKEND, DEVICE
from megarl.parallel.logprobs import hidden_logprobs
from megarl.resharding.transport import settle

TIMEOUT_S = 120.0
LOGIT_SPREAD = 2.0  # standard deviation of the logits
REFERENCE_TOKENS = 512


class Vocabulary:
    """Hidden states, an output layer's weight and labels, all random; the tensor-parallel group is this process."""

    def __init__(self, tokens: int, hidden: int, vocab: int, dtype: str) -> None:
        dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=1)
        generator = torch.Generator(DEVICE).manual_seed(1)
        kind = getattr(torch, dtype)
        self._hidden = (
            torch.randn(tokens, hidden, generator=generator, device=DEVICE)
            .to(kind)
            .requires_grad_()
        )
        weight = torch.randn(vocab, hidden, generator=generator, device=DEVICE) * (
            LOGIT_SPREAD / hidden**0.5
        )
        self._weight = weight.to(kind).requires_grad_()
        self._labels = torch.randint(vocab, (tokens,), generator=generator, device=DEVICE)
        self._weigh = torch.randn(tokens, generator=generator, device=DEVICE)
        self._chunk: dict[str, int] = {}

    def set_chunk(self, chunk_bytes: int) -> None:
        """Of the logits; and none are kept for the backward pass."""
        self._chunk = {"chunk_bytes": chunk_bytes, "kept_bytes": 0}

    def measure(self) -> dict[str, Any]:
        """Forward and backward: the peak of memory beside the inputs (without a GPU 0), and the seconds."""
        held = self._reset_peak()
        started = time.perf_counter()
        logp_T, entropy_T = hidden_logprobs(
            self._hidden,
            self._weight,
            self._labels,
            places_T=None,
            vocab_size=len(self._weight),
            group=_group(),
            **self._chunk,
        )
        (logp_T * self._weigh).sum().backward()
        settle(TIMEOUT_S)
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - held if DEVICE == "cuda" else 0
        self._found = logp_T.detach(), entropy_T.detach()
        return {"peak_bytes": peak, "seconds": seconds}

    def compare(self) -> dict[str, float]:
        """The largest differences to float32: of logprobs, entropy, and relative ones of the gradients' norms."""
        grad_H, grad_V = (
            leaf.grad.float() for leaf in (self._hidden, self._weight) if leaf.grad is not None
        )
        weight = self._weight.detach().float()
        expected_V = torch.zeros_like(weight)
        worst = {"logp": 0.0, "entropy": 0.0, "hidden_grad": 0.0}
        for start in range(0, len(self._labels), REFERENCE_TOKENS):
            part = slice(start, start + REFERENCE_TOKENS)
            hidden, weigh = self._hidden.detach()[part].float(), self._weigh[part]
            logp_CV = torch.log_softmax(hidden @ weight.T, -1)
            p_CV = logp_CV.exp()
            differences = {
                "logp": self._found[0][part] - logp_CV.gather(1, self._labels[part, None])[:, 0],
                "entropy": self._found[1][part] + (p_CV * logp_CV).sum(1),
            }
            grad_CV = p_CV.mul_(-weigh[:, None])
            grad_CV.scatter_add_(1, self._labels[part, None], weigh[:, None])
            expected_V += grad_CV.T @ hidden
            expected_H = grad_CV @ weight
            worst = {
                name: max(worst[name], float(differences[name].abs().max())) for name in differences
            } | {
                "hidden_grad": max(
                    worst["hidden_grad"],
                    float((grad_H[part] - expected_H).norm() / expected_H.norm()),
                )
            }
        return {**worst, "weight_grad": float((grad_V - expected_V).norm() / expected_V.norm())}

    def _reset_peak(self) -> int:
        if DEVICE != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
