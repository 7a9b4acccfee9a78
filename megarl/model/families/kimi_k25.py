"""Kimi-K2.5 and K2.6: the language model is DeepSeek-V3's; the vision tower and its projector are not trained."""

from __future__ import annotations

from dataclasses import replace

from megarl.model.families.deepseek_v3 import DEEPSEEK_V3
from megarl.model.families.wrapper import Wrapper

KIMI_K25 = replace(
    DEEPSEEK_V3,
    architecture="KimiK25ForConditionalGeneration",
    models="Kimi-K2.5, K2.6 (text; the vision tower is kept as it is)",
    attention="as DeepSeek-V3's",
    layers="as DeepSeek-V3's",
    wrapper=Wrapper(
        "text_config",
        own_prefix="",
        prefix="language_model.",
        untrained_prefixes=("vision_tower.", "mm_projector."),
        # SGLang makes no processor of images then (configs/model_config.py), but the tower even so (models/kimi_k25.py)
        without_tower={"language_model_only": True},
        tower_params=471_143_920,
    ),
)
