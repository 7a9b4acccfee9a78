"""FLOPs: by hand, and as torch counts them in transformers' models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.model.hf_config import model_shape
from megarl.model.shape import MlaShape, ModelShape
from megarl.training import flops
from megarl.training.batching import SampleRef
from tests.parallel import checkpoints

QWEN3_30B = ModelShape(
    48, 2048, 32, 4, 128, 151936, num_experts=128, experts_per_token=8, moe_ffn_size=768
)
DEEPSEEK_V3 = ModelShape(
    61, 7168, 128, 128, 128, 129280, num_experts=256, experts_per_token=8, moe_ffn_size=2048, num_dense_layers=3,
    ffn_size=18432, num_shared_experts=1, num_mtp_layers=1, mla=MlaShape(1536, 512, 128, 64, 128),
)  # fmt: skip
LENGTH = 13


@pytest.mark.parametrize(("shape", "active"), [(QWEN3_30B, 3.03e9), (DEEPSEEK_V3, 36.6e9)])
def test_one_token_costs_twice_the_parameters_it_meets(shape: ModelShape, active: float) -> None:
    """active: the model cards' 3.3e9 and 37e9, less the embedding table, which is looked up and not multiplied by."""
    assert flops.forward_flops(shape, 1) / 2 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3", "qwen3", "qwen2", "llama"])
def test_torch_counts_the_same(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = checkpoints.write(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    if "moe" in family or "deepseek" in family:
        model.set_experts_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.arange(LENGTH)[None])
    by_module = counter.get_flop_counts()
    positions = sum(
        sum(ops.values()) for name, ops in by_module.items() if name.endswith(".rotary_emb")
    )
    shape = model_shape(path)
    width = (
        shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.v_dim
        if shape.mla
        else 2 * shape.head_dim
    )
    hidden_pairs = LENGTH * (LENGTH - 1) // 2  # eager attention computes them, and masks them
    masked = 2 * hidden_pairs * shape.num_layers * shape.num_heads * width
    assert counter.get_total_flops() - positions - masked == flops.forward_flops(shape, LENGTH)
    assert flops.train_work(shape)(LENGTH) == 3 * flops.forward_flops(shape, LENGTH)
    parts = flops.module_forward_flops(shape, np.array([LENGTH]))
    of_mlps = [
        sum(ops.values())
        for name, ops in by_module.items()
        if re.search(r"layers\.\d+\.mlp$", name)
    ]
    assert sum(of_mlps) == parts["moe"] + parts["mlp"]
    ups = [
        sum(ops.values())
        for name, ops in by_module.items()
        if re.search(r"layers\.\d+\.self_attn\.(q_b_proj|kv_b_proj)$", name)
    ]
    assert sum(ups) == parts["mla_up_proj"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("cpu", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert flops.peak_flops(name) == peak


def test_the_speed_of_a_step_by_hand() -> None:
    total = sum(map(flops.train_work(QWEN3_30B), (100, 300)))
    refs = [SampleRef(0, 0, 100, 40, num_shared=60), SampleRef(0, 1, 300, 240, num_shared=60)]
    speed = flops.speed(QWEN3_30B, [refs], 2.0, 4, "NVIDIA H800")
    assert speed == pytest.approx(
        {
            "speed/train_tokens_per_s": 200.0,
            "speed/train_tflops_per_gpu": total / 8 / 1e12,
            "speed/train_mfu": total / (2 * 4 * 989.4e12),
        }
    )
    assert "speed/train_mfu" not in flops.speed(QWEN3_30B, [refs], 1.0, 1, "cpu")
    of_prompt = flops.train_work(QWEN3_30B)(60)
    # in one update a prompt is computed once, in two it is computed in both
    for updates, saved in (([refs], of_prompt), ([refs[:1], refs[1:]], 0)):
        shared = flops.speed(QWEN3_30B, updates, 2.0, 4, "NVIDIA H800", shares_prompts=True)
        assert shared["speed/train_tokens_per_s"] == 200.0
        operations = (total - saved) / 8 / 1e12
        assert shared["speed/train_tflops_per_gpu"] == pytest.approx(operations)
