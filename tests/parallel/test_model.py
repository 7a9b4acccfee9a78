"""What is read from `config.json`, what may be passed to Megatron, and the words of a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from megarl.config import TrainConfig
from megarl.model.hf_config import hf_facts, model_shape
from megarl.parallel import model
from megarl.parallel.local_spec import DuplicatedLinear
from megarl.parallel.model import transformer_config
from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError
from tests.gpu import tiny
from tests.parallel.checkpoints import YARN


@pytest.fixture
def edited(checkpoint_path: Path, tmp_path: Path) -> Any:
    """A function: the checkpoint's config.json with some keys changed (None: removed), in a folder of its own."""

    def edit(**changes: Any) -> Path:
        config = json.loads((checkpoint_path / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return edit


def test_facts_as_transformers_4_wrote_them(edited: Any) -> None:
    assert (
        hf_facts(edited(rope_parameters=None, rope_theta=123.0, rope_scaling=None)).rope_theta
        == 123.0
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            "rope_type is 'dynamic'",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type is 'linear'",
        ),
    ],
)
def test_unsupported_variants_are_refused(edited: Any, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        hf_facts(edited(**changes))
    assert caught.value.where.endswith("config.json")


def config(path: Path, options: dict[str, Any]) -> Any:
    train = TrainConfig(lr=1.0, megatron=options)
    return transformer_config(
        hf_facts(path), model_shape(path), TrainLayout(4, 2, 2, 2), torch.bfloat16, train
    )


def test_unnormalised_routing_takes_the_softmax_first(edited: Any) -> None:
    assert config(edited(norm_topk_prob=False), {}).moe_router_pre_softmax is True


def test_stages_may_compute_different_parts_again(checkpoint_path: Path) -> None:
    train = TrainConfig(lr=1.0, recompute={"layer": 1, "core_attn": 2})
    first, second = (
        transformer_config(
            hf_facts(checkpoint_path), model_shape(checkpoint_path), TrainLayout(4, 2, 2, 2), torch.bfloat16,
            train, stage,
        )
        for stage in range(2)
    )  # fmt: skip
    assert (first.recompute_granularity, second.recompute_granularity) == ("full", "selective")
    assert second.recompute_modules == ["core_attn"]


def test_options_pass_through(checkpoint_path: Path) -> None:
    options = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert config(checkpoint_path, options).recompute_num_layers == 1


def test_megatrons_own_refusal_is_a_users_fault(checkpoint_path: Path) -> None:
    with pytest.raises(UserError, match="train.megatron") as caught:
        config(checkpoint_path, {"recompute_granularity": "sometimes"})
    assert "sometimes" in str(caught.value)


def test_a_gpu_without_transformer_engine_is_refused_by_the_package() -> None:
    with pytest.raises(UserError) as caught:
        model.select_layers(TrainConfig(lr=1.0), torch.bfloat16, has_engine=False)
    assert str(caught.value).startswith(
        "train.local_layers: TransformerEngine cannot be used (No module named "
    )
    assert (
        "install what requirements/gpu.txt names (docs/install.md), or set it to true"
        in caught.value.hint
    )


def test_a_gpu_without_transformer_engine_has_the_layers_that_a_recipe_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole model is built and run from them on CPU in every other test here."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(multi_latent_attention, "TELinear", None)
    model.select_layers(TrainConfig(lr=1.0, local_layers=True), torch.float32, has_engine=False)
    assert moe_utils.te_general_gemm is None
    assert multi_latent_attention.TELinear is DuplicatedLinear


def test_kernels_that_leave_yarns_scale_out_are_refused(
    edited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = edited(rope_parameters={**YARN, "rope_theta": 1e4})
    monkeypatch.setattr(
        model, "TRANSFORMER_ENGINE", True
    )  # whose kernel is the default of other models
    assert config(path, {"gradient_accumulation_fusion": False}).apply_rope_fusion is False
    for option in ("apply_rope_fusion", "fused_single_qkv_rope"):
        with pytest.raises(UserError, match=f"train.megatron.{option}: .* leaves out the factor"):
            config(path, {option: True})


@pytest.mark.parametrize(
    ("changes", "is_fused"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, False),
        ({"qk_nope_head_dim": 24}, False),
        ({"v_head_dim": 48}, False),
        ({"qk_rope_head_dim": 24}, False),
        ({"qk_rope_head_dim": 2}, False),
    ],
    ids=str,
)
def test_rope_is_fused_where_megatron_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], is_fused: bool
) -> None:
    """As with TransformerEngine: latent attention's kernels are of YaRN, and Triton counts to powers of two alone."""
    monkeypatch.setattr(model, "TRANSFORMER_ENGINE", True)
    folder = tiny.write_config(tmp_path / "model", "deepseek-v3", **{"v_head_dim": 32, **changes})
    assert config(folder, {}).apply_rope_fusion is is_fused


def test_transformer_engine_is_given_neither_float32_nor_shared_prefixes() -> None:
    with pytest.raises(UserError, match="^model.dtype: float32"):
        model.select_layers(TrainConfig(lr=1.0), torch.float32, has_engine=True)
    with pytest.raises(UserError, match="^train.share_prefixes: true, but TransformerEngine"):
        model.select_layers(TrainConfig(lr=1.0, share_prefixes=True), torch.bfloat16, True)
