"""The optimizer with remainders and moments in bfloat16: TransformerEngine's on a GPU, our torch one on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.device import DEVICE
from megarl.parallel.fused_adam import FusedAdam, joined, keeps_remainders
from tests.gpu import tiny
from tests.gpu.child import Child
from tests.gpu.conftest import Record
from tests.gpu.simulated.world import SETTINGS

ON_GPU = DEVICE == "cuda"
HAS_ENGINE = ON_GPU and importlib.util.find_spec("transformer_engine") is not None
FAMILY, STEPS, SIZE = "deepseek-v3", 4, 100_003
HALVES = {
    "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16",
    "adam_beta2": 0.95,
}  # fmt: skip


def adam(kind: Any, param: torch.Tensor, moments: torch.dtype, *, keeps: bool) -> Any:
    return kind(
        [param], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, adam_w_mode=True, master_weights=True,
        master_weight_dtype=torch.float32, exp_avg_dtype=moments, exp_avg_sq_dtype=moments, use_decoupled_grad=True,
        store_param_remainders=keeps,
    )  # fmt: skip


@pytest.mark.skipif(not HAS_ENGINE, reason="of TransformerEngine's optimizer, which needs a GPU")
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps", [True, False])
def test_transformer_engines_steps_are_ours(
    keeps: bool, moments: torch.dtype, record: Record
) -> None:
    """Unverified on a GPU.

    parallel/fused_adam.py: TransformerEngine's FusedAdam has the constructor, the state and the rounding of our torch
    one; `initialize_state` takes two arguments, of which Megatron 0.16.1 gives one, and megarl calls it itself
    (`dist_checkpoint.start_states`); with both moments in bfloat16 a step makes no copies in float32. To check first:
    the types of the state; the largest difference of the masters; the memory of a step with remainders.
    """
    engine_adam = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(SIZE, generator=draw).bfloat16()
    params = [start.to(DEVICE), start.clone()]
    optimizers = [
        adam(kind, param, moments, keeps=keeps)
        for kind, param in zip((engine_adam, FusedAdam), params, strict=True)
    ]
    for optimizer, param in zip(optimizers, params, strict=True):
        optimizer.initialize_state(param, keeps_remainders(optimizer, param))
    held = torch.cuda.memory_allocated()
    for _ in range(STEPS):
        gradient = torch.randn(SIZE, generator=draw)
        for optimizer, param in zip(optimizers, params, strict=True):
            param.decoupled_grad = gradient.to(param.device)  # type: ignore[attr-defined]
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            if param.is_cuda:
                taken = torch.cuda.max_memory_allocated() - held
    states = [
        {name: value.cpu() for name, value in optimizer.state[param].items()}
        for optimizer, param in zip(optimizers, params, strict=True)
    ]
    assert {name: value.dtype for name, value in states[0].items()} == {
        name: value.dtype for name, value in states[1].items()
    }
    masters = [
        joined(param.cpu(), state["master_param"]) if keeps else state["master_param"]
        for param, state in zip(params, states, strict=True)
    ]
    torch.testing.assert_close(*masters, rtol=1e-4, atol=1e-5)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            states[0][name].float(), states[1][name].float(), rtol=2**-6, atol=1e-6
        )
    record("largest gap of masters", float((masters[0] - masters[1]).abs().max()), "")
    record("bytes of a step, each weight", taken / SIZE, "B")
    if keeps and moments is torch.bfloat16:
        assert taken < 8 * SIZE  # the gradient, and no moment in float32


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU and not HAS_ENGINE, reason="without TransformerEngine it is refused")
def test_a_rank_learns_the_same_and_is_resumed(tmp_path: Path, record: Record) -> None:
    """Its memory handed over between steps; to the last bit as it was saved.

    Unverified on a GPU.

    parallel/optimizer.py move_optimizer: remainders and moments in bfloat16 to pinned memory and back; a fused
    optimizer that is saved, and one that is loaded before its first step. To check first: the losses beside those of
    masters and moments in float32.
    """
    path = str(tiny.write(tmp_path / "model", FAMILY))
    folder = tmp_path / "saved"
    folder.mkdir()
    steps: dict[str, list[Any]] = {}
    for name, optimizer in {"float32": {"adam_beta2": 0.95}, "halves": HALVES}.items():
        with _rank(path, optimizer) as child:
            steps[name] = []
            for _ in range(STEPS):
                steps[name].append(child.ask("step"))
                child.ask("offload")
                child.ask("onload")
            if name == "halves":
                child.ask("save", folder=str(folder))
                saved = child.ask("digest")
        record(f"a step, {name}", steps[name][-1]["seconds"], "s")
    with _rank(path, HALVES) as child:
        child.ask("load", folder=str(folder))
        assert child.ask("digest") == saved
    for step, other in zip(steps["halves"], steps["float32"], strict=True):
        for key in ("loss", "grad_norm"):
            assert step[key] == pytest.approx(other[key], rel=0.05, abs=2e-3), key


def _rank(path: str, optimizer: dict[str, Any]) -> Child:
    settings = SETTINGS[FAMILY] | {"dtype": "bfloat16", "optimizer": optimizer}
    return Child("tests.gpu.rank:Rank", None, folder=path, **settings)
