"""How many sequences an engine runs at once, and the sizes of its chunks and CUDA graphs that follow from that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.config import Recipe
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import engine_layout

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
    engine = recipe.rollout.engine
    most = step_sequences(recipe)
    for name in recipe.data.eval:
        evaluation = recipe.evaluation.of(name)
        most = max(most, math.ceil(evaluation.max_prompts / engine.count) * evaluation.samples)
    return math.ceil(most / engine.dp) * engine.dp


def limit_of(recipe: Recipe, concurrency: int) -> int:
    """Sequences that an engine may run at once: the recipe's own limit, or megarl's at this concurrency."""
    recipe_limit = recipe.rollout.engine.sglang.get("max_running_requests")
    return recipe_limit or running_limit(engine_layout(recipe), concurrency)


def given_sizes(recipe: Recipe) -> dict[str, Any]:
    """The recipe's own server arguments over those of `group_arguments`."""
    arguments = recipe.rollout.engine.sglang
    return group_arguments(engine_layout(recipe), most_sequences(recipe), arguments) | arguments


def running_limit(layout: EngineLayout, concurrency: int) -> int:
    """Sequences that an engine may run at once, of those that it is given."""
    if layout.deepep:
        return min(concurrency, _deepep_sequences(layout) * layout.tp)
    return concurrency


def _deepep_sequences(layout: EngineLayout) -> int:
    """Sequences of a GPU, each of which sends its verified token and its drafts in a step."""
    return DEEPEP_TOKENS // (1 + layout.draft)


def group_arguments(
    layout: EngineLayout, concurrency: int, arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Sizes for several attention groups: SGLang divides its chunk of prompts by them, and makes graphs for each.

    Only where the recipe's arguments have `mem_fraction_static`: else SGLang chooses them with the share of memory, but
    for the graphs that DeepEP bounds. SGLang's own chunk leaves 256 tokens to each of 32 groups; where tokens are
    gathered each GPU holds all of a chunk's, once for every expert that they chose. A graph is for a multiple of the
    group's ranks, and of 8, as in SGLang's list.
    """
    has_fraction = "mem_fraction_static" in arguments
    if layout.dp == 1 or not (has_fraction or layout.deepep):
        return {}
    ranks = max(1, layout.attention_tp)  # sizes that do not divide are reported elsewhere
    of_group = -(-concurrency * 11 // (10 * layout.dp))
    step = math.lcm(8, ranks)
    most = _MOST_IN_GRAPHS
    if layout.deepep:
        most = min(most, _deepep_sequences(layout) * ranks)
    sizes = {"cuda_graph_max_bs_decode": min(most, -(-of_group // step) * step)}
    if layout.dp > 4 and has_fraction:
        sizes["chunked_prefill_size"] = (
            _GROUP_CHUNK * layout.dp if layout.deepep else _GATHERED_CHUNK
        )
    return sizes
