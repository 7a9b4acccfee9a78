"""Reading `config.json`: every family's integers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.parallel.hf_config import Yarn, hf_facts, model_shape
from megarl.types import MlaShape, ModelShape, UserFault

SHAPE = ModelShape(2, 6, 4, 2, 4, 50, 4, 2, 8)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 50,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "tie_word_embeddings": False,
}
DEEPSEEK: dict[str, Any] = {  # the fields of DeepSeek-V3's own config.json that megarl reads
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
YARN = DEEPSEEK["rope_scaling"]
DENSE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_shape_is_read(tmp_path: Path) -> None:
    assert model_shape(write(tmp_path, CONFIG)) == SHAPE


def test_newer_name_of_the_expert_count(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_experts"} | {"num_local_experts": 4}
    assert model_shape(write(tmp_path, config)) == SHAPE


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"hidden_size": "6"}, "hidden_size is '6'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
    ],
)
def test_unsupported_configs(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserFault) as caught:
        model_shape(write(tmp_path, CONFIG | change))
    assert problem in caught.value.problem
    assert caught.value.where == str(tmp_path / "config.json")


def test_missing_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match="no such file; set model.path"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserFault, match="cannot be read"):
        model_shape(tmp_path)


def test_deepseek_v3(tmp_path: Path) -> None:
    mla = MlaShape(1536, 512, 128, 64, 128)
    assert model_shape(write(tmp_path, DEEPSEEK)) == ModelShape(
        61, 7168, 128, 128, 128, 129280, 256, 8, 2048, num_dense_layers=3, ffn_size=18432, num_shared_experts=1,
        router_bias=True, qk_norm=False, num_mtp_layers=1, mla=mla,
    )  # fmt: skip
    facts = hf_facts(tmp_path)
    assert facts.yarn == Yarn(40, 4096, 32, 1, 1, 1)
    assert (facts.num_groups, facts.top_groups, facts.routed_scaling) == (8, 4, 2.5)


def test_deepseek_without_query_compression(tmp_path: Path) -> None:
    shape = model_shape(write(tmp_path, DEEPSEEK | {"q_lora_rank": None, "num_nextn_predict_layers": None}))
    assert shape.mla == MlaShape(None, 512, 128, 64, 128)
    assert shape.num_mtp_layers == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"topk_group": 8}, "num_experts_per_tok / topk_group is 8 / 8"),  # Megatron would score groups otherwise
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),  # these five: other numbers than transformers'
        ({"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok is 1"),
        ({"rope_scaling": YARN | {"attention_factor": 1.3}}, "set attention_factor"),
        ({"rope_scaling": YARN | {"truncate": False}}, "set truncate"),
        ({"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": None}}, "set mscale without mscale_all_dim"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
    ],
)
def test_unsupported_facts(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserFault) as caught:
        hf_facts(write(tmp_path, DEEPSEEK | change))
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("architecture", "qk_norm", "qkv_bias"),
    [("Qwen3ForCausalLM", True, False), ("Qwen2ForCausalLM", False, True), ("LlamaForCausalLM", False, False)],
)
def test_dense_families(tmp_path: Path, architecture: str, qk_norm: bool, qkv_bias: bool) -> None:
    shape = model_shape(write(tmp_path, DENSE | {"architectures": [architecture], "tie_word_embeddings": True}))
    assert shape == ModelShape(
        2, 64, 4, 2, 16, 50, num_dense_layers=2, ffn_size=96, qk_norm=qk_norm, qkv_bias=qkv_bias, tied=True
    )
    assert shape.is_dense(1)
