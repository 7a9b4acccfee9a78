"""An engine's memory on each of its GPUs: weights, KV cache, and the reserves of SGLang 0.5.21.

Nothing here was measured on a GPU. SGLang divides the memory when it starts (kv_cache_configurator.py): the share
`mem_fraction_static` of the free memory is for weights and cache. The plan assumes that training ranks then hold as
little as in a rollout, the policy's parameters; an engine that starts while they hold more makes a smaller cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.model.families import family_of
from megarl.model.precision import PLAIN
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import sglang_map
from megarl.resharding.routes import item_bytes
from megarl.rollout.sglang.batch_sizes import given_sizes, limit_of, step_sequences
from megarl.types import IntArray

MIB = 1 << 20
# memory_hook.py, handle_gpu_memory_settings: (below so many MiB of the card, tokens of a chunk of prompts, sequences of
# a CUDA graph under TP 4, from TP 4 on)
CARDS = (
    (20 << 10, 2048, 8, 8),
    (35 << 10, 4096, 48, 160),
    (60 << 10, 4096, 32, 160),
    (160 << 10, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
GRAPH_MIB = 2.0  # memory_hook.py: of CUDA graphs, for each sequence that they are made for
# the same: of graphs of prompts, with latent attention; less with other attention
PREFILL_GRAPHS_MIB = 1536
PREFILL_GRAPHS_DEEPEP_MIB = 1024  # the same: of graphs of prompts, with DeepEP
# the same with DP attention, for each of its groups; from 300 sequences on
GROUP_GRAPH_MIB = (3.0, 4.5)
CHUNK_MIB = 1.5  # the same: reserved for each token of a chunk
RESERVED_MIB = 512  # the same: for everything else
LEAST_RESERVED_MIB = 10 << 10  # the same: on cards of more than 60 GiB
# the same: for DeepEP's buffers; 1.8 GiB of DeepSeek-V3 by its get_low_latency_rdma_size_hint
DEEPEP_MIB = 2 << 10
LOGIT_BYTES = 6.0
# of a verified token's scaled logits, probabilities and drafts' probabilities (eagle_utils.py)
VERIFIED_BYTES = 12.0
STATES_OVER_CACHE = 0.9  # SGLang's mamba_full_memory_ratio
STATE_SLOTS = 3  # SGLang's MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO
EXPERT_COPIES = 2.0  # assumption: of the chosen experts' inputs and outputs there are both at once
INDEX_TILE = 128  # numbers of a key of sparse attention that have one scale


@dataclass(frozen=True)
class Settings:
    """SGLang's settings for a recipe and a card."""

    mem_fraction_static: float
    chunk_tokens: int
    graph_sequences: int
    max_total_tokens: int | None
    cache_item_bytes: int
    prefill_graphs_mib: int = 0
    # of what the weights leave, for linear attention's states; the rest is the KV cache's
    state_share: float = 0.0


@dataclass(frozen=True)
class Kv:
    """Bytes of a token's KV cache on one GPU; tokens that one engine has room for; sequences that it holds at once.

    Of the longest prompt with the longest response, and of running_tokens; never more than are asked for.
    most_states: sequences of an attention group that linear attention has states for; None: the model has none.
    """

    token_bytes: int
    tokens: int
    concurrency_longest: int
    concurrency_mean: int
    running_tokens: int  # of prompt and response, of what runs in the mean
    wanted: int  # sequences of a step that one engine is given
    most_states: int | None = None


def settings_of(recipe: Recipe, hardware: Hardware) -> Settings:
    """The recipe's own server arguments, or SGLang's defaults for the card."""
    engine = recipe.rollout.engine
    arguments = given_sizes(recipe)
    deepep = engine.experts == "deepep"
    card = hardware.memory_bytes / MIB
    _, chunk, small, large = next(row for row in CARDS if card < row[0])
    chunk = arguments.get("chunked_prefill_size") or chunk
    graphs = arguments.get("cuda_graph_max_bs_decode") or (small if engine.tp < 4 else large)
    if arguments.get("disable_cuda_graph") or arguments.get("disable_decode_cuda_graph"):
        graphs = 0
    prefill = 0
    if _has_prefill_graphs(arguments):
        prefill = PREFILL_GRAPHS_MIB + PREFILL_GRAPHS_DEEPEP_MIB * deepep
    fraction = arguments.get("mem_fraction_static")
    if fraction is None:
        of_graph = GRAPH_MIB
        if engine.dp > 1:
            of_graph += GROUP_GRAPH_MIB[graphs > 300] * engine.dp
        reserved = RESERVED_MIB + max(chunk, 2048) * CHUNK_MIB + engine.tp / 8 * 1024
        reserved += graphs * of_graph + prefill
        if card > 60 << 10:
            reserved = max(reserved, LEAST_RESERVED_MIB)
        reserved += DEEPEP_MIB * deepep
        fraction = round((card - reserved) / card, 3)
    cached = str(arguments.get("kv_cache_dtype", "auto"))
    if cached.startswith("fp8"):
        item = 1
    elif recipe.model.dtype == "bfloat16" or cached == "bfloat16":
        item = 2
    else:
        item = 4
    most = arguments.get("max_total_tokens")
    return Settings(fraction, chunk, graphs, most, item, prefill)


def with_states(settings: Settings, recipe: Recipe, shape: ModelShape) -> Settings:
    """The settings of an engine that keeps states too, where the model has linear attention."""
    if shape.delta is None:
        return settings
    ratio = recipe.rollout.engine.sglang.get("mamba_full_memory_ratio") or STATES_OVER_CACHE
    return replace(settings, state_share=ratio / (1 + ratio))


def _has_prefill_graphs(arguments: Mapping[str, Any]) -> bool:
    """Whether a recipe's server arguments turn on the graphs of prompts, which megarl turns off (arguments.py)."""
    backend = arguments.get("cuda_graph_backend_prefill")
    if backend is not None:
        return backend != "disabled"
    return (
        not arguments.get("disable_cuda_graph")
        and arguments.get("disable_prefill_cuda_graph") is False
    )


def weight_bytes(shape: ModelShape, engine: EngineLayout, dtype: str) -> list[int]:
    """Of each rank of an engine: every rectangle of SGLang's parameters, fp8's scales with them.

    With latent attention also `w_kc` and `w_vc`, which SGLang makes of kv_b_proj in the model's type. The draft model's
    layer is among them, and a vision tower that SGLang does not leave out.
    """
    return list(_weight_bytes(shape, replace(engine, count=1, first=0), dtype))


@cache
def _weight_bytes(shape: ModelShape, engine: EngineLayout, dtype: str) -> tuple[int, ...]:
    derived = 0
    if shape.mla:
        of_heads = shape.num_heads // engine.attention_tp * (shape.mla.nope_dim + shape.mla.v_dim)
        derived = layers_of(shape, engine) * of_heads * shape.mla.kv_lora_rank * item_bytes(dtype)
    # layers of a kind are alike: one of each is laid out
    without = replace(shape, num_layers=0, num_dense_layers=0)
    if shape.delta:
        # which has linear attention in the first layer, and in no layer
        linear = replace(without, num_layers=1, delta=replace(shape.delta, full_every=2))
        full = replace(linear, delta=replace(shape.delta, full_every=1))
        num_linear = shape.num_linear_layers
        kinds = {linear: num_linear, full: shape.num_layers - num_linear}
    else:
        kinds = {
            replace(without, num_layers=1, num_dense_layers=1): shape.num_dense_layers,
            replace(without, num_layers=1): shape.num_sparse_layers,
        }
    num_quantised_left = shape.num_layers - engine.precision.plain_last_layers
    engine = replace(engine, precision=engine.precision.of_other_layers)
    plain = replace(engine, precision=PLAIN)
    wrapper = family_of(shape).wrapper
    tower_bytes = wrapper.tower_params * item_bytes(dtype) if wrapper else 0
    total = _laid_out_bytes(without, engine, dtype) + derived + tower_bytes
    for kind, count in kinds.items():  # in the order of the layers, so that plain ones come last
        num_first = max(0, min(count, num_quantised_left))
        num_quantised_left -= count
        for layout, number in ((engine, num_first), (plain, count - num_first)):
            if number:
                others = _laid_out_bytes(without, layout, dtype)
                total += number * (_laid_out_bytes(kind, layout, dtype) - others)
    return tuple(total.tolist())


def _laid_out_bytes(shape: ModelShape, engine: EngineLayout, dtype: str) -> IntArray:
    """[tp] of every parameter."""
    rank_bytes = np.zeros(engine.tp, np.int64)
    for part in sglang_map.parts(shape, engine):
        num_bytes = sum(shard.area * item_bytes(shard.dtype or dtype) for shard in part.shards)
        rank_bytes[list(part.members)] += num_bytes
    return rank_bytes


def layers_of(shape: ModelShape, engine: EngineLayout) -> int:
    """The layers with a KV cache: the draft model has one."""
    return shape.num_layers - shape.num_linear_layers + (engine.draft > 0)


def request_bytes(shape: ModelShape, engine: EngineLayout) -> float:
    """Of one request's states on one GPU: those of the rule in float32, those of the convolutions in bfloat16.

    SGLang has so many bytes in each of its slots (configs/mamba_utils.py).
    """
    delta = shape.delta
    if delta is None:
        return 0.0
    values = delta.num_value_heads * delta.value_dim
    channels = 2 * delta.num_key_heads * delta.key_dim + values
    of_layer = 4 * values * delta.key_dim + 2 * channels * (delta.kernel_size - 1)
    return shape.num_linear_layers * of_layer / engine.attention_tp


def token_bytes(shape: ModelShape, engine: EngineLayout, item: int) -> int:
    """Of one token's keys and values on one GPU: 2 x heads x width of each layer, heads split over attention's ranks.

    With latent attention the compressed ones, kv_lora + rope, whole on every rank (DeepSeek-V2, arXiv 2405.04434), and
    the indexer's key.
    """
    if shape.mla:
        of_layer = (shape.mla.kv_lora_rank + shape.mla.rope_dim) * item
        if shape.indexer and item == 1:
            # the rotated part stays in 16 bits, beside scales (DSATokenToKVPool)
            of_layer += shape.mla.kv_lora_rank // INDEX_TILE * 4 + shape.mla.rope_dim
        return layers_of(shape, engine) * (of_layer + index_bytes(shape))
    heads = max(1, shape.num_kv_heads // engine.attention_tp)
    return 2 * layers_of(shape, engine) * heads * shape.head_dim * item


def index_bytes(shape: ModelShape) -> int:
    """Of one token's key of the indexer in a layer: a number in fp8, a float32 scale of each 128 (DSATokenToKVPool)."""
    if shape.indexer is None:
        return 0
    width = shape.indexer.head_dim
    return width + width // INDEX_TILE * 4


def most_states(settings: Settings, cache_bytes: float, of_request: float, draft: int = 0) -> float:
    """Requests of a group that linear attention has states for, beside a KV cache of so many bytes; no end without it.

    SGLang keeps three slots for each that runs: prefixes in its cache have states too (kv_cache_configurator.py). With
    drafts it keeps the state after each token that it verifies, of each request that runs.
    """
    if not of_request:
        return math.inf
    share = settings.state_share
    slots = STATE_SLOTS
    if draft:
        slots += 1 + draft
    return cache_bytes * share / (1 - share) // (slots * of_request)


def kept_bytes(settings: Settings, engine: EngineLayout) -> int:
    """Of a GPU, taken of what the cache has left and kept while training: CUDA graphs, and DeepEP's buffers.

    These are NVSHMEM's memory, which SGLang's memory saver cannot release.
    """
    graphs = settings.graph_sequences * GRAPH_MIB + settings.prefill_graphs_mib
    return math.ceil((graphs + engine.deepep * DEEPEP_MIB) * MIB)


def cache_tokens(settings: Settings, free_bytes: float, weights: int, of_token: int) -> int:
    """Tokens that fit with the weights into the static share of the free memory; 0 or less: SGLang cannot start."""
    left = settings.mem_fraction_static * free_bytes - weights
    fits = math.floor((1 - settings.state_share) * left / of_token)
    if settings.max_total_tokens is None:
        return fits
    return min(fits, settings.max_total_tokens)


def kv_of(
    recipe: Recipe, tokens: int, of_token: int, running_tokens: int, most_states: float = math.inf
) -> Kv:
    """tokens: of one GPU. DP attention's groups each have a cache of their own requests.

    most_states: requests of a group for which linear attention has states.
    """
    engine = recipe.rollout.engine
    sequences = step_sequences(recipe)
    most = min(sequences, limit_of(recipe, sequences), most_states * engine.dp)
    lengths = (recipe.longest_sequence, running_tokens)
    at_longest, at_mean = (
        int(min(most, max(0, tokens) // length * engine.dp)) for length in lengths
    )
    return Kv(
        token_bytes=of_token,
        tokens=max(0, tokens) * engine.dp,
        concurrency_longest=at_longest,
        concurrency_mean=at_mean,
        running_tokens=running_tokens,
        wanted=sequences,
        most_states=int(most_states) if math.isfinite(most_states) else None,
    )


def running_bytes(
    shape: ModelShape, engine: EngineLayout, settings: Settings, sequences: int
) -> tuple[float, float]:
    """(activations, logits) while it samples: a chunk of prompts in its widest layer; logits of the sequences.

    A layer holds four times its group's tokens. Without experts there are gate, up and their product; with them the
    same and an output for each expert that a token chose, and what was gathered from all groups: SGLang's Triton
    kernels make room for other ranks' experts too (fused_moe.py). With DeepEP only tokens come that chose the rank's.
    The logits are whole on each GPU, of its group's sequences or of the engine's, in bfloat16 and in float32
    (logits_processor.py); with drafts each sequence has those of several tokens, and its group verifies them.
    """
    hidden = shape.hidden_size
    tokens = settings.chunk_tokens
    attention = 4 * hidden * tokens / engine.dp
    numbers = [attention]
    if shape.num_dense_layers:
        seen = tokens / engine.dp if engine.whole_dense else tokens
        numbers.append(attention + 3 * shape.ffn_size / engine.dense_ranks * seen)
    if shape.num_experts:
        product = 3 * shape.moe_ffn_size / engine.moe_tp
        copies = shape.experts_per_token * tokens
        if engine.deepep:
            numbers.append(attention + copies / engine.ep * (EXPERT_COPIES * hidden + product))
        else:
            gathered = 2 * hidden * tokens if engine.dp > 1 else 0
            numbers.append(attention + gathered + copies * (hidden + product))
    of_group = max(sequences // engine.dp, 1)
    rows = of_group if engine.group_head else max(sequences, 1)
    logits = rows * LOGIT_BYTES + (of_group * VERIFIED_BYTES if engine.draft else 0.0)
    return 2.0 * max(numbers), logits * (1 + engine.draft) * shape.vocab_size
