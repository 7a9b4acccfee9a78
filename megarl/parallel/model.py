"""The Megatron model of a training rank, built from a HF `config.json`."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    fused_permute,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.device import DEVICE
from megarl.model.families import FAMILIES, family_of
from megarl.model.hf_config import HfFacts
from megarl.model.lora_pairs import is_factor
from megarl.model.shape import DeltaShape, MlaShape, ModelShape
from megarl.parallel.cp_by_length import follow_rows
from megarl.parallel.delta_net import DeltaNet, DeltaNetSubmodules
from megarl.parallel.fp8_layers import engine_fields
from megarl.parallel.latent import has_fused_rope, latent_fields
from megarl.parallel.layer_kinds import GatedSelfAttention, LayerKind, delta_fields
from megarl.parallel.local_spec import block_spec, mtp_spec, use_local_layers
from megarl.parallel.optional_imports import layers_error, transformer_engine_problem
from megarl.parallel.options import make_config
from megarl.parallel.param_names import named_buffers, named_parameters
from megarl.parallel.routing import Router, Routing
from megarl.parallel.shared_rows import follow_positions
from megarl.parallel.sparse_attention import use_sparse_attention
from megarl.parallel.wide_norm import use_wide_norms
from megarl.parallel.yarn import YarnConfig, refuse_unscaled, yarn_fields
from megarl.placement.recomputation import recompute_fields
from megarl.placement.train_layout import TrainLayout
from megarl.types.tensors import ModelChunks

if TYPE_CHECKING:
    from megarl.config import TrainConfig

TRANSFORMER_ENGINE = DEVICE == "cuda" and HAVE_TE
# apex has it
HAS_WEIGHT_GRADIENT_KERNEL = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUTER_BIAS = "router.expert_bias"
_NO_FACTS = HfFacts(0.0, 0.0, True, 1)  # where the names of fields are asked for alone


def select_layers(train: TrainConfig, dtype: torch.dtype, has_engine: bool = HAVE_TE) -> None:
    """Prepare Megatron's own layers on a GPU without TransformerEngine; call it before the first chunk is built.

    Raises UserError where TransformerEngine is missing and the recipe does not allow other layers
    (train.local_layers), or where its attention does not support dtype or shared prefixes.
    """
    problem = ""
    if not has_engine:
        problem = transformer_engine_problem() or "Megatron does not find its layers"
    error = layers_error(
        problem,
        local_layers=train.local_layers,
        dtype=str(dtype).removeprefix("torch."),
        share_prefixes=train.share_prefixes,
    )
    if error:
        raise error
    if not has_engine:
        use_local_layers()


def _fixed_fields(
    shape: ModelShape,
    layout: TrainLayout,
    facts: HfFacts,
    dtype: torch.dtype,
    router_bias_rate: float,
) -> dict[str, Any]:
    """The fields that the checkpoint, the layout and the loss's normalisation decide."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size or shape.moe_ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "qk_layernorm": shape.qk_norm or shape.mla is not None,
        "add_qkv_bias": shape.qkv_bias,
        "normalization": "RMSNorm",
        "layernorm_epsilon": facts.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # gradients are summed over DP; pipeline.py divides them once
        "calculate_per_token_loss": True,
        **_expert_fields(shape, facts),
        "moe_router_bias_update_rate": router_bias_rate,
        **(latent_fields(shape.mla, facts) if shape.mla else {}),
        **(yarn_fields(facts.yarn) if facts.yarn and not shape.mla else {}),
        **_layout_fields(shape, layout),
        **(delta_fields(shape.delta) if shape.delta else {}),
        **family_of(shape).megatron,
        "variable_seq_lengths": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # The checkpoint overwrites every weight, but only initialization marks the weights that TP splits: without the
        # marks their gradients are missing from the norm.
        "perform_initialization": True,
        "use_cpu_initialization": False,
    }


def _expert_fields(shape: ModelShape, facts: HfFacts) -> dict[str, Any]:
    """The fields of experts and router; DeepSeek-V3's router uses sigmoid scores with a bias, and groups of experts."""
    sparse = {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.moe_ffn_size,
        "moe_layer_freq": [int(not shape.is_dense(layer)) for layer in range(shape.num_layers)],
        "moe_shared_expert_intermediate_size": shape.num_shared_experts * shape.moe_ffn_size
        or None,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_score_function": "sigmoid" if shape.router_bias else "softmax",
        "moe_router_enable_expert_bias": shape.router_bias,
        "moe_router_num_groups": facts.num_groups,
        "moe_router_group_topk": facts.top_groups,
        "moe_router_topk_scaling_factor": facts.routed_scaling if shape.router_bias else None,
        # Softmax after the top-k normalises over the chosen experts: HF's norm_topk_prob.
        "moe_router_pre_softmax": not facts.norm_topk_prob and not shape.router_bias,
        "moe_grouped_gemm": TRANSFORMER_ENGINE,
        "mtp_num_layers": shape.num_mtp_layers or None,
    }
    return {
        **(
            sparse
            if shape.num_experts
            else dict.fromkeys(sparse.keys() & {"num_moe_experts", "mtp_num_layers"})
        ),
        # routing.py has its own auxiliary losses; train.aux_loss and train.z_loss weigh them.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_fusion": False,
    }


def _layout_fields(shape: ModelShape, layout: TrainLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": max(layout.cp, layout.max_cp),
        "hybrid_context_parallel": False,  # cp_by_length.py has megarl's own
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "microbatch_group_size_per_vp_stage": layout.pp,
        # batched messages of different lengths would reach the wrong buffers
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "pipeline_model_parallel_layout": _uneven_stages(shape, layout)
        if layout.stage_layers
        else None,
        "sequence_parallel": layout.tp > 1,
    }


def _uneven_stages(shape: ModelShape, layout: TrainLayout) -> list[list[str]]:
    """The content of each virtual stage, in Megatron's names."""
    stages = [["decoder"] * count for count in layout.stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * shape.num_mtp_layers + ["loss"]
    return stages


def _default_fields(shape: ModelShape, facts: HfFacts) -> dict[str, Any]:
    """The fields that a recipe may override: they select kernels and do not change the result."""
    is_rope_fused = TRANSFORMER_ENGINE and (facts.yarn is None or shape.mla is not None)
    if shape.mla and not has_fused_rope(shape.mla, facts):
        is_rope_fused = False
    return {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        # gloo may still be sending from this memory
        "deallocate_pipeline_outputs": DEVICE == "cuda",
        "batch_p2p_sync": False,  # a wait of the host after each message, for old versions of torch
        "apply_rope_fusion": is_rope_fused,
        "bias_activation_fusion": TRANSFORMER_ENGINE,
        "moe_permute_fusion": TRANSFORMER_ENGINE and fused_permute is not None,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": TRANSFORMER_ENGINE and HAS_WEIGHT_GRADIENT_KERNEL,
    }


def transformer_config(
    facts: HfFacts,
    shape: ModelShape,
    layout: TrainLayout,
    dtype: torch.dtype,
    train: TrainConfig,
    stage: int = 0,
) -> TransformerConfig:
    """Megatron's configuration of the ranks of a pipeline stage.

    Raises UserError when Megatron refuses the recipe's options.
    """
    fixed = _fixed_fields(shape, layout, facts, dtype, train.router_bias_rate)
    kind: type[TransformerConfig] = MLATransformerConfig if shape.mla else TransformerConfig
    if facts.yarn and not shape.mla:
        refuse_unscaled(train.megatron)
        kind = YarnConfig
    chosen = train.megatron | recompute_fields(train, stage)
    if train.numbers == "engine" and TRANSFORMER_ENGINE:
        fixed |= engine_fields()
    return make_config("train.megatron", kind, _default_fields(shape, facts) | chosen | fixed)


def fixed_field_names(shape: ModelShape | None = None) -> set[str]:
    """The names of the fields of TransformerConfig that a recipe cannot set.

    shape: the model, whose family may be a user's own; None: unknown.
    """
    nothing = ModelShape(
        1,
        1,
        1,
        1,
        1,
        1,
        mla=MlaShape(1, 1, 1, 1, 1),
        delta=DeltaShape(1, 1, 1, 1, 1, 1),
        num_experts=1,
    )
    families = [*FAMILIES.values(), *([family_of(shape)] if shape else [])]
    of_families = {name for family in families for name in family.megatron}
    fixed = _fixed_fields(nothing, TrainLayout(1, 1, 1, 1), _NO_FACTS, torch.float32, 0.0)
    return fixed.keys() | of_families


def default_field_names(shape: ModelShape) -> set[str]:
    """The names of the fields of TransformerConfig for which megarl has a default of its own."""
    return set(_default_fields(shape, _NO_FACTS))


class Score(torch.nn.Module):
    """A linear head in place of the output layer, replicated on every tensor-parallel rank: [L, h] -> float32 [L]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )

    def forward(self, hidden_LH: Tensor) -> Tensor:
        return F.linear(hidden_LH.float(), self.weight.float())[:, 0]


class Chunk(GPTModel):
    """Megatron's model, or one virtual stage of it, whose output is hidden states in place of logits.

    Those of the last stage are [s, b, h] after the final norm; while `runs_mtp` is set, the hidden states of each
    multi-token prediction layer are concatenated along s.
    """

    runs_mtp = False

    def _postprocess(
        self, *, hidden_states: Tensor, mtp_in_postprocess: bool, **inputs: Any
    ) -> Tensor:
        if not (mtp_in_postprocess and self.runs_mtp):
            return hidden_states
        accepted = inspect.signature(self.mtp.forward).parameters
        return self.mtp(
            hidden_states=hidden_states,
            embedding=self.embedding,
            **{name: value for name, value in inputs.items() if name in accepted},
        )

    def output_weight(self) -> Tensor:
        """[this TP rank's rows of the padded vocabulary, h], on the last stage."""
        if self.share_embeddings_and_output_weights:
            return cast(Tensor, self.shared_embedding_or_output_weight())
        return cast(Tensor, self.output_layer.weight)


def build_chunks(
    config: TransformerConfig,
    facts: HfFacts,
    shape: ModelShape,
    layout: TrainLayout,
    rank: int,
    routing: Routing,
    device: str = DEVICE,
) -> list[Chunk]:
    """This rank's model chunks, one for each virtual stage, uninitialised. routing: the state that routers share."""
    stage = layout.coords(rank).pp
    chunks = []
    for chunk in range(layout.vpp):
        last = stage == layout.pp - 1 and chunk == layout.vpp - 1
        kinds = [
            LayerKind(shape.is_dense(layer), shape.is_linear(layer))
            for layer in layout.layers(stage, shape.num_layers, chunk)
        ]
        block, mtp = _specs(config, kinds, routing, with_mtp=last and shape.num_mtp_layers > 0)
        if family_of(shape).has_wide_norms:
            use_wide_norms(config, block.layer_specs)
        if shape.indexer:
            of_mtp = [spec.submodules.transformer_layer for spec in mtp.layer_specs] if mtp else []
            use_sparse_attention(shape.indexer, [*block.layer_specs, *of_mtp])
        model = Chunk(
            config=config,
            transformer_layer_spec=block,
            vocab_size=layout.padded_vocab(shape.vocab_size),
            max_sequence_length=facts.max_positions,
            pre_process=stage == 0 and chunk == 0,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="yarn" if isinstance(config, YarnConfig) else "rope",
            rotary_percent=facts.rotary_share,
            rotary_base=facts.rope_theta,  # type: ignore[arg-type]
            mtp_block_spec=mtp,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        if last and shape.num_labels:
            model.output_layer = Score(config)  # type: ignore[assignment]
        if model.mtp_process:
            _keep_mtp_activations(model)
        follow_positions(model)
        if layout.max_cp > 1:
            follow_rows(model)
        chunks.append(model.to(device))
    return chunks


def _keep_mtp_activations(chunk: Chunk) -> None:
    """Have multi-token prediction layers not computed again as a whole, which Megatron fails to do with packed rows."""
    kept = copy.copy(chunk.config)
    kept.recompute_granularity = None
    for layer in chunk.mtp.layers:
        layer.config = kept  # type: ignore[assignment]


def _specs(
    config: TransformerConfig, kinds: Sequence[LayerKind], routing: Routing, with_mtp: bool
) -> tuple[Any, Any]:
    """The layer specs of a chunk, and of its multi-token prediction layers."""
    if not TRANSFORMER_ENGINE:
        return block_spec(config, kinds, routing), mtp_spec(config, routing) if with_mtp else None

    def layer(kind: LayerKind) -> Any:
        dense = kind.is_dense
        spec: Any = get_gpt_layer_with_transformer_engine_spec(
            num_experts=None if dense else config.num_moe_experts,
            moe_grouped_gemm=not dense,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=getattr(config, "multi_latent_attention", False),
        )
        if not dense:
            spec.submodules.mlp.submodules.router = partial(Router, routing=routing)
        if kind.is_linear:
            linears = DeltaNetSubmodules(TELayerNormColumnParallelLinear, TERowParallelLinear)
            spec.submodules.self_attention = ModuleSpec(DeltaNet, submodules=linears)
        elif config.attention_output_gate:
            spec.submodules.self_attention.module = GatedSelfAttention
        return spec

    specs: list[Any] = [layer(kind) for kind in kinds]
    # Built anew, because the chunk may have no decoder layer that could be copied.
    mtp: Any = (
        get_mtp_layer_spec(layer(LayerKind()), use_transformer_engine=True) if with_mtp else None
    )
    layers = [mtp] * (config.mtp_num_layers or 0)
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)  # type: ignore[arg-type]
    return block, MultiTokenPredictionBlockSubmodules(layer_specs=layers) if with_mtp else None


def freeze_mtp(chunks: Sequence[Chunk]) -> None:
    """Freeze the multi-token prediction layers: without a loss, weight decay alone would change them."""
    for chunk in chunks:
        if chunk.mtp_process:
            chunk.mtp.requires_grad_(False)


def wrap(
    config: TransformerConfig, chunks: Sequence[Chunk], train: TrainConfig
) -> list[DistributedDataParallel]:
    """Wrap the chunks in Megatron's DistributedDataParallel, whose buffers hold parameters and gradients."""
    ddp_config = buffers_config(train)
    wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    if ddp_config.overlap_grad_reduce:
        # for all micro-batches but the last; Megatron declares a function, and takes a list of several chunks
        no_sync: Any = [chunk.no_sync for chunk in wrapped]
        if len(no_sync) == 1:
            no_sync = no_sync[0]
        config.no_sync_func = no_sync
    return wrapped


def buffers_config(train: TrainConfig) -> DistributedDataParallelConfig:
    """The configuration of the gradients' buffers. Raises UserError when Megatron refuses the recipe's options."""
    fixed = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
    fields = {"overlap_grad_reduce": TRANSFORMER_ENGINE} | train.ddp | fixed
    return make_config("train.ddp", DistributedDataParallelConfig, fields)


def params(chunks: ModelChunks) -> dict[str, Tensor]:
    """A rank's weights by the names of the weight map: parameters, and buffers that are weights (router biases).

    Without the factors of adapters.
    """
    weights = {
        name: param.detach() for name, param in named_parameters(chunks) if not is_factor(name)
    }
    biases = {
        name: buffer.detach()
        for name, buffer in named_buffers(chunks)
        if name.endswith(ROUTER_BIAS)
    }
    return weights | biases


def factors(chunks: ModelChunks) -> dict[str, Tensor]:
    """A rank's factors of adapters by the names of their map (resharding/lora_map.py)."""
    return {name: factor.detach() for name, factor in named_parameters(chunks) if is_factor(name)}
