"""Rotary positions of a HF `config.json` that reach beyond the length of pretraining: YaRN (arXiv 2309.00071)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.model.hf_values import ConfigFile
from megarl.types.json_objects import JsonObject

# the keys of config.json with the parameters of rotary positions: transformers 5's, and transformers 4's
NEW_KEY = "rope_parameters"
OLD_KEY = "rope_scaling"
_OF_EVERY_TYPE = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class Yarn:
    """The parameters of YaRN.

    rounds: the ramp between extended and kept frequencies begins and ends at whole frequencies. mscale and
    mscale_all_dim: DeepSeek's; with 1 and 0 the scale of queries and keys is the paper's, 0.1 ln(factor) + 1.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    rounds: bool = True


def rope_values(config: ConfigFile) -> ConfigFile:
    """The parameters of rotary positions; transformers 5 wrote one dictionary where 4 wrote theta and scaling."""
    return config.part(NEW_KEY, OLD_KEY)


def read_yarn(rope: ConfigFile, *, is_known: bool, is_latent: bool) -> Yarn | None:
    """The parameters of YaRN, None without. Raises UserError for other types, and variants that are not built.

    is_known: the family may have YaRN. is_latent: its attention is latent (MLA).
    """
    rope_type = rope.content.get("rope_type", rope.content.get("type", "default"))
    if rope_type == "yarn" and is_known:
        _refuse_variants(rope, is_latent=is_latent)
        mscale_all_dim = 0.0
        if rope.content.get("mscale_all_dim"):
            mscale_all_dim = rope.number("mscale_all_dim", 1.0, most=1e6)
        return Yarn(
            factor=rope.number("factor", 0.0, least=1.0, most=1e6),
            original_positions=rope.integer("original_max_position_embeddings"),
            beta_fast=rope.number("beta_fast", 32.0, most=1e6),
            beta_slow=rope.number("beta_slow", 1.0, most=1e6),
            mscale=rope.number("mscale", 1.0, most=1e6),
            mscale_all_dim=mscale_all_dim,
            rounds=rope.content.get("truncate", True),
        )
    if rope_type != "default":
        raise rope.error(f"rope_type is {rope_type!r}", "use a checkpoint where it is 'default'")
    return None


def _refuse_variants(rope: ConfigFile, *, is_latent: bool) -> None:
    """Raises UserError for variants of YaRN that Megatron, or SGLang, does not have."""
    usual = {"attention_factor": None, "attn_factor": 1, "extrapolation_factor": 1}
    if is_latent:
        usual["truncate"] = True
    wrong = [key for key in usual if rope.content.get(key, usual[key]) != usual[key]]
    if not isinstance(rope.content.get("truncate", True), bool):
        wrong.append("truncate to something else than true or false")
    all_dims = rope.content.get("mscale_all_dim")
    if rope.content.get("mscale", 1) != 1 and (all_dims is None or not (is_latent or all_dims)):
        wrong.append("mscale without mscale_all_dim")
    if not is_latent and rope.content.get("mscale_all_dim") and not rope.content.get("mscale"):
        wrong.append("mscale_all_dim without mscale")
    if wrong:
        problem = f"the rope parameters set {' and '.join(wrong)}"
        raise rope.error(problem, "use a checkpoint without")


def with_rope_scaling(content: Mapping[str, Any], scaling: JsonObject | None) -> JsonObject:
    """The content of a `config.json` with a recipe's `model.rope_scaling`, and as many positions as it allows."""
    changed = dict(content)
    if scaling is None:
        return changed
    if isinstance(old := content.get(NEW_KEY), dict):
        changed[NEW_KEY] = {key: old[key] for key in _OF_EVERY_TYPE if key in old} | scaling
    else:
        changed[OLD_KEY] = scaling
    positions = int(scaling["factor"] * scaling["original_max_position_embeddings"])
    known = content.get("max_position_embeddings")
    changed["max_position_embeddings"] = max(positions, known if type(known) is int else 0)
    return changed
