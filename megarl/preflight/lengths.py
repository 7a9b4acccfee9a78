"""Whether the longest sequence that there can be fits a micro-batch, and the answers that are taught fit a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.algos import has_critic, learns_from_answers
from megarl.config import Recipe
from megarl.parallel.placement import critic_recipe, train_layout
from megarl.preflight.data import tokens_of_answers
from megarl.rollout.prompts import vocabulary_faults
from megarl.rollout.token_cache import TokenCache
from megarl.tracking.progress import progress_bar
from megarl.types import Prompt, UserFault


def budgets(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """By key, of all that train: a micro-batch's tokens, and what a sequence's length is padded to a multiple of."""
    training = {"train": recipe}
    if has_critic(recipe.algorithm.name):
        training["critic.ranks"] = critic_recipe(recipe)
    return {
        f"{branch}.tokens_per_micro_batch": (own.train.tokens_per_micro_batch, train_layout(own).tokens_align)
        for branch, own in training.items()
    }


def length_faults(
    recipe: Recipe, tokenizer: Any, train: Sequence[Prompt], cache: TokenCache | None, vocab_size: int | None
) -> list[UserFault]:
    """The longest possible sequence must fit a micro-batch; in a warm start the answers are the responses.

    vocab_size: the model's, or None where it is not known.
    """
    faults: list[UserFault] = []
    limit = recipe.rollout.max_response_tokens
    for key, (budget, align) in budgets(recipe).items():
        longest = max(len(prompt.token_ids) for prompt in train) + limit
        longest = -(-longest // align) * align
        if longest > budget:
            problem = f"{budget} is less than the longest prompt and response ({longest} tokens)"
            faults.append(UserFault(key, problem, f"set it to at least {longest}"))
    teaches = recipe.warm_start.steps or learns_from_answers(recipe.algorithm.name)
    if teaches:
        tokens = tokens_of_answers(tokenizer, train, progress_bar, cache)
        needed = 1 + int(tokens.lengths.max())
        if needed > limit:
            problem = f"{limit} is less than the longest answer ({needed} tokens with its end)"
            faults.append(UserFault("rollout.max_response_tokens", problem, f"set it to at least {needed}"))
        if vocab_size:
            faults += vocabulary_faults("data.train", tokenizer, train, tokens, "answer", vocab_size)
    return faults
