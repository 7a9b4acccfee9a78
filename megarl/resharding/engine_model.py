"""The parts of an SGLang model that resharding handles beyond its weights; imports nothing of SGLang.

Facts from SGLang 0.5.21: latent attention multiplies with `w_kc` and `w_vc`, which `post_load_weights` derives from
`kv_b_proj` (models/deepseek_common/deepseek_weight_loader.py); `end_weight_update` runs it only when no loader ran, so
the loader runs it itself. It writes into the tensors of the first run, so that captured CUDA graphs see the new values.

Attention layers with a quantisation config (in fp8 engines of DeepSeek-V3, Qwen2 and Llama) have the parameters
`k_scale` and `v_scale`, the scales of an fp8 KV cache (layers/quantization/kv_cache.py). No checkpoint of these
families has them, and SGLang then uses 1, which the end of its weight update copies to `k_scale_float` and
`v_scale_float`. The parameters' memory is released with that of the weights, so every reshard writes them again.

A draft model (models/deepseek_nextn.py) has the target's Parameter objects as its embedding and output layer
(`set_embed_and_head`). SGLang saves the buffers of the target alone when it releases the weights' memory
(managers/scheduler_components/weight_updater.py), so a draft must have no buffers of its own but those that
`refresh_derived` writes; its rotary table is the target's (layers/rotary_embedding/factory.py).

Layers with adapters (LoRA) are wrapped, the layer itself being `base_layer` (lora/layers.py). The wrapper has the
adapter slots in the attributes `_BUFFERS`; the number of ours is left on the model by rollout/sglang/adapter_slot.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.model.quantisation import FP8_TILE
from megarl.resharding.sglang_map import DRAFT
from megarl.resharding.shards import LayoutError
from megarl.types.tensors import ModelChunks

_OTHER_BACKEND = "set rollout.engine.sglang.moe_runner_backend to triton"
# A flag of a MoE layer or its quantisation that means another order of the experts' weights -> the hint.
_UNKNOWN_MOE_LAYOUTS = {
    "use_triton_kernels": _OTHER_BACKEND,
    "use_flashinfer_trtllm_moe": _OTHER_BACKEND,
    "load_up_proj_weight_first": _OTHER_BACKEND,
    "w13_swiglu_interleaved": "leave SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED out of the environment",
}
_PLUS_ONE = "gemma_weight"  # of norms that multiply by 1 + their weight, the sum
_REPLICATED_QUERIES = "w_kc_qrep"  # a copy of weights that SGLang makes once, at its start
_CACHE_SCALES = ("k_scale", "v_scale")
# the attribute of a model with the number of its adapter's slot
SLOT_NUMBER = "megarl_adapter_slot"
_WRAPPED = "base_layer"
_LANGUAGE_MODEL = "language_model"
_BUFFERS = {  # attributes of a wrapper -> what a slot's name has after that of the layer
    "A_buffer": "lora_A",
    "B_buffer": "lora_B",
    "A_buffer_qkv": "lora_A",
    "B_buffer_qkv": "lora_B",
    "gate_up_lora_a_weights": "w13_lora_A",
    "gate_up_lora_b_weights": "w13_lora_B",
    "down_lora_a_weights": "w2_lora_A",
    "down_lora_b_weights": "w2_lora_B",
}


def joined(models: ModelChunks) -> torch.nn.Module:
    """The target model, or with a draft model one module of both.

    There the draft's parameters have names that begin with DRAFT, but for those that it shares with the target.
    """
    target, *drafts = models
    target = language_model(target)
    if not drafts:
        return target
    whole = torch.nn.Module()
    (draft,) = drafts
    for name, child in target.named_children():
        whole.add_module(name, child)
    whole.add_module(DRAFT.removesuffix("."), draft)
    return whole


def language_model(model: torch.nn.Module) -> torch.nn.Module:
    """The part of an engine's model that is trained: all of it, but where there is a vision tower beside it.

    SGLang's models/kimi_k25.py has a class of a language model as it is in the module `language_model`.
    """
    return getattr(model, _LANGUAGE_MODEL, None) or model


def draft_error(models: ModelChunks) -> LayoutError | None:
    """The reason why a draft model cannot be written together with its target; else None."""
    target, *drafts = models
    shared = {id(tensor) for tensor in target.buffers()}
    for draft in drafts:
        for name, buffer in draft.named_buffers():
            if id(buffer) not in shared and name.rpartition(".")[2] != _PLUS_ONE:
                return LayoutError(
                    f"{DRAFT}{name}: a buffer of the draft model alone, which SGLang would not restore"
                )
    return None


def params(model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights, without a tied lm_head, which is the embedding. No buffer of these families is a weight.

    Those of wrapped layers have the names that they have without a wrapper.
    """
    return {name: param for name, param in _named(model) if not _is_constant(name, param)}


def adapter_slots(model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of our adapter's slot, by the names that lora_slots.py gives them.

    Raises LayoutError where the engine has none.
    """
    number = getattr(model, SLOT_NUMBER, None)
    if number is None:
        raise LayoutError("the engine has no adapters: it was started without lora.sync adapters")
    return {
        f"{name}.{leaf}": getattr(module, attribute)[number]
        for name, module in language_model(model).named_modules()
        for attribute, leaf in _BUFFERS.items()
        if isinstance(getattr(module, attribute, None), Tensor)
    }


def copied(models: ModelChunks) -> dict[str, Tensor]:
    """What engines of equal layout have in common: the weights of all models, and the slot of our adapter."""
    tensors = params(joined(models))
    if hasattr(models[0], SLOT_NUMBER):
        tensors |= adapter_slots(models[0])
    return tensors


def _named(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, those of wrapped layers by the names that they have without a wrapper."""
    for name, param in model.named_parameters():
        yield name.replace(f".{_WRAPPED}.", "."), param


def constants(model: torch.nn.Module) -> dict[str, Tensor]:
    """The scalar scales of the KV cache, which are no weights and must be 1."""
    return {name: param for name, param in _named(model) if _is_constant(name, param)}


def _is_constant(name: str, param: Tensor) -> bool:
    return name.rpartition(".")[2] in _CACHE_SCALES and param.dim() == 0


def unknown_layout(model: torch.nn.Module) -> LayoutError | None:
    """The reason why the map does not describe an engine's model although names and shapes may fit; else None."""
    for name, module in model.named_modules():
        owners = (module, getattr(module, "quant_method", None))
        flags = [
            flag
            for flag in _UNKNOWN_MOE_LAYOUTS
            if any(getattr(owner, flag, False) for owner in owners)
        ]
        if flags:
            why = f"this MoE backend of SGLang ({flags[0]}) stores experts in an unmapped layout"
            return LayoutError(f"{name}: {why}; {_UNKNOWN_MOE_LAYOUTS[flags[0]]}")
        if getattr(module, _REPLICATED_QUERIES, None) is not None:
            return LayoutError(
                f"{name}: SGLang replicated the query weights at start and would keep the old ones"
            )
        if getattr(module, "num_fused_shared_experts", 0):
            return LayoutError(
                f"{name}: SGLang fused the shared experts with the routed ones, which has no map"
            )
        kept = {scale: getattr(module, f"{scale}_float", None) for scale in _CACHE_SCALES}
        if wrong := [
            f"{scale} {value}" for scale, value in kept.items() if value not in (None, 1.0)
        ]:
            return LayoutError(
                f"{name}: SGLang captured its graphs with {wrong[0]}, which must be 1"
            )
    for name, param in model.named_parameters():
        if getattr(param, "format_ue8m0", False):
            return LayoutError(
                f"{name}: SGLang rounds these scales to powers of two, which has no map"
            )
    return None


@torch.no_grad()
def write_constants(model: torch.nn.Module) -> None:
    """Set every constant to 1, in place."""
    for param in constants(model).values():
        param.fill_(1.0)


@torch.no_grad()
def refresh_derived(model: torch.nn.Module) -> None:
    """Recompute all derived tensors; call it when every parameter is written."""
    for _, norm in _norms_of_one(model):
        norm.get_buffer(_PLUS_ONE).copy_(norm.get_parameter("weight") + 1.0)
    derive = getattr(model, "post_load_weights", None)
    if derive is not None:
        derive()


def constant_errors(model: torch.nn.Module) -> list[str]:
    """A description of each constant that is not 1."""
    values = {name: param.item() for name, param in constants(model).items()}
    return [f"{name} is {value:g}, not 1" for name, value in values.items() if value != 1.0]


@torch.no_grad()
def derived_errors(model: torch.nn.Module) -> list[str]:
    """A description of each derived tensor that is not bitwise equal to the one computed from the parameters."""
    errors = [
        f"{name}.{_PLUS_ONE} differs from its weight + 1"
        for name, norm in _norms_of_one(model)
        if not torch.equal(norm.get_buffer(_PLUS_ONE), norm.get_parameter("weight") + 1.0)
    ]
    return errors + [
        f"{name} differs from its kv_b_proj.weight"
        for name, module in model.named_modules()
        for name, actual, expected in _derived(name, module)
        if actual.dtype != expected.dtype or not torch.equal(actual, expected)
    ]


def _norms_of_one(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The norms that multiply by 1 + their weight, of which some kernels read the sum (layers/layernorm.py)."""
    for name, module in model.named_modules():
        if hasattr(module, _PLUS_ONE):
            yield name, module


def _derived(name: str, attention: torch.nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, actual tensor, expected tensor) of w_kc [heads, nope, rank] and w_vc [heads, rank, v]."""
    w_kc, w_vc = (getattr(attention, attribute, None) for attribute in ("w_kc", "w_vc"))
    if not isinstance(w_kc, Tensor) or not isinstance(w_vc, Tensor):
        return
    nope_dim = w_kc.shape[1]
    v_dim = w_vc.shape[2]
    linear = attention.get_submodule("kv_b_proj")
    heads = _plain_weight(getattr(linear, _WRAPPED, linear)).unflatten(0, (-1, nope_dim + v_dim))
    yield f"{name}.w_kc", w_kc, heads[:, :nope_dim]
    yield f"{name}.w_vc", w_vc, heads[:, nope_dim:].transpose(1, 2)


def _plain_weight(linear: torch.nn.Module) -> Tensor:
    """The weight [rows, columns]; fp8 tiles are dequantised to bfloat16, as SGLang does."""
    weight = linear.get_parameter("weight")
    if weight.dtype != torch.float8_e4m3fn:
        return weight
    scales = linear.get_parameter("weight_scale_inv")
    rows, cols = weight.shape
    for dim in (0, 1):
        scales = scales.repeat_interleave(FP8_TILE, dim=dim)
    return (weight.float() * scales[:rows, :cols]).bfloat16()
