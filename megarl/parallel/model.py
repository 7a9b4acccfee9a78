"""The Megatron model and optimizer of one training rank, built from a HF `config.json` (Qwen3-MoE family)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Train
from megarl.device import DEVICE
from megarl.parallel.hf_config import HfFacts, hf_facts
from megarl.parallel.layout import TrainLayout
from megarl.parallel.local_spec import local_spec
from megarl.types import ModelShape, UserFault

TRANSFORMER_ENGINE = DEVICE == "cuda" and HAVE_TE
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIONS = "train.megatron"


def _fixed_fields(shape: ModelShape, layout: TrainLayout, facts: HfFacts, dtype: torch.dtype) -> dict[str, Any]:
    """The fields that the checkpoint, the layout and the loss's normalisation decide."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.moe_ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": facts.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.moe_ffn_size,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_score_function": "softmax",
        # Softmax after the choice normalises over the chosen experts: HF's norm_topk_prob.
        "moe_router_pre_softmax": not facts.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        # Megatron scales its auxiliary losses by token counts of its own, wrongly at TP > 1.
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_grouped_gemm": TRANSFORMER_ENGINE,
        "calculate_per_token_loss": True,  # gradients are summed over DP; pipeline.py divides them once
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": layout.tp > 1,
        "variable_seq_lengths": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # The checkpoint overwrites every weight, but only initialization marks the ones that TP splits: without the
        # marks their gradients are missing from the norm.
        "perform_initialization": True,
        "use_cpu_initialization": False,
    }


def _default_fields() -> dict[str, Any]:
    """The fields that a recipe may set otherwise: which kernels run, not what they compute."""
    return {
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": True,
        "apply_rope_fusion": TRANSFORMER_ENGINE,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,  # needs apex
    }


def option_faults(options: Mapping[str, Any]) -> list[UserFault]:
    """The keys of `train.megatron` that Megatron does not have, or that something else decides."""
    names = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    nothing = ModelShape(1, 1, 1, 1, 1, 1, 1, 1, 1)
    fixed = _fixed_fields(nothing, TrainLayout(1, 1, 1, 1), HfFacts(0.0, 0.0, True, 1), torch.float32)
    faults = []
    for key in options:
        if key in fixed:
            mend = "remove it"
            faults.append(UserFault(f"{OPTIONS}.{key}", "is decided by the checkpoint and the other train keys", mend))
        elif key not in names:
            near = difflib.get_close_matches(key, names - set(fixed), n=1, cutoff=0.0)
            faults.append(UserFault(f"{OPTIONS}.{key}", "TransformerConfig has no such field", f"use {near[0]}"))
    return faults


def transformer_config(
    path: str | Path, shape: ModelShape, layout: TrainLayout, dtype: torch.dtype, options: Mapping[str, Any]
) -> TransformerConfig:
    """Megatron's configuration. Raises UserFault when Megatron refuses the recipe's options."""
    fields = _fixed_fields(shape, layout, hf_facts(path), dtype)
    try:
        return TransformerConfig(**(_default_fields() | dict(options) | fields))
    except (TypeError, ValueError, AssertionError) as error:
        mend = "change the options passed to Megatron"
        raise UserFault(OPTIONS, f"Megatron refuses them ({error})", mend) from error


def build_model(
    config: TransformerConfig, path: str | Path, shape: ModelShape, layout: TrainLayout, rank: int
) -> DistributedDataParallel:
    """This rank's stage, its parameters and gradients in Megatron's contiguous buffers, contents undefined."""
    facts = hf_facts(path)
    stage = layout.coords(rank).pp
    if TRANSFORMER_ENGINE:
        spec: Any = get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.num_experts, moe_grouped_gemm=True, qk_layernorm=True
        )
    else:
        spec = local_spec(config, len(layout.layers(stage, shape.num_layers)))
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=layout.padded_vocab(shape.vocab_size),
        max_sequence_length=facts.max_positions,
        pre_process=stage == 0,
        post_process=stage == layout.pp - 1,
        position_embedding_type="rope",
        rotary_base=facts.rope_theta,  # type: ignore[arg-type]
    )
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(config, buffers, model.to(DEVICE))


def build_optimizer(model: DistributedDataParallel, train: Train, dtype: torch.dtype) -> ChainedOptimizer:
    """AdamW (betas 0.9, 0.999) with its state split over the data-parallel ranks; after the weights are loaded.

    Norm weights are not decayed.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        weight_decay=train.weight_decay,
        clip_grad=train.grad_clip,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
    assert isinstance(optimizer, ChainedOptimizer)  # one for the dense weights, one for the experts
    return optimizer


def move_optimizer(optimizer: ChainedOptimizer, model: DistributedDataParallel, device: str) -> None:
    """Move the optimizer's state and its own copies of the weights; a shard that is a view of a parameter stays."""
    in_model = {param.untyped_storage().data_ptr() for param in model.parameters()}
    for group in optimizer.param_groups:
        for shard in group["params"]:
            if shard.untyped_storage().data_ptr() not in in_model:
                shard.data = shard.data.to(device)
    for chained in optimizer.chained_optimizers:
        for state in chained.optimizer.state.values():
            state.update({key: value.to(device) for key, value in state.items() if torch.is_tensor(value)})
