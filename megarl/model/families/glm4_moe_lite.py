"""GLM-4.7-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.model.families.family import Family, read_latent
from megarl.model.families.glm4_moe import layer
from megarl.model.hf_values import ConfigFile


def read(config: ConfigFile, common: Mapping[str, int]) -> dict[str, Any]:
    """transformers 5 names the kind of each layer's MLP in place of the number of dense ones."""
    kinds = config.texts("mlp_layer_types")[: common["num_layers"]]  # MTP layers follow
    if not kinds:
        num_dense = config.integer("first_k_dense_replace", default=1, least=0)
        return read_latent(config, common) | {"num_dense_layers": num_dense}
    num_dense = kinds.count("dense")
    if kinds != ["dense"] * num_dense + ["sparse"] * (common["num_layers"] - num_dense):
        problem = f"mlp_layer_types is {kinds!r:.60}"
        raise config.error(problem, "use a checkpoint whose dense layers are its first ones")
    return read_latent(config, common) | {"num_dense_layers": num_dense}


GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM",
    read,
    models="GLM-4.7-Flash",
    attention="latent (MLA)",
    layers="as DeepSeek-V3's, with one group of experts",
    constants={"router_bias": True, "qk_norm": False},
    layer=layer,
    has_experts=True,
    has_sigmoid_router=True,
    splits_shared=True,
)
