"""Whether a response can end before the longest that a recipe allows."""

from __future__ import annotations

from typing import Any

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.parallel.hf_config import end_token_ids
from megarl.types import UserFault


def eos_faults(recipe: Recipe, tokenizer: Any) -> list[UserFault]:
    """No token at which the engine ends a response, or another token than the answers are taught to end with."""
    try:
        ends = end_token_ids(recipe.model.path)
    except UserFault as fault:
        return [fault]
    own = tokenizer.eos_token_id
    teaches = recipe.warm_start.steps or learns_from_answers(recipe.algorithm.name)
    if teaches and own is None:
        mend = "give it an eos_token, or learn from rewards alone"
        return [UserFault("model.path", "the tokenizer has no end-of-sequence token to teach", mend)]
    where = f"{recipe.model.path}/generation_config.json"
    if not ends:
        problem = "neither it nor config.json has an eos_token_id: no response would end before its longest"
        example = f"{own}, the tokenizer's" if own is not None else "the number of the token that ends a response"
        return [UserFault(where, problem, f"write eos_token_id there: {example}")]
    if teaches and own not in ends:
        known = ", ".join(map(str, sorted(ends)))
        problem = f"answers are taught to end with the tokenizer's token {own}, and engines end responses at {known}"
        return [UserFault(where, problem, f"add {own} to its eos_token_id")]
    return []
