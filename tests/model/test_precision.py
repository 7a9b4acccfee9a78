"""The precision contract of every family: each tensor has one format, by a rule that is spelled out here again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.model.families import FAMILIES, family_of
from megarl.model.hf_config import model_shape
from megarl.model.precision import FP8_TILES, PLAIN, Kind, Precision, plain_modules
from megarl.model.shape import ModelShape
from megarl.model.tensors import tensors
from tests.resharding.meta_engines import write_config
from tests.resharding.test_real_engines import CONFIGS

# what DeepSeek-V3 and the families after it are published without tiles for, and what is no matrix
NEVER = re.compile(
    r"norm\.weight$|layernorm\.weight$|enorm|hnorm|pre_fc_norm|\.bias$|embed_tokens|lm_head|e_score_correction_bias$|eh_proj"
    r"|(mlp|block_sparse_moe)\.gate\.weight$|router\.gate\.weight$|expert_bias$|shared_expert_gate"
    r"|linear_attn\.(A_log|dt_bias|conv1d|in_proj_ba|in_proj_[ab]\b)|mtp\.fc|indexer\.weights_proj"
)
# where rotary positions turn neighbours, SGLang has it in one parameter with weights_proj
FUSED = re.compile(r"\.indexer\.wk\.weight$")
SHARED = re.compile(r"\.(shared_experts?|shared_mlp)\.(gate|up|down)_proj\.weight$")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[ModelShape]:
    folder: Path = tmp_path_factory.mktemp("configs")
    paths = [
        write_config(folder / name, config)
        for name, config in CONFIGS.items()
        if config["architectures"][0] in FAMILIES
    ]
    return [model_shape(path) for path in paths]


def is_never(shape: ModelShape, name: str) -> bool:
    is_fused = bool(shape.indexer and shape.indexer.interleaved_rope and FUSED.search(name))
    return is_fused or bool(NEVER.search(name))


def test_every_tensor_of_every_family_has_one_entry(models: list[ModelShape]) -> None:
    seen = {family_of(shape).architecture for shape in models}
    assert seen == FAMILIES.keys()
    for shape in models:
        entries = FP8_TILES.entries(shape)
        assert entries.keys() == tensors(shape).keys()
        for name, entry in entries.items():
            expected = "plain" if is_never(shape, name) else "fp8"
            assert entry.format == expected, (shape.family, name)
            assert entry.rule
        assert {entry.format for entry in PLAIN.entries(shape).values()} == {"plain"}


def test_what_stays_plain_is_told() -> None:
    assert PLAIN.in_words("bfloat16") == "bfloat16"
    assert FP8_TILES.in_words("bfloat16") == "fp8"
    mixed = Precision("fp8", 4, ("kv_b_proj", "shared_experts"))
    told = "fp8 but for the last 4 layers and kv_b_proj and shared experts"
    assert mixed.in_words("bfloat16") == told


@pytest.mark.parametrize("kinds", [(), ("kv_b_proj",), ("shared_experts",)], ids=str)
def test_last_layers_and_kinds_stay_plain(
    models: list[ModelShape], kinds: tuple[Kind, ...]
) -> None:
    """A multi-token prediction layer, which drafts, is none of the last layers."""
    for shape in models:
        last = f"model.layers.{shape.num_layers - 1}."
        precision = Precision("fp8", plain_last_layers=1, plain=kinds)
        for name, entry in precision.entries(shape).items():
            is_kind = "kv_b_proj" in kinds and name.endswith("kv_b_proj.weight")
            is_kind |= "shared_experts" in kinds and bool(SHARED.search(name))
            is_plain = is_never(shape, name) or name.startswith(last) or is_kind
            assert entry.format == ("plain" if is_plain else "fp8"), (shape.family, name)
        modules = plain_modules(shape, precision)
        assert modules[0] == last.removesuffix(".")
        has_shared = any(SHARED.search(name) for name in tensors(shape))
        assert len(modules) == 1 + ("kv_b_proj" in kinds) + (
            "shared_experts" in kinds and has_shared
        )
