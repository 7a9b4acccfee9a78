"""Experts that tokens reach by DeepEP: an engine of two GPUs samples as transformers does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.model.hf_config import model_shape
from megarl.placement.engine_layout import EngineLayout
from megarl.rollout.sglang.engine import Engine
from megarl.types.sampling import Sampling
from tests.parallel import checkpoints
from tests.rollout.sglang.test_engine import BFLOAT16, mean_diff
from tests.tiny_engines import Reference, write_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="DeepEP sends tokens between GPUs"),
]

LAYOUT = EngineLayout(
    1, 2, 2, dp=2, whole_dense=True, whole_shared=True, group_head=True, deepep=True
)


def test_logprobs_are_those_of_transformers(
    tmp_path: Path, build_engine: Callable[..., Engine]
) -> None:
    # DeepEP has kernels for some hidden sizes, from 2,048 on.
    """Unverified on a GPU.

    placement/engine_layout.py deepep: `moe_a2a_backend` deepep, in bfloat16 with `moe_runner_backend` deep_gemm:
    nothing but the parameters' shapes was seen. To check first: 8 GPUs or more: the logprob gap; at most 128
    sequences a GPU, or SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK in the environment; NVSHMEM's memory while
    training has the GPU.
    """
    folder = checkpoints.write(tmp_path, "deepseek-v3", hidden_size=2048, moe_intermediate_size=512)
    write_tokenizer(folder)
    assert LAYOUT.errors(model_shape(folder), 2) == []
    engine = build_engine(layout=LAYOUT, model_path=str(folder), dtype="bfloat16")
    reference, prompt = Reference(folder), [3, 7, 15, 8, 18, 4]
    samples = asyncio.run(engine.generate(prompt, Sampling(8, 8)))
    assert mean_diff(samples, reference, prompt) < BFLOAT16
