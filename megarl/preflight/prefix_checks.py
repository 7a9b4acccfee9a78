"""Where tokens that samples begin with cannot be computed once for all of them (train.share_prefixes)."""

from __future__ import annotations

from megarl.placement.roles import Roles
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

_KEY = "train.share_prefixes"
# options of Megatron's with which a token's output depends on more than the tokens before it
_MEGATRON = ("moe_expert_capacity_factor", "moe_input_jitter_eps")


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
    if train.mtp_loss:
        why = "what the last token of a prompt predicts further ahead begins with the next token of each sample"
        yield _refused(why, "train.mtp_loss", "0")
    if train.replay == "r3":
        why = "engines may have chosen other experts for a prompt in each of its samples"
        yield _refused(why, "train.replay", "r2 or off")
    for option in _MEGATRON:
        if train.megatron.get(option) is not None:
            why = (
                "with this option a token's result depends on other tokens of the row, or on chance"
            )
            yield _refused(why, f"train.megatron.{option}", "null")


def _refused(why: str, key: str, value: str) -> UserError:
    return UserError(_KEY, f"true, but {why} ({key})", f"set it to false, or {key} to {value}")
