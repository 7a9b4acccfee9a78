"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's layers, in which an indexer chooses the keys of each query."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from megarl.model.families import glm4_moe_lite
from megarl.model.families.blocks import ATTENTION, Block, Layer, latent_attention, usual_mlp
from megarl.model.families.family import Family
from megarl.model.families.layouts import ParamPart, copy, rows, vector
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import IndexerShape, ModelShape

_KIND = "deepseek_sparse_attention"  # as transformers 5 names the layers
# variants that SGLang has and the training ranks have not
_KNOWN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "index_kpool": (1,),
    "index_k_norm_type": ("layer",),
    "index_init_tokens": (0,),
    "index_local_tokens": (0,),
}


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """Raises UserError for layers that take over the choice of another layer (GLM-5.2), and for other indexers."""
    config.known(_KNOWN_VALUES)
    _refuse_shared_choices(config)
    kinds = set(config.texts("layer_types")) - {_KIND}
    if kinds:
        hint = f"use a checkpoint where all are {_KIND}"
        raise config.error(f"layer_types has {', '.join(sorted(kinds))}", hint)
    sizes = glm4_moe_lite.read(config, common)
    config.integer("q_lora_rank")  # the indexer's queries are made of it
    indexer = IndexerShape(
        num_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim"),
        top_k=config.integer("index_topk"),
        interleaved_rope=config.truth("indexer_rope_interleave"),
    )
    if indexer.head_dim < sizes["mla"].rope_dim:
        problem = f"index_head_dim is {indexer.head_dim}, less than qk_rope_head_dim"
        raise config.error(problem, "use a checkpoint where it is at least as much")
    # transformers writes its default of num_experts besides
    return sizes | {"indexer": indexer, "num_experts": config.integer("n_routed_experts")}


def _refuse_shared_choices(config: ConfigFile) -> None:
    hint = "use GLM-5, GLM-5.1 or DeepSeek-V3.2: here every layer has an indexer of its own"
    every = config.content.get("index_topk_freq")
    if every not in (None, 1):
        raise config.error(f"index_topk_freq is {every!r:.60}", hint)
    for key, own in (("index_topk_pattern", "F"), ("indexer_types", "full")):
        kinds = config.content.get(key)
        if kinds is not None and set(kinds) != {own}:
            raise config.error(f"{key} is {kinds!r:.60}", hint)


def layer(shape: ModelShape, number: int) -> Layer:
    """Latent attention with an indexer, then DeepSeek-V3's MLP or experts."""
    return Layer(sparse_attention(shape), usual_mlp(shape, number))


@cache
def sparse_attention(shape: ModelShape) -> Block:
    """Latent attention and its indexer, which every rank has whole on both sides.

    SGLang has the norm in float32 and the heads' weights in bfloat16, whatever the model's type. On a GPU it has them
    in one parameter with the keys' projection where neighbours are turned (layers/attention/dsa/dsa_indexer.py).
    """
    indexer = shape.indexer
    mla = shape.mla
    assert indexer is not None and mla is not None and mla.q_lora_rank
    wq = rows("wq_b.weight", indexer.num_heads, indexer.head_dim, mla.q_lora_rank)
    wk = rows("wk.weight", 1, indexer.head_dim, shape.hidden_size)
    norm, norm_bias = (vector(f"k_norm.{name}", indexer.head_dim) for name in ("weight", "bias"))
    heads = rows("weights_proj.weight", indexer.num_heads, 1, shape.hidden_size)
    parts = (wq, wk, norm, norm_bias, heads)
    projections = [
        ParamPart(wk.name, copy(wk)),
        ParamPart(heads.name, copy(heads), dtype="bfloat16"),
    ]
    if indexer.interleaved_rope:
        fused = "wk_weights_proj.weight"
        projections = [ParamPart(fused, copy(part), dtype="bfloat16") for part in (wk, heads)]
    own = ATTENTION.inside("indexer.").block(
        tensors=[part.tensor for part in parts],
        megatron=[ParamPart(part.name, copy(part)) for part in parts],
        sglang=[
            ParamPart(wq.name, copy(wq)),
            *projections,
            *(ParamPart(part.name, copy(part), dtype="float32") for part in (norm, norm_bias)),
        ],
    )
    return latent_attention(shape) + own


DEEPSEEK_V32 = Family(
    "DeepseekV32ForCausalLM",
    read,
    models="DeepSeek-V3.2 and V3.2-Exp",
    attention="as DeepSeek-V3's, over the 2,048 keys that an indexer chooses for each query (DSA)",
    layers="as DeepSeek-V3's",
    constants={"router_bias": True, "qk_norm": False},
    layer=layer,
    has_experts=True,
    has_sigmoid_router=True,
    has_yarn=True,
    own_keys=frozenset({"layer_types"}),
)
