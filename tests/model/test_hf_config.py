"""Reading `config.json`: every family's integers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4MoeLiteConfig

from megarl.model.hf_config import end_token_ids, hf_facts, model_shape, read_model
from megarl.model.rope import with_rope_scaling
from megarl.model.shape import ModelShape
from megarl.types import UserError

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
DEEPSEEK = json.loads(
    (Path(__file__).parents[2] / "recipes/models/deepseek-v3/config.json").read_text()
)
YARN = DEEPSEEK["rope_scaling"]


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("minimax-m2", {"use_qk_norm": None}, "use_qk_norm is None"),
        ("minimax-m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ("minimax-m2", {"rotary_dim": 130}, "rotary_dim is 130, and head_dim 128"),
        ("minimax-m2", {"rotary_dim": None}, "rotary_dim is missing"),
        ("hy-v3", {"route_norm": None}, "route_norm is not true"),
        ("glm-5", {"index_topk_freq": 4}, "index_topk_freq is 4"),
        ("glm-5", {"indexer_types": ["full", "shared"]}, "indexer_types is"),
        ("glm-5", {"index_topk_pattern": "FSFS"}, "index_topk_pattern is 'FSFS'"),
        ("glm-5", {"index_kpool": 4}, "index_kpool is 4"),
        ("glm-5", {"index_head_dim": 32}, "index_head_dim is 32"),
        ("deepseek-v3.2", {"index_topk": None}, "index_topk is missing"),
        ("deepseek-v3.2", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("deepseek-v3.2", {"layer_types": ["full_attention"]}, "layer_types has full_attention"),
        ("mixtral-8x7b", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("mixtral-8x7b", {"head_dim": 64}, "head_dim is 64"),
        (
            "qwen1.5-moe-a2.7b",
            {"shared_expert_intermediate_size": 5000},
            "shared_expert_intermediate_size is 5000",
        ),
        ("qwen1.5-moe-a2.7b", {"qkv_bias": False}, "qkv_bias is false"),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], problem: str
) -> None:
    published = Path(__file__).parents[1] / "published" / f"{name}.json"
    of_recipe = Path(__file__).parents[2] / "recipes" / "models" / name / "config.json"
    file = of_recipe if of_recipe.exists() else published
    path = write(tmp_path, json.loads(file.read_text()))
    hf_facts(path)
    write(tmp_path, json.loads(file.read_text()) | change)
    with pytest.raises(UserError, match=problem):
        hf_facts(path)


def test_newer_name_of_the_expert_count(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_experts"} | {
        "num_local_experts": 4
    }
    assert model_shape(write(tmp_path, config)) == SHAPE


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"hidden_size": "6"}, "hidden_size is '6'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention",
        ),
    ],
)
def test_unsupported_configs(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        model_shape(write(tmp_path, CONFIG | change))
    assert problem in caught.value.problem
    assert caught.value.where == str(tmp_path / "config.json")


def test_missing_and_broken_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; set model.path"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        model_shape(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        # Megatron would score groups otherwise
        ({"topk_group": 8}, "num_experts_per_tok / topk_group is 8 / 8"),
        # these five: other numbers than transformers'
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "num_experts_per_tok is 1"),
        ({"rope_scaling": YARN | {"attention_factor": 1.3}}, "set attention_factor"),
        ({"rope_scaling": YARN | {"truncate": False}}, "set truncate"),
        (
            {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": None}},
            "set mscale without mscale_all_dim",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
    ],
)
def test_unsupported_facts(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        hf_facts(write(tmp_path, DEEPSEEK | change))
    assert problem in caught.value.problem


QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mscale_all_dim": 1.0}, "set mscale_all_dim without mscale"),
        ({"attention_factor": 1.3}, "set attention_factor"),  # SGLang does not read it
        ({"attn_factor": 2}, "set attn_factor"),  # transformers does not read it
        ({"truncate": "no"}, "set truncate to something else"),
        ({"factor": None}, "factor is 0.0"),
    ],
)
def test_variants_of_yarn_that_a_side_lacks(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        hf_facts(write(tmp_path, CONFIG | {"rope_scaling": QWEN_YARN | change}))
    assert problem in caught.value.problem


@pytest.mark.parametrize("new", [True, False])
def test_a_recipes_scaling_takes_the_place_of_the_files(tmp_path: Path, new: bool) -> None:
    file = CONFIG | {"max_position_embeddings": 40_960}
    if new:
        file |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    else:
        file |= {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    model = read_model(write(tmp_path, file), rope_scaling=QWEN_YARN)
    facts = model.required_facts
    assert facts.yarn and (facts.yarn.factor, facts.yarn.original_positions) == (4.0, 32_768)
    assert facts.rope_theta == 1e6
    assert model.context_tokens == facts.max_positions == 131_072
    # what an export has
    exported = with_rope_scaling(file, QWEN_YARN)
    assert hf_facts(write(tmp_path, exported)) == facts


def test_a_family_without_such_scaling_refuses_a_recipes(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, DEEPSEEK), rope_scaling=QWEN_YARN)
    assert model.error and model.error.where == "model.rope_scaling"
    assert model.known_shape


@pytest.mark.parametrize(
    ("base", "change", "problem"),
    [
        (CONFIG, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than the experts (4)"),
        (CONFIG, {"num_experts_per_tok": -1}, "num_experts_per_tok is -1"),
        (CONFIG, {"num_experts": True}, "num_experts is True"),
        (CONFIG, {"num_experts": 10**9}, "num_experts is 1e+09"),
        (CONFIG, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1e+09"),
        (CONFIG, {"num_hidden_layers": 4000, "num_experts": 4000}, "layers x experts is 16000000"),
        (CONFIG, {"vocab_size": 10**30}, "vocab_size is 1e+30"),
        (CONFIG, {"vocab_size": 50.0}, "vocab_size is 50.0"),
        (CONFIG, {"num_key_value_heads": 3}, "num_attention_heads (4) is no multiple of num_key_value_heads (3)"),
        (CONFIG, {"head_dim": 5}, "head_dim is odd (5)"),
        (CONFIG, {"head_dim": None}, "head_dim is missing"),  # 4 heads do not share out 6
        (CONFIG, {"head_dim": 0}, "head_dim is 0"),
        (CONFIG, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        (CONFIG, {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        (CONFIG, {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        (CONFIG, {"rope_theta": 0}, "rope_theta is 0"),
        (CONFIG, {"rope_theta": float("nan")}, "rope_theta is nan"),
        (CONFIG, {"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        (CONFIG, {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (CONFIG, {"max_position_embeddings": "512"}, "max_position_embeddings is '512'"),
        (CONFIG, {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        (CONFIG, {"layer_types": 3}, "layer_types is 3"),
        (DEEPSEEK, {"n_group": 7}, "n_group (7) does not divide the experts (256)"),
        (DEEPSEEK, {"n_group": "8"}, "n_group is '8'"),
        (DEEPSEEK, {"topk_group": 9}, "topk_group is 9, more than n_group (8)"),
        (DEEPSEEK, {"num_experts_per_tok": 200}, "more than the experts of its groups (128)"),
        (DEEPSEEK, {"first_k_dense_replace": 62}, "first_k_dense_replace is more than num_hidden_layers"),
        (DEEPSEEK, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is odd (63)"),
        (DEEPSEEK, {"routed_scaling_factor": "2.5"}, "routed_scaling_factor is '2.5'"),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn"}}, "factor is 0.0"),
        (DEEPSEEK, {"rope_scaling": YARN | {"original_max_position_embeddings": None}}, "_embeddings is missing"),
        (DEEPSEEK, {"rope_scaling": YARN | {"beta_fast": []}}, "beta_fast is []"),
    ],
)  # fmt: skip
def test_values_that_no_model_has(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        model_shape(write(tmp_path, base | change))
        hf_facts(tmp_path)
    assert problem in caught.value.problem
    assert caught.value.where == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    "change", [{}, {"first_k_dense_replace": 2}, {"mlp_layer_types": ["dense", "dense", "sparse"]}]
)
def test_the_dense_layers_of_glm_lite_are_those_of_transformers(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    config = DEEPSEEK | {"architectures": ["Glm4MoeLiteForCausalLM"], "num_hidden_layers": 3}
    del config["first_k_dense_replace"], config["rope_scaling"]
    num_dense = model_shape(write(tmp_path, config | change)).num_dense_layers
    if (
        "first_k_dense_replace" in change
    ):  # a key of older files, which transformers 5 does not read
        assert num_dense == 2
    else:
        kinds = Glm4MoeLiteConfig(num_hidden_layers=3, **change).mlp_layer_types
        assert num_dense == (kinds or []).count("dense")


def test_a_config_that_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(UserError, match="cannot be read"):
        model_shape(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "found"),
    [
        ({}, None, set()),
        ({"eos_token_id": None}, {}, set()),
        ({"eos_token_id": 3}, None, {3}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4, 5}),
        ({}, {"eos_token_id": [0]}, {0}),
    ],
)
def test_end_tokens(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, found: set[int]
) -> None:
    write(tmp_path, CONFIG | config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(tmp_path) == found


@pytest.mark.parametrize("value", [50, -1, "<eos>", [3, None], True, 1.0])
def test_an_end_token_that_the_vocabulary_does_not_have(tmp_path: Path, value: object) -> None:
    write(tmp_path, CONFIG)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UserError, match="the vocabulary has 50 tokens") as caught:
        end_token_ids(tmp_path)
    assert caught.value.where == str(tmp_path / "generation_config.json")


OWN = "tests.model.mixed_family:"


def test_a_family_of_a_user_comes_before_that_of_the_table(tmp_path: Path) -> None:
    write(tmp_path, CONFIG | {"architectures": ["MixedForCausalLM"]})
    assert model_shape(tmp_path, OWN + "MIXED").family == OWN + "MIXED"
    write(tmp_path, CONFIG)
    assert model_shape(tmp_path, OWN + "MIXED") == SHAPE, "a checkpoint of another architecture"


@pytest.mark.parametrize(
    ("architecture", "family", "problem"),
    [
        ("FalconForCausalLM", None, r'architectures is \["FalconForCausalLM"\].*docs/models.md'),
        ("Qwen3LongForCausalLM", None, "the name nearest to it is Qwen3ForCausalLM"),
        ("OtherForCausalLM", OWN + "MIXED", "model.family is .*:MIXED, of MixedForCausalLM"),
        ("MixedForCausalLM", OWN + "layer", "model.family: .*:layer is a function"),
        ("MixedForCausalLM", OWN + "NONE", "model.family: .* has no 'NONE'"),
        ("MixedForCausalLM", "no_such_module:ROW", "no_such_module cannot be imported"),
        ("MixedForCausalLM", "MIXED", "'MIXED' is not module:ROW"),
    ],
)
def test_a_family_that_is_not_there_is_refused(
    tmp_path: Path, architecture: str, family: str | None, problem: str
) -> None:
    write(tmp_path, CONFIG | {"architectures": [architecture]})
    with pytest.raises(UserError, match=problem):
        model_shape(tmp_path, family)


@pytest.mark.parametrize(
    ("config", "change", "problem"),
    [
        (CONFIG, {"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid".*"softmax", which Qwen3M'),
        (CONFIG, {"n_group": 8}, "n_group is 8.*where it is 1, which Qwen3MoeForCausalLM has"),
        (CONFIG, {"sliding_window": 4096}, "sliding_window is 4096"),
        (DEEPSEEK, {"scoring_func": "softmax"}, 'scoring_func is "softmax".*"sigmoid"'),
        (DEEPSEEK, {"topk_method": "greedy"}, 'topk_method is "greedy".*"noaux_tc"'),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_key_and_value(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        model_shape(write(tmp_path, config | change))
