"""Where tokens that samples begin with cannot be computed once for all of them (train.share_prefixes)."""

from __future__ import annotations

from megarl.placement.overlaps import PAIRED_PASSES
from megarl.placement.roles import Role, Roles
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

_KEY = "train.share_prefixes"
_BY_MORE = "with this option a token's result depends on other tokens of the row, or on chance"
_UNTRIED = "passes in parts were never compared with one rank where rows share prefixes"
# options of Megatron's, by what shared prefixes lack with them
_MEGATRON = {
    "moe_expert_capacity_factor": _BY_MORE,
    "moe_input_jitter_eps": _BY_MORE,
    "moe_router_force_load_balancing": _BY_MORE,
    PAIRED_PASSES: _UNTRIED,
}
_FUSED_ROPE = "apply_rope_fusion"


@listed
def prefix_errors(roles: Roles) -> ErrorIterator:
    """What a recipe has that shared prefixes would change; what GPUs lack for them is told with their layers."""
    train = roles.recipe.train
    if not train.share_prefixes:
        return
    for role in roles.models.values():
        if role.recipe.train.cp != 1:
            why = "context parallelism cuts each sequence by itself"
            yield _refused(why, f"{role.branch}.cp", "1")
    if any(role.shape.delta for role in roles.models.values() if role.model.known_shape):
        why = "linear attention has one state for each sequence, not for each of its tokens"
        yield UserError(_KEY, f"true, but {why}", "set it to false")
    if any(role.shape.indexer for role in roles.models.values() if role.model.known_shape):
        why = "an indexer chooses keys in whole sequences"
        yield UserError(_KEY, f"true, but {why}", "set it to false")
    if train.mtp_loss:
        why = "what the last token of a prompt predicts further ahead begins with the next token of each sample"
        yield _refused(why, "train.mtp_loss", "0")
    if train.replay == "r3":
        why = "engines may have chosen other experts for a prompt in each of its samples"
        yield _refused(why, "train.replay", "r2 or off")
    for option, why in _MEGATRON.items():
        if train.megatron.get(option):
            yield _refused(why, f"train.megatron.{option}", "null")
    if train.megatron.get(_FUSED_ROPE) and any(map(_has_latent_yarn, roles.models.values())):
        why = "the fused kernel of latent attention numbers the positions of a row itself"
        yield _refused(why, f"train.megatron.{_FUSED_ROPE}", "false")


def _has_latent_yarn(role: Role) -> bool:
    """Whether Megatron passes YaRN's angles of all positions to its fused kernel of latent attention."""
    shape = role.model.known_shape
    facts = role.model.facts
    return bool(shape and shape.mla and facts and facts.yarn)


def _refused(why: str, key: str, value: str) -> UserError:
    return UserError(_KEY, f"true, but {why} ({key})", f"set it to false, or {key} to {value}")
