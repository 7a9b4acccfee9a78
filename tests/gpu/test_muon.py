"""Muon on a device: its products beside the CPU's, and a rank that learns as on the CPU and is resumed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.device import DEVICE
from megarl.parallel import newton_schulz
from tests.gpu import tiny
from tests.gpu.child import ON_CPU, Child
from tests.gpu.conftest import Record
from tests.gpu.simulated.world import SETTINGS

ON_GPU = DEVICE == "cuda"
FAMILY, STEPS = "deepseek-v3", 3
# (matrices, rows, columns): experts and an output projection of DeepSeek-V3 on a GPU, elsewhere small ones
SIZES = [(16, 2048, 7168), (1, 7168, 16384)] if ON_GPU else [(4, 64, 224), (1, 224, 512)]


@pytest.mark.parametrize("size", SIZES)
def test_matrices_are_made_orthogonal_as_on_the_cpu(
    size: tuple[int, int, int], record: Record
) -> None:
    """Unverified on a GPU.

    parallel/newton_schulz.py: products in bfloat16, whose sums cuBLAS may reduce in bfloat16 too. To check first: the
    largest singular value; the share of a GPU's operations that a stack of experts reaches, which the plan takes for
    that of other products.
    """
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
    own = drawn.to(DEVICE)
    made = newton_schulz.orthogonalised(own)
    float(made.sum())
    started = time.perf_counter()
    float(newton_schulz.orthogonalised(own).sum())
    seconds = time.perf_counter() - started
    record(f"operations of {size}", size[0] * newton_schulz.flops(*size[1:]) / seconds, "FLOP/s")
    last = made[-1:].cpu()
    expected = newton_schulz.orthogonalised(drawn[-1:])
    gap = float((last - expected).float().norm() / expected.float().norm())
    record(f"gap of {size}", gap, "")
    assert gap < 0.05
    assert 0.5 < float(torch.linalg.matrix_norm(last[0].float(), 2)) < 1.5


@pytest.mark.slow
def test_a_rank_learns_as_on_the_cpu_and_is_resumed(tmp_path: Path, record: Record) -> None:
    """Its memory handed over between steps; to the last bit as it was saved.

    Unverified on a GPU.

    parallel/muon.py: masters and momentum in pinned memory and back. parallel/matrix_exchange.py: one all-to-all of
    uneven parts over NCCL in each round, of the ranks of a pipeline stage. To check first: the layouts of
    tests/parallel/test_muon.py; the seconds of the exchange; the memory of a round.
    """
    path = str(tiny.write(tmp_path / "model", FAMILY))
    folder = tmp_path / "saved"
    folder.mkdir()
    steps: dict[str, list[Any]] = {}
    for name, environment in {"cpu": ON_CPU, "own": None}.items():
        with _rank(path, environment) as child:
            steps[name] = []
            for _ in range(STEPS):
                steps[name].append(child.ask("step"))
                child.ask("offload")
                child.ask("onload")
            if name == "own":
                child.ask("save", folder=str(folder))
                saved = child.ask("digest")
        record(f"a step, {name}", steps[name][-1]["seconds"], "s")
    with _rank(path, None) as child:
        child.ask("load", folder=str(folder))
        assert child.ask("digest") == saved
    for step, other in zip(steps["own"], steps["cpu"], strict=True):
        for key in ("loss", "grad_norm"):
            assert step[key] == pytest.approx(other[key], rel=0.05, abs=2e-3), key


def _rank(path: str, environment: dict[str, str] | None) -> Child:
    settings: dict[str, Any] = {
        **SETTINGS[FAMILY],
        "dtype": "bfloat16",
        "optimizer_name": "muon",
    }
    return Child("tests.gpu.rank:Rank", environment, folder=path, **settings)
