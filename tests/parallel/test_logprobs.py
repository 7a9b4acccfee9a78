"""Logprobs and entropy from hidden states against the plain formula in float64, over 1, 2 and 4 ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megarl import device
from megarl.device import Address
from megarl.parallel.logprobs import hidden_logprobs
from tests.parallel.worlds import TIMEOUT_S, run_ranks

NUM_TOKENS, HIDDEN, PADDED = 8, 6, 64
Case = tuple[int, int, str, int]
# ranks, vocabulary, dtype, bytes of a chunk; at 4 ranks of 16 rows the last hold padding alone
CASES: list[Case] = [
    *(
        (ranks, vocab, "float32", size)
        for ranks in (1, 2, 4)
        for vocab in (10, 40, 64)
        for size in (4, 400, 10**6)
    ),
    (1, 40, "bfloat16", 400),
    (4, 40, "bfloat16", 400),
]
KEPT_BYTES = (0, 10**6)  # logits are computed again, or stay
TEMPERATURES = (1.0, 0.7, 1.3)


def inputs(dtype: str) -> tuple[torch.Tensor, ...]:
    """hidden [T, H], weight [V, H], labels, and what the loss weighs each token's logp and entropy with."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator) * 2
    weight = torch.randn(PADDED, HIDDEN, generator=generator) * 2
    labels = torch.tensor([0, 9, 3, 3, 7, 1, 2, 9])
    kind = getattr(torch, dtype)
    return (
        hidden.to(kind),
        weight.to(kind),
        labels,
        *torch.randn(2, NUM_TOKENS, generator=generator),
    )


def every_case(rank: int, meet: Address) -> list[tuple[np.ndarray, ...]]:
    """(logp, entropy, hidden's gradient, weight's gradient) of this rank in each case."""
    from megarl.cpu.megatron_patches import patch_megatron

    patch_megatron()
    dist.init_process_group(
        "gloo", store=device.join_store(meet, TIMEOUT_S), rank=rank, world_size=4
    )
    groups: dict[int, Any] = {size: dist.new_subgroups(size)[0] for size in (1, 2, 4)}
    outcomes = []
    for (size, vocab, dtype, chunk_bytes), kept, temperature in product(
        CASES, KEPT_BYTES, TEMPERATURES
    ):
        hidden, weight, labels, *weights = inputs(dtype)
        rank_hidden = hidden.chunk(size)[rank % size].clone().requires_grad_()
        rows = weight.chunk(size)[rank % size].clone().requires_grad_()
        limits = {"vocab_size": vocab, "chunk_bytes": chunk_bytes, "kept_bytes": kept}
        results = hidden_logprobs(
            rank_hidden, rows, labels, None, group=groups[size], temperature=temperature, **limits
        )
        loss = sum((result * by).sum() for result, by in zip(results, weights, strict=True))
        assert isinstance(loss, torch.Tensor)
        gradients = torch.autograd.grad(loss, (rank_hidden, rows))
        outcomes.append(
            tuple(tensor.detach().double().numpy() for tensor in (*results, *gradients))
        )
    return outcomes


def plain(vocab: int, dtype: str, temperature: float) -> tuple[torch.Tensor, ...]:
    hidden, weight, labels, *weights = inputs(dtype)
    hidden, weight = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    full_TV = (hidden @ weight[:vocab].T / temperature).log_softmax(-1)
    logp_T, entropy_T = (
        full_TV.gather(-1, labels[:, None])[:, 0],
        -(full_TV.exp() * full_TV).sum(-1),
    )
    loss = (logp_T * weights[0]).sum() + (entropy_T * weights[1]).sum()
    return logp_T.detach(), entropy_T.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.slow
def test_values_and_gradients_over_ranks() -> None:
    ranks = run_ranks(4, every_case)
    for index, ((size, vocab, dtype, _), _, temperature) in enumerate(
        product(CASES, KEPT_BYTES, TEMPERATURES)
    ):
        expected = plain(vocab, dtype, temperature)
        tolerance = 1e-5 if dtype == "float32" else 3e-2
        for first in range(0, 4, size):
            members = [
                tuple(map(torch.from_numpy, ranks[first + member][index])) for member in range(size)
            ]
            for values in members:
                torch.testing.assert_close(values[:2], expected[:2], rtol=tolerance, atol=tolerance)
            for column in (2, 3):  # each rank has its part of the tokens, its rows of the weight
                whole = torch.cat([values[column] for values in members])
                torch.testing.assert_close(whole, expected[column], rtol=tolerance, atol=tolerance)
            assert torch.cat([values[3] for values in members])[vocab:].abs().sum() == 0, (
                "padding learns nothing"
            )


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_no_tensor_is_larger_than_a_chunk(alone: Any) -> None:
    """Forward and backward, 512 tokens of a vocabulary of 1,000: logits of 16 tokens at a time."""
    hidden, weight = (
        torch.randn(512, 4, requires_grad=True),
        torch.randn(1000, 4, requires_grad=True),
    )
    labels = torch.randint(0, 1000, (512,))
    with torch.autograd.set_multithreading_enabled(False), _Largest() as seen:
        logp_T, entropy_T = hidden_logprobs(
            hidden,
            weight,
            labels,
            vocab_size=1000,
            group=alone,
            chunk_bytes=4 * 1000 * 16,
            kept_bytes=0,
        )
        (logp_T.sum() + entropy_T.sum()).backward()
    assert 1000 * 16 <= seen.numel < 1000 * 17


def test_extreme_logits_stay_finite(alone: Any) -> None:
    weight = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [0.0, 0.0]])
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    logp_T, entropy_T = hidden_logprobs(
        hidden, weight, torch.tensor([0, 1]), vocab_size=3, group=alone
    )
    (logp_T.sum() + entropy_T.sum()).backward()
    assert logp_T.tolist() == pytest.approx([0.0, -1.0986123])
    assert entropy_T.tolist() == pytest.approx([0.0, 1.0986123])
    assert hidden.grad is not None and hidden.grad.isfinite().all()
