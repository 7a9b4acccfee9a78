"""Weights that wait in host memory: pinned where there is a GPU, and back in their own memory afterwards."""

from __future__ import annotations

import time

import pytest
import torch

from megarl.device import DEVICE, held_bytes
from megarl.parallel import host_offload
from megarl.resharding.transport import settle
from tests.gpu.conftest import Record

ON_GPU = DEVICE == "cuda"
NUM_BYTES = 4 << 30 if ON_GPU else 1 << 20
TIMEOUT_S = 60.0


@pytest.fixture
def params() -> dict[str, torch.Tensor]:
    """Views of one flat buffer, and a tensor of its own of an odd size."""
    flat = torch.arange(NUM_BYTES // 4, dtype=torch.float32, device=DEVICE)
    left, right = flat.view(2, -1)
    return {"left": left, "right": right, "odd": torch.full((1001, 3), 7.0, device=DEVICE)}


def test_a_swap_and_back(params: dict[str, torch.Tensor], record: Record) -> None:
    """Unverified on a GPU.

    parallel/host_offload.py: pinned weights of the reference, one tensor at a time. To check first: the time of a
    swap; device memory stays as it is; whether the pinned allocator rounds sizes up.
    """
    before = {name: param.clone() for name, param in params.items()}
    addresses = [param.data_ptr() for param in params.values()]
    others = host_offload.host_buffers_like(params)
    assert all(tensor.is_pinned() == ON_GPU and tensor.is_cpu for tensor in others.values())
    for tensor in others.values():
        tensor.fill_(-1.0)
    settle(TIMEOUT_S)
    started = time.perf_counter()
    with host_offload.swapped_in(params, others):
        settle(TIMEOUT_S)
        record("swap", 2 * NUM_BYTES / (time.perf_counter() - started) / 1e9, "GB/s")
        assert all(bool((param == -1).all()) for param in params.values())
        assert all(torch.equal(others[name], value.cpu()) for name, value in before.items())
    assert all(torch.equal(params[name], value) for name, value in before.items())
    assert addresses == [param.data_ptr() for param in params.values()]


def test_put_away_and_back(params: dict[str, torch.Tensor], record: Record) -> None:
    """Unverified on a GPU.

    parallel/host_offload.py offload_params, onload_params: parameters of critic and reward model in pinned memory
    while another has the GPU; storages of size 0 under Megatron's buffers. Simulated: between the first two steps
    of each layout of `parallel/model.py`. To check first: device memory between phases; a critic's step after a
    turn equals one without.
    """
    before = {name: param.clone() for name, param in params.items()}
    settle(TIMEOUT_S)
    held, started = held_bytes(), time.perf_counter()
    away = host_offload.offload_params(params)
    record("put away", NUM_BYTES / (time.perf_counter() - started) / 1e9, "GB/s")
    assert len(away) == 2, "a storage goes once, however many views it has"
    assert all(tensor.is_pinned() == ON_GPU for _, tensor in away)
    assert all(param.untyped_storage().nbytes() == 0 for param in params.values())
    if ON_GPU:
        assert held - held_bytes() >= NUM_BYTES
    started = time.perf_counter()
    host_offload.onload_params(away)
    settle(TIMEOUT_S)
    record("put back", NUM_BYTES / (time.perf_counter() - started) / 1e9, "GB/s")
    assert all(torch.equal(params[name], value) for name, value in before.items())
    params["left"].fill_(5.0)
    assert bool((params["right"] == before["right"]).all()), "they are views of one storage still"


@pytest.mark.skipif(not ON_GPU, reason="host memory is pinned for a GPU")
def test_what_pinned_memory_takes(record: Record) -> None:
    asked = 3 * (256 << 20) + 4096
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    kept = torch.empty(asked, dtype=torch.uint8, pin_memory=True)
    taken = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - before
    assert kept.is_pinned()
    record("bytes for each byte asked for", taken / asked, "")
