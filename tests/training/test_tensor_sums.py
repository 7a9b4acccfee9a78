"""A checksum of a tensor shows what changed in it, wherever the tensor lies."""

from __future__ import annotations

import pytest
import torch

from megarl.training.tensor_sums import sum_of_all, tensor_sum


def random(size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 3, 255, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_counts(size: int, dtype: torch.dtype) -> None:
    """Of tensors that fill no word or block, and begin inside of one."""
    tensor = random(size + 3).to(dtype)[3:]
    expected = tensor_sum(tensor)
    assert torch.equal(tensor_sum(tensor.clone()), expected)
    content = tensor.view(torch.uint8)
    for place in {0, len(content) // 2, len(content) - 1}:
        for bit in (0, 7):
            content[place] ^= 1 << bit
            assert not torch.equal(tensor_sum(tensor), expected)
            content[place] ^= 1 << bit
    assert torch.equal(tensor_sum(tensor), expected)


def test_the_order_counts() -> None:
    """As where the shards of two ranks are in each other's place."""
    first = random(2048)
    last = random(2048, seed=2)
    assert not torch.equal(
        tensor_sum(torch.cat([first, last])), tensor_sum(torch.cat([last, first]))
    )
    assert not torch.equal(sum_of_all([first, last]), sum_of_all([last, first]))


def test_no_tensors_have_a_sum() -> None:
    assert int(sum_of_all([])) == 0
