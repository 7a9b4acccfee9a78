"""GLM-5 and GLM-5.1: DeepSeek-V3.2's layers with other sizes, and one group of experts."""

from __future__ import annotations

from dataclasses import replace

from megarl.model.families.deepseek_v32 import DEEPSEEK_V32

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    architecture="GlmMoeDsaForCausalLM",
    models="GLM-5 and GLM-5.1",
    attention="as DeepSeek-V3.2's, without YaRN",
    layers="as DeepSeek-V3's, with one group of experts",
    has_yarn=False,
)
