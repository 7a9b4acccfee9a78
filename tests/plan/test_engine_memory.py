"""What an engine keeps while training computes, by hand; the rest of its memory is in test_fit.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.model.hf_config import model_shape
from megarl.model.precision import Precision
from megarl.placement.engine_layout import EngineLayout
from megarl.plan.engine_memory import (
    DEEPEP_MIB,
    MIB,
    Settings,
    kept_bytes,
    request_bytes,
    weight_bytes,
)
from megarl.plan.model_size import model_sizes
from megarl.plan.run_plan import group_limits
from megarl.resharding import sglang_map
from megarl.resharding.routes import item_bytes
from tests.plan import plans


def test_graphs_and_deepeps_buffers_are_kept() -> None:
    chosen, gather = Settings(0.8, 8192, 64, None, 2), EngineLayout(1, 32, 32, 32)
    assert kept_bytes(chosen, gather) == 64 * 2 * MIB
    with_deepep = replace(gather, deepep=True)
    assert kept_bytes(chosen, with_deepep) == (64 * 2 + DEEPEP_MIB) * MIB
    of_prompts = replace(chosen, prefill_graphs_mib=1536)
    assert kept_bytes(of_prompts, gather) == (64 * 2 + 1536) * MIB


def test_deepeps_buffers_are_about_those_of_its_own_formula() -> None:
    """DeepSeek-V3, 128 tokens a rank: two buffers to send and two to receive, each of 256 experts' combined tokens.

    A token has 7,168 numbers in bfloat16 and two for each 128 of them (github.com/deepseek-ai/DeepEP, csrc/config.hpp).
    """
    combined = 256 * 128 * (7168 * 2 + 7168 // 128 * 4)
    assert 0.85 < 4 * combined / (DEEPEP_MIB * MIB) < 1.0


@pytest.mark.slow
def test_states_of_linear_attention_are_beside_the_cache(tmp_path: Path) -> None:
    """Qwen3-Next in bfloat16: 12 layers with 2 heads of 256; 36 with 32 states of 128 x 128 and 8,192 channels."""
    recipe = plans.recipe(tmp_path, "qwen3-next", 8, ep=8, engine={"count": 1, "tp": 8, "ep": 8})
    plan = plans.count(recipe, plans.H800, model_sizes(recipe))
    assert plan.kv.token_bytes == 12 * 2 * 1 * 256 * 2
    shape = model_shape(recipe.model.path)
    of_request = request_bytes(shape, EngineLayout(1, 8, 8))
    assert of_request == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2) / 8
    cache = plan.kv.tokens * plan.kv.token_bytes
    running = cache * 0.9 // (3 * of_request)
    assert plan.kv.concurrency_mean == min(
        running, 512 * 16, plan.kv.tokens // plan.kv.running_tokens
    )
    limits = group_limits(recipe, plans.H800, plan)
    assert 0 < limits.slots == min(running, 512 * 16)
    few = replace(plan, kv=replace(plan.kv, most_states=100))
    assert group_limits(recipe, plans.H800, few).slots == 100


def test_plain_weights_of_fp8_engines_count_as_such() -> None:
    """Every rectangle of a small model, against the sum of one layer of each kind."""
    shape = replace(plans.V3, num_layers=6, num_dense_layers=2, num_mtp_layers=1)
    for num_last in (0, 3, 5):
        precision = Precision("fp8", num_last, ("kv_b_proj", "shared_experts"))
        engine = EngineLayout(1, 16, 16, dp=8, precision=precision, draft=1)
        expected = [0] * engine.tp
        for part in sglang_map.parts(shape, engine):
            for rank in part.members:
                expected[rank] += sum(
                    shard.area * item_bytes(shard.dtype or "bfloat16") for shard in part.shards
                )
        assert shape.mla
        of_heads = shape.num_heads // 2 * (shape.mla.nope_dim + shape.mla.v_dim)
        derived = 7 * of_heads * shape.mla.kv_lora_rank * 2
        assert weight_bytes(shape, engine, "bfloat16") == [each + derived for each in expected]
