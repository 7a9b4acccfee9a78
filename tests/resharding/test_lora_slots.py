from __future__ import annotations

import pytest

from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import lora_slots
from tests.resharding.test_sglang_map import DEEPSEEK, QWEN3_MOE

SIZE = LoraSize(3, 2, 6.0, ())


@pytest.mark.parametrize(
    ("shape", "engine"),
    [
        (QWEN3_MOE, EngineLayout(2, 4, 2, dp=2, first=3)),
        (DEEPSEEK, EngineLayout(1, 4, 4)),
        (DEEPSEEK, EngineLayout(1, 2, 1)),
    ],
)
def test_the_sizes_of_all_ranks_are_those_of_each(shape: ModelShape, engine: EngineLayout) -> None:
    each = [lora_slots.slot_sizes(shape, engine, rank, SIZE) for rank in range(engine.tp)]
    assert lora_slots.slot_sizes_of_ranks(shape, engine, SIZE) == each
    assert all(each)
