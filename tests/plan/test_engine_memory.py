"""What an engine keeps while training computes, by hand; the rest of its memory is in test_fit.py."""

from __future__ import annotations

from dataclasses import replace

from megarl.placement.engine_layout import EngineLayout
from megarl.plan.engine_memory import DEEPEP_MIB, MIB, Settings, kept_bytes


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
