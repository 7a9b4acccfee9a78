"""Logprobs in a group of one; `test_trainer.py` splits the vocabulary over two ranks, one of them all padding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megarl.parallel.logprobs import label_logprobs


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradient(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_TV = (torch.randn(7, 16) * 5).to(dtype).requires_grad_()
    labels_T = torch.tensor([0, 9, 3, 3, 7, 1, 2])
    logp_T, entropy_T = label_logprobs(logits_TV, labels_T, vocab_size=10, group=group)
    full_TV = logits_TV[:, :10].double().log_softmax(-1)
    expected_T = full_TV.gather(-1, labels_T[:, None])[:, 0]
    torch.testing.assert_close(logp_T.double(), expected_T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_T.double(), -(full_TV.exp() * full_TV).sum(-1), rtol=1e-5, atol=1e-5)

    weights_T = torch.randn(7)
    (mine,) = torch.autograd.grad((logp_T * weights_T).sum(), logits_TV)
    (expected,) = torch.autograd.grad((expected_T * weights_T).sum(), logits_TV)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    assert mine[:, 10:].abs().max() == 0  # the vocabulary's padding learns nothing
    assert not entropy_T.requires_grad


def test_extreme_logits_stay_finite(group: dist.ProcessGroup) -> None:
    logits_TV = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    logp_T, entropy_T = label_logprobs(logits_TV, torch.tensor([0, 1]), vocab_size=3, group=group)
    logp_T.sum().backward()
    assert logp_T.tolist() == pytest.approx([0.0, -1.0986123])
    assert entropy_T.tolist() == pytest.approx([0.0, 1.0986123])
    assert logits_TV.grad is not None and logits_TV.grad.isfinite().all()
