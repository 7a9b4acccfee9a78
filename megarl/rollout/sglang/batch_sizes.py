"""How many sequences an engine runs at once, and the sizes of its chunks and CUDA graphs that follow from that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.config import Recipe

# that a GPU sends in a decoding step, at most (SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK)
DEEPEP_TOKENS = 128
_GROUP_CHUNK = 2048  # tokens of prompts that an attention group reads at once
_GATHERED_CHUNK = 16384  # of all groups, where each GPU gets them all
# sequences of a group in the largest CUDA graph, as SGLang's own limit on large cards
_MOST_IN_GRAPHS = 512


def step_sequences(recipe: Recipe) -> int:
    """The sequences that an engine runs at once in a phase of a training step: an even share of the prompts."""
    name = recipe.algorithm.name
    rollout = recipe.rollout
    num_prompts = hyperparameters_of(name, recipe.algorithm).num_drawn(rollout.in_flight)
    of_prompt = rollout.samples_per_prompt + ALGORITHMS[name].greedy_baseline
    return math.ceil(num_prompts / rollout.engine.count) * of_prompt


def most_sequences(recipe: Recipe) -> int:
    """The most sequences that an engine runs at once, in a round or an evaluation; a multiple of its groups."""
    sets = [recipe.evaluation.of(name) for name in recipe.data.eval]
    engine = recipe.rollout.engine
    of_sets = [
        math.ceil(evaluation.max_prompts / engine.count) * evaluation.samples for evaluation in sets
    ]
    if of_sets:
        most = max(step_sequences(recipe), *of_sets)
    else:
        most = step_sequences(recipe)
    return math.ceil(most / engine.dp) * engine.dp


def limit_of(recipe: Recipe, wanted: int) -> int:
    """Sequences that an engine may run at once: the recipe's own limit, or megarl's where so many are wanted."""
    engine = recipe.rollout.engine
    limit = running_limit(engine.tp, wanted, deepep=engine.experts == "deepep", draft=engine.draft)
    return engine.sglang.get("max_running_requests") or limit


def given_sizes(recipe: Recipe) -> dict[str, Any]:
    """The recipe's own server arguments over those of `group_arguments`."""
    engine = recipe.rollout.engine
    most = most_sequences(recipe)
    deepep = recipe.rollout.engine.experts == "deepep"
    own = group_arguments(
        engine.tp,
        engine.dp,
        deepep=deepep,
        draft=engine.draft,
        concurrency=most,
        given=engine.sglang,
    )
    return own | engine.sglang


def running_limit(tp: int, wanted: int, *, deepep: bool, draft: int) -> int:
    """Sequences that an engine may run at once, of those that it is given."""
    if deepep:
        return min(wanted, _deepep_sequences(draft) * tp)
    return wanted


def _deepep_sequences(draft: int) -> int:
    """Sequences of a GPU, each of which sends its verified token and its drafts in a step."""
    return DEEPEP_TOKENS // (1 + draft)


def group_arguments(
    tp: int, dp: int, *, deepep: bool, draft: int, concurrency: int, given: Mapping[str, Any]
) -> dict[str, int]:
    """Sizes for `dp` attention groups: SGLang divides its chunk of prompts by them, and makes graphs for each.

    Only where the recipe's arguments have `mem_fraction_static`: else SGLang chooses them with the share of memory, but
    for the graphs that DeepEP bounds. SGLang's own chunk leaves 256 tokens to each of 32 groups; where tokens are
    gathered each GPU holds all of a chunk's, once for every expert that they chose. A graph is for a multiple of the
    group's ranks, and of 8, as in SGLang's list.
    """
    has_fraction = "mem_fraction_static" in given
    if dp == 1 or not (has_fraction or deepep):
        return {}
    ranks = max(1, tp // dp)  # what does not divide is told elsewhere
    of_group = -(-concurrency * 11 // (10 * dp))
    step = math.lcm(8, ranks)
    if deepep:
        most = min(_MOST_IN_GRAPHS, _deepep_sequences(draft) * ranks)
    else:
        most = _MOST_IN_GRAPHS
    found = {"cuda_graph_max_bs_decode": min(most, -(-of_group // step) * step)}
    if dp > 4 and has_fraction:
        found["chunked_prefill_size"] = _GROUP_CHUNK * dp if deepep else _GATHERED_CHUNK
    return found
