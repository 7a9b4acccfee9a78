"""Tiny checkpoints of every family, written by transformers: random weights, large enough that a wrong slice shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megarl.cpu import sglang_patches
from tests.parallel import wrapped

EOS = 1
COMMON: Mapping[str, Any] = {
    "vocab_size": 47,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
# a model of 32 positions, and what lets it have 128 of them
SHORT = 32
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": SHORT,
}
GLM: Mapping[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# of fewer keys than the longer sequences of tests have; with so many heads no score is 0, as of which keys are a tie
INDEXER: Mapping[str, Any] = {"index_n_heads": 16, "index_head_dim": 24, "index_topk": 6}
# family -> transformers' class, what it adds to COMMON
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            **DEEPSEEK_EXPERTS,
        },
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        {
            **LATENT,
            **INDEXER,
            "num_experts": 8,
            **DEEPSEEK_EXPERTS,
        },
    ),
    "glm-5": ("GlmMoeDsa", {**LATENT, **INDEXER, **GLM, "rope_parameters": None}),
    "moonlight": (
        "DeepseekV3",
        {
            **LATENT,
            **GLM,
            "q_lora_rank": None,
            "rope_parameters": None,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "kimi-k25": ("DeepseekV3", {**LATENT, **GLM, "n_group": 1, "topk_group": 1}),
    "glm4-moe": ("Glm4Moe", {**GLM, "head_dim": 32, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe without norms": (
        "Glm4Moe",
        {**GLM, "head_dim": 32, "attention_bias": True, "use_qk_norm": False},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **LATENT,
            **GLM,
            "num_key_value_heads": 4,
            "rope_parameters": None,
            "mlp_layer_types": None,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-next": (
        "Qwen3Next",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
            # the norm behind linear attention would make rounding visible where a head's output is small
            "rms_norm_eps": 1e-2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "rms_norm_eps": 1e-2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": False,
        },
    ),
    "hy-v3": (
        "HYV3",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
}
_HYBRID = (*("linear_attention",) * 3, "full_attention")
_MODEL = "ForCausalLM"
_WRAPPED = "ForConditionalGeneration"
# transformers' class of a model with a vision tower -> the fields of a tiny one's config
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3_5Moe": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
        "patch_size": 4,
    },
}
# Fields of the published config.json that SGLang reads and transformers has no use for, by transformers' class.
PUBLISHED_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV32": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "GlmMoeDsa": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "DeepseekV3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "HYV3": {"qk_norm": True, "route_norm": True, "first_k_dense_replace": 1},
    "MiniMaxM2": {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rotary_dim": 16,
    },
}


def architecture(family: str) -> str:
    """As in a `config.json`, and the key of megarl's table."""
    if family in wrapped.ARCHITECTURES:
        return wrapped.ARCHITECTURES[family]
    name, _ = FAMILIES[family]
    return name + (_WRAPPED if name in TOWERS else _MODEL)


def write(
    folder: Path,
    family: str,
    mtp_layers: int = 0,
    seed: int = 5,
    head: str = _MODEL,
    **changes: Any,
) -> Path:
    """config.json and model.safetensors in `folder`, which is returned; `changes` are fields of the config."""
    sglang_patches.declare_torchvision_operators()
    import transformers

    name, more = FAMILIES[family]
    fields = {**COMMON, **more, **changes}
    # a draft layer is one more layer with a few tensors around it
    fields["num_hidden_layers"] += mtp_layers
    if mtp_layers and "linear_num_key_heads" in fields:
        fields["layer_types"] = [*_HYBRID, *_HYBRID[-1:] * mtp_layers]
    if name in TOWERS:
        fields = {"text_config": fields, "vision_config": TOWERS[name]}
        head = _WRAPPED
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**fields))
    randomise(model)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= PUBLISHED_FIELDS.get(name, {})
    text = config.get("text_config", config)
    if text.get("linear_num_key_heads"):  # as in the published file, and SGLang reads it
        text |= {"full_attention_interval": text["layer_types"].index("full_attention") + 1}
    if name == "Qwen3_5Moe":
        _stack_experts(folder / "model.safetensors")
    if "n_routed_experts" in config:
        config |= {"num_nextn_predict_layers": mtp_layers}
    if mtp_layers:
        text["num_hidden_layers"] -= mtp_layers
        number = text["num_hidden_layers"]
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:number]
        if "linear_num_key_heads" in text:
            key = "mtp_num_hidden_layers" if name in TOWERS else "num_nextn_predict_layers"
            text |= {key: mtp_layers}
            _name_mtp_tensors(folder / "model.safetensors", number)
        else:
            _add_mtp_tensors(folder / "model.safetensors", number, mtp_layers)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if family in wrapped.ARCHITECTURES:
        wrapped.wrap(folder, wrapped.ARCHITECTURES[family])
    return folder


def rescaled(path: Path, folder: Path, scaling: Mapping[str, Any]) -> Path:
    """The checkpoint in `path`, in `folder`, with transformers' own keys of scaled rotary positions."""
    folder.mkdir()
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] |= scaling
    config["max_position_embeddings"] *= 4
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").symlink_to(path / "model.safetensors")
    return folder


def _stack_experts(path: Path) -> None:
    """As Qwen publishes them in bfloat16: transformers writes the matrices of each expert apart."""
    tensors = load_file(path)
    experts = sorted(name for name in tensors if ".experts." in name)
    layers = sorted({name.split(".experts.")[0] for name in experts})
    apart = {name: tensors.pop(name) for name in experts}
    for layer in layers:
        number = sum(name.startswith(f"{layer}.") for name in experts) // 3
        of_kind = {
            kind: [apart[f"{layer}.experts.{item}.{kind}_proj.weight"] for item in range(number)]
            for kind in ("gate", "up", "down")
        }
        gate_up = zip(of_kind["gate"], of_kind["up"], strict=True)
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in gate_up]
        )
        tensors[f"{layer}.experts.down_proj"] = torch.stack(of_kind["down"])
    save_file(tensors, path, metadata={"format": "pt"})


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Ones would hide a wrong norm, zeros a wrong bias."""
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.uniform_(-0.5, 1.0)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.uniform_(-0.5, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)


def _add_mtp_tensors(path: Path, num_layers: int, mtp_layers: int) -> None:
    """What DeepSeek-V3's checkpoint has around a draft layer; its embedding and head are the main ones once more."""
    tensors = load_file(path)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    hidden = embedding.shape[1]
    for layer in range(num_layers, num_layers + mtp_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{norm}.weight"] = torch.empty(hidden).uniform_(0.5, 1.5)
        tensors[prefix + "eh_proj.weight"] = torch.empty(hidden, 2 * hidden).normal_(std=0.1)
        tensors[prefix + "embed_tokens.weight"] = embedding.clone()
        tensors[prefix + "shared_head.head.weight"] = head.clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _name_mtp_tensors(path: Path, number: int) -> None:
    """Make the layer of that number the one that Qwen3-Next's and Qwen3.5's checkpoints have under `mtp.`."""
    tensors = load_file(path)
    for name in list(tensors):
        prefix, found, rest = name.partition(f"layers.{number}.")
        if found and prefix in ("model.", "model.language_model."):
            tensors[f"mtp.layers.0.{rest}"] = tensors.pop(name)
    hidden = tensors["mtp.layers.0.input_layernorm.weight"].shape[0]
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = torch.empty(hidden).uniform_(0.5, 1.5)
    tensors["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden).normal_(std=0.1)
    save_file(tensors, path, metadata={"format": "pt"})


def write_classifier(path: Path, folder: Path) -> Any:
    """The language model in `path` as a classifier with one random score, in `folder`; returned in float32."""
    sglang_patches.declare_torchvision_operators()
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(3)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return model.float().eval()


def write_rewarding_adapters(path: Path, folder: Path) -> Any:
    """PEFT's adapters of a classifier on the language model in `path`, in `folder`, with a random head and B != 0."""
    sglang_patches.declare_torchvision_operators()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(4)
    base: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    size = {"r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"]}
    model: Any = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **size))
    for name, param in model.named_parameters():
        if "lora_B" in name or "score" in name:
            torch.nn.init.normal_(param, std=0.1)
    model.save_pretrained(folder)
    return model.float().eval()


def load(path: Path) -> tuple[Any, dict[str, Any]]:
    """transformers' model of a language model's folder, and what it says of missing and unexpected tensors."""
    sglang_patches.declare_torchvision_operators()
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(path, output_loading_info=True)
