"""fp8 tiles that a device makes and reads, against tiles made one at a time on the CPU, byte for byte."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.checkpoints.hf_files import Slices
from megarl.checkpoints.quantised import fill
from megarl.device import DEVICE
from megarl.resharding import fp8
from megarl.resharding.transport import settle
from tests.gpu.conftest import Record
from tests.gpu.exchange import same_bytes
from tests.resharding.fp8_tiles import TILE, one_tile_at_a_time

ON_GPU = DEVICE == "cuda"
SHAPES = [(1, 128, 128), (3, 256, 384), (2, 300, 200), (1, 1, 1)] + [(4, 2048, 7168)] * ON_GPU


def block(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Ordinary weights with a tile of zeros, very large and very small ones, on the CPU."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    weights[0, :TILE, :TILE] = 0 if shape[1] > TILE else weights[0, :TILE, :TILE]
    weights[-1, -1, -1] = 3e38
    weights[-1, 0, -1] = 1e-38
    weights[0, -1, 0] = -0.0
    return weights.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_equal_the_cpus(
    shape: tuple[int, int, int], dtype: torch.dtype, record: Record
) -> None:
    """Unverified on a GPU.

    resharding/fp8.py, rollout.engine.weights: tiles quantised strip by strip while packing; SGLang's fp8 parameters as
    `sglang_map` names them. To check first: bytes equal to the CPU's; the number of small kernels a round; on
    Blackwell SGLang may round scales to powers of two after loading, which the next reshard must survive. The same
    of scales that are powers of two.
    """
    weights = block(shape, dtype)
    on_device = weights.to(DEVICE)
    settle(60.0)
    started = time.perf_counter()
    quantised, scales = fp8.quantise(on_device), fp8.tile_scales(on_device)
    settle(60.0)
    seconds = time.perf_counter() - started
    expected, expected_scales = one_tile_at_a_time(weights)
    assert same_bytes(scales, expected_scales)
    assert same_bytes(quantised, expected)
    record("rate", weights.nbytes / seconds / 1e9, "GB/s")
    for convert in (fp8.quantise, fp8.tile_scales):
        assert same_bytes(convert(on_device, "powers_of_two"), convert(weights, "powers_of_two"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_checkpoints_tiles_are_read_as_on_the_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    """fp8 with both kinds of scales, among them a tiny and a huge one, and int4.

    Unverified on a GPU.

    checkpoints/quantised.py: a published checkpoint's fp8 tiles and int4 groups, multiplied with their scales on
    the GPU. To check first: bytes equal to the CPU's; the seconds in which a rank reads DeepSeek-V3 from a shared
    disk.
    """
    generator = torch.Generator().manual_seed(1)
    codes = (
        torch.randn(300, 200, generator=generator)
        .mul_(90)
        .clamp_(-448, 448)
        .to(torch.float8_e4m3fn)
    )
    scales = torch.tensor([[1e-3, 2.5e-41], [3e35, 0.7], [1e-12, 1.0]])
    packed = torch.randint(-(2**31), 2**31, (300, 25), generator=generator, dtype=torch.int64).int()
    of_groups = torch.rand(300, 7, generator=generator).bfloat16()
    files = {
        "a": codes,
        "a_scale_inv": scales,
        "b": codes.clone(),
        "b_scale_inv": scales.to(torch.float8_e8m0fnu),
    }
    save_file({**files, "c_packed": packed, "c_scale": of_groups}, tmp_path / "model.safetensors")
    with ExitStack() as stack:
        slices = Slices(tmp_path, stack)
        for name in "abc":
            planes = [
                torch.zeros(200, 150, dtype=dtype, device=device) for device in ("cpu", DEVICE)
            ]
            assert all(fill(plane, slices, name, (70, 270), (45, 195)) for plane in planes)
            assert same_bytes(planes[1], planes[0])
