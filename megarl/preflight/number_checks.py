"""Where training ranks cannot compute with the engines' numbers (`train.numbers: engine`)."""

from __future__ import annotations

from megarl.placement.roles import Roles
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

_KEY = "train.numbers"
# of Megatron's, by what they would change
_OPTIONS = {
    "moe_router_padding_for_fp8": "it sends tokens to experts that the router did not choose",
    "moe_router_padding_for_quantization": "it sends tokens to experts that the router did not choose",
    "moe_apply_probs_on_input": "engines multiply the experts' outputs with the router's weights",
    "overlap_moe_expert_parallel_comm": "passes in parts were never compared with one rank in fp8",
}

# of SGLang's, and whose quantisers rollout/sglang/fp8_scales.py reaches
_BACKENDS = "fp8_gemm_runner_backend", "moe_runner_backend"
_ROUNDING = "auto", "deep_gemm", "triton"


@listed
def number_errors(roles: Roles) -> ErrorIterator:
    """What a recipe has with which codes and scales of both sides would differ.

    Tiles that the training ranks cut are refused with the reshard (reshard_errors).
    """
    recipe = roles.recipe
    if recipe.train.numbers == "plain":
        return
    if recipe.rollout.engine.weights == "plain":
        problem = "engine, but the engines' weights are plain, as the ranks' are"
        yield _error(problem, "rollout.engine.weights to fp8")
        return
    if recipe.precision.scales == "exact":
        problem = "exact, but kernels round exact scales in several ways, and codes of both sides would differ"
        hint = f"leave it out, or set {_KEY} to plain"
        yield UserError("precision.scales", problem, hint)
    if recipe.lora:
        problem = "engine, but with adapters (lora) no rank has the codes of weight plus adapter"
        yield UserError(_KEY, problem, "set it to plain, or leave lora out")
    shape = roles.policy.model.known_shape
    if shape and shape.mla and roles.engines.precision.quantises("kv_b_proj"):
        problem = (
            "engine, but SGLang multiplies kv_b_proj in fp8 for some tokens and not for others"
        )
        yield _error(problem, "precision.plain to [kv_b_proj]")
    if shape and shape.indexer:
        problem = (
            f"engine, but {shape.family} has an indexer, whose products in fp8 ranks do not have"
        )
        yield UserError(_KEY, problem, "set it to plain")
    for option in _BACKENDS:
        backend = recipe.rollout.engine.sglang.get(option, "auto")
        if backend not in _ROUNDING:
            where = f"rollout.engine.sglang.{option}"
            problem = f"{backend} does not go with {_KEY}: its kernels choose scales of their own"
            yield UserError(where, problem, f"remove it, or set it to {' or '.join(_ROUNDING[1:])}")
    for option, why in _OPTIONS.items():
        if recipe.train.megatron.get(option):
            where = f"train.megatron.{option}"
            yield UserError(
                where, f"does not go with {_KEY}: {why}", f"remove it, or set {_KEY} to plain"
            )


def _error(problem: str, instead: str) -> UserError:
    return UserError(_KEY, problem, f"set it to plain, or {instead}")
