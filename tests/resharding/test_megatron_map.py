"""Megatron's map against layouts built another way: by cutting and stacking whole tensors as its modules describe.

The names and sizes of the real models are held against the map in tests/parallel; here every element's place is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

from megarl.model.shape import ModelShape
from megarl.model.tensors import tensors
from megarl.placement.train_layout import RankCoords, TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.shards import Box, box_area, cells, overlap
from tests.resharding.test_sglang_map import (
    DEEPSEEK,
    LLAMA,
    NO_QUERY_RANK,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TWO_KV_HEADS,
    Tensors,
    checkpoint,
    fill,
    stack,
)

FOUR_LAYERS = replace(QWEN3_MOE, num_layers=4)
FAMILIES = (QWEN3_MOE, TWO_KV_HEADS, QWEN3, QWEN2, LLAMA, DEEPSEEK, NO_QUERY_RANK)


def built(
    shape: ModelShape, whole: Tensors, layout: TrainLayout, rank: int, fused_norms: bool
) -> Tensors:
    """The parameters of one rank as Megatron's modules make them; fused_norms: TransformerEngine's names."""
    at, params = layout.coords(rank), {}
    for chunk in range(layout.vpp):
        prefix = f"vpp{chunk}." if layout.vpp > 1 else ""
        virtual = chunk * layout.pp + at.pp
        first, last = virtual == 0, virtual == layout.pp * layout.vpp - 1
        chunk_params: Tensors = {}
        if first or (last and shape.num_mtp_layers):
            chunk_params["embedding.word_embeddings.weight"] = vocabulary(
                whole["model.embed_tokens.weight"], layout, at
            )
        here = stage_layers(shape, layout, virtual)
        for local, layer in enumerate(here):
            chunk_params |= decoder_layer(
                shape, whole, layout, at, layer, f"decoder.layers.{local}.", fused_norms
            )
        if shape.num_layers - 1 in here if shape.num_mtp_layers else last:
            chunk_params["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
        if last:
            chunk_params |= last_stage(shape, whole, layout, at, fused_norms, is_first=first)
        params |= {prefix + name: tensor for name, tensor in chunk_params.items()}
    return {name: stack(tensor) for name, tensor in params.items()}


def stage_layers(shape: ModelShape, layout: TrainLayout, virtual: int) -> list[int]:
    sizes = layout.stage_layers or (shape.num_layers // (layout.pp * layout.vpp),) * (
        layout.pp * layout.vpp
    )
    return list(torch.arange(shape.num_layers).split(list(sizes))[virtual].tolist())


def last_stage(
    shape: ModelShape,
    whole: Tensors,
    layout: TrainLayout,
    at: RankCoords,
    fused_norms: bool,
    is_first: bool,
) -> Tensors:
    params: Tensors = {}
    if not shape.tied:
        params["output_layer.weight"] = vocabulary(whole["lm_head.weight"], layout, at)
    elif not is_first:
        params["output_layer.weight"] = vocabulary(whole["model.embed_tokens.weight"], layout, at)
    for index in range(shape.num_mtp_layers):
        layer = shape.num_layers + index
        name, param = f"model.layers.{layer}.", f"mtp.layers.{index}."
        params |= decoder_layer(
            shape, whole, layout, at, layer, param + "transformer_layer.", fused_norms
        )
        for ours, theirs in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("final_layernorm", "shared_head.norm"),
        ):
            params[f"{param}{ours}.weight"] = whole[f"{name}{theirs}.weight"]
        params[param + "eh_proj.weight"] = whole[name + "eh_proj.weight"].chunk(layout.tp)[at.tp]
    return params


def vocabulary(tensor: torch.Tensor, layout: TrainLayout, at: RankCoords) -> torch.Tensor:
    return F.pad(tensor, (0, 0, 0, layout.padded_vocab(len(tensor)) - len(tensor))).chunk(
        layout.tp
    )[at.tp]


def decoder_layer(
    shape: ModelShape,
    whole: Tensors,
    layout: TrainLayout,
    at: RankCoords,
    layer: int,
    param: str,
    fused_norms: bool,
) -> Tensors:
    prefix = f"model.layers.{layer}."
    ours = {
        name.removeprefix(prefix): tensor
        for name, tensor in whole.items()
        if name.startswith(prefix)
    }
    attention = latent_attention if shape.mla else grouped_attention
    params = {
        f"self_attention.{n}": t
        for n, t in attention(shape, ours, layout.tp, at.tp, fused_norms).items()
    }
    fused_input = fused_norms and not shape.mla
    params[
        "self_attention.linear_qkv.layer_norm_weight" if fused_input else "input_layernorm.weight"
    ] = ours["input_layernorm.weight"]
    dense = layer < shape.num_dense_layers
    norm = (
        "mlp.linear_fc1.layer_norm_weight" if fused_norms and dense else "pre_mlp_layernorm.weight"
    )
    params[norm] = ours["post_attention_layernorm.weight"]
    if dense:
        params |= gated(
            ours, "mlp.", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", layout.tp, at.tp
        )
    else:
        params |= experts(shape, ours, layout, at, fused_norms)
    return {param + name: tensor for name, tensor in params.items()}


def grouped_attention(
    shape: ModelShape, ours: Tensors, ranks: int, rank: int, fused_norms: bool
) -> Tensors:
    def fused(end: str) -> torch.Tensor:
        q, k, v = (ours[f"self_attn.{x}_proj.{end}"].chunk(shape.num_kv_heads) for x in "qkv")
        return torch.cat([torch.cat(group) for group in zip(q, k, v, strict=True)]).chunk(ranks)[
            rank
        ]

    params = {"linear_qkv.weight": fused("weight")}
    if shape.qkv_bias:
        params["linear_qkv.bias"] = fused("bias")
    if shape.qk_norm:
        params |= {f"{x}_layernorm.weight": ours[f"self_attn.{x}_norm.weight"] for x in "qk"}
    return params | {
        "linear_proj.weight": ours["self_attn.o_proj.weight"].chunk(ranks, dim=1)[rank]
    }


def latent_attention(
    shape: ModelShape, ours: Tensors, ranks: int, rank: int, fused_norms: bool
) -> Tensors:
    assert shape.mla is not None
    attention = {
        name.removeprefix("self_attn."): tensor
        for name, tensor in ours.items()
        if name.startswith("self_attn.")
    }
    up_norm = "linear_{}_up_proj.layer_norm_weight" if fused_norms else "{}_layernorm.weight"
    params = {
        "linear_kv_down_proj.weight": attention["kv_a_proj_with_mqa.weight"],
        up_norm.format("kv"): attention["kv_a_layernorm.weight"],
        "linear_kv_up_proj.weight": attention["kv_b_proj.weight"].chunk(ranks)[rank],
        "linear_proj.weight": attention["o_proj.weight"].chunk(ranks, dim=1)[rank],
    }
    if shape.mla.q_lora_rank is None:
        return params | {"linear_q_proj.weight": attention["q_proj.weight"].chunk(ranks)[rank]}
    return params | {
        "linear_q_down_proj.weight": attention["q_a_proj.weight"],
        up_norm.format("q"): attention["q_a_layernorm.weight"],
        "linear_q_up_proj.weight": attention["q_b_proj.weight"].chunk(ranks)[rank],
    }


def gated(ours: Tensors, prefix: str, fc1: str, fc2: str, ranks: int, rank: int) -> Tensors:
    gate, up = (ours[f"{prefix}{x}_proj.weight"].chunk(ranks)[rank] for x in ("gate", "up"))
    return {
        fc1: torch.cat([gate, up]),
        fc2: ours[prefix + "down_proj.weight"].chunk(ranks, dim=1)[rank],
    }


def experts(
    shape: ModelShape, ours: Tensors, layout: TrainLayout, at: RankCoords, fused_norms: bool
) -> Tensors:
    params = {"mlp.router.weight": ours["mlp.gate.weight"]}
    if shape.router_bias:
        params["mlp.router.expert_bias"] = ours["mlp.gate.e_score_correction_bias"]
    if shape.num_shared_experts:
        param = "mlp.shared_experts."
        params |= gated(
            ours, param, f"{param}linear_fc1.weight", f"{param}linear_fc2.weight", layout.tp, at.tp
        )
    per_rank = shape.num_experts // layout.ep
    for local in range(per_rank):
        fc1, fc2 = expert_param("fc1", local, fused_norms), expert_param("fc2", local, fused_norms)
        params |= gated(
            ours, f"mlp.experts.{at.ep * per_rank + local}.", fc1, fc2, layout.etp, at.etp
        )
    return params


def expert_param(fc: str, local: int, grouped: bool) -> str:
    if grouped:
        return f"mlp.experts.linear_{fc}.weight{local}"
    return f"mlp.experts.local_experts.{local}.linear_{fc}.weight"


PAIRS = {
    "one rank": (QWEN3_MOE, TrainLayout(1, 1, 1, 1)),
    "tp2 pp2 ep2": (QWEN3_MOE, TrainLayout(8, 2, 2, 2)),
    "tp4, experts cut too": (QWEN3_MOE, TrainLayout(4, 4, 1, 1)),
    "tp4 over two kv heads": (TWO_KV_HEADS, TrainLayout(4, 4, 1, 4)),
    "ep2 etp2": (QWEN3_MOE, TrainLayout(4, 2, 1, 2, expert_tp=2)),
    "cp2 ep2": (QWEN3_MOE, TrainLayout(4, 1, 1, 2, cp=2)),
    "uneven pp": (FOUR_LAYERS, TrainLayout(2, 1, 2, 1, stage_layers=(3, 1))),
    "vpp2": (FOUR_LAYERS, TrainLayout(4, 2, 2, 2, vpp=2)),
    "uneven vpp2, a chunk without layers": (
        FOUR_LAYERS,
        TrainLayout(2, 1, 2, 1, vpp=2, stage_layers=(1, 2, 1, 0)),
    ),
    "tied, one stage": (QWEN3, TrainLayout(2, 2, 1, 1)),
    "tied, two stages": (QWEN3, TrainLayout(4, 2, 2, 1)),
    "qwen2 tp4 pp2": (QWEN2, TrainLayout(8, 4, 2, 1)),
    "llama tp8 over four kv heads": (LLAMA, TrainLayout(8, 8, 1, 1)),
    "deepseek tp2 ep2": (DEEPSEEK, TrainLayout(4, 2, 1, 2)),
    "deepseek tp2 pp3": (DEEPSEEK, TrainLayout(6, 2, 3, 2)),
    "deepseek uneven vpp2": (DEEPSEEK, TrainLayout(2, 1, 2, 1, vpp=2, stage_layers=(1, 1, 1, 0))),
    "deepseek without query rank": (NO_QUERY_RANK, TrainLayout(2, 2, 1, 2)),
}


@pytest.mark.parametrize("transformer_engine", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_map_is_what_megatron_builds(pair: str, transformer_engine: bool) -> None:
    shape, layout = PAIRS[pair]
    whole = checkpoint(shape)
    for rank in range(layout.world_size):
        expected = built(shape, whole, layout, rank, transformer_engine)
        padded = {name: len(tensor) for name, tensor in expected.items() if is_vocabulary(name)}
        params = fill(megatron_map.shards(shape, layout, rank, transformer_engine), whole, padded)
        assert params.keys() == expected.keys()
        for name in expected:
            assert torch.equal(params[name].flatten(), expected[name].flatten()), name


def is_vocabulary(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def shards_by_layer(shape: ModelShape, layout: TrainLayout) -> Iterator[list[int]]:
    for part in megatron_map.parts(shape, layout):
        yield [int(shard.name.split(".")[2]) for shard in part.shards if ".layers." in shard.name]


@pytest.mark.parametrize("pair", ["tp2 pp2 ep2", "deepseek tp2 pp3", "vpp2"])
def test_a_part_is_in_the_order_of_the_layers(pair: str) -> None:
    assert all(layers == sorted(layers) for layers in shards_by_layer(*PAIRS[pair]))


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelShape, TrainLayout]:
    """Every family on up to 128 ranks, with all axes; only what the layout itself does not refuse."""
    shape = replace(draw(st.sampled_from(FAMILIES)), vocab_size=draw(st.integers(1, 700)))
    tp, cp, dp, pp, vpp = (draw(st.sampled_from([1, 2, 4])) for _ in range(5))
    counts = draw(st.lists(st.integers(1, 2), min_size=pp * vpp, max_size=pp * vpp))
    shape = replace(shape, num_layers=sum(counts))
    if not shape.num_experts:
        shape = replace(shape, num_dense_layers=sum(counts))
    ep, etp = (draw(st.sampled_from([1, 2, 4])) for _ in range(2))
    layout = TrainLayout(
        tp * cp * dp * pp, tp, pp, ep, cp, vpp, etp if ep > 1 else 0, tuple(counts)
    )
    assume(not layout.errors(shape))
    return shape, layout


@given(models_and_layouts(), st.data())
def test_every_element_is_held_once_by_each_set_of_replicas(
    pair: tuple[ModelShape, TrainLayout], data: st.DataObject
) -> None:
    """Of every logical tensor: parts hold the same box or none of it in common, and all boxes make the tensor.

    The parts of a rank have the shards of the rank.
    """
    shape, layout = pair
    boxes: dict[str, set[Box]] = {}
    parts = megatron_map.parts(shape, layout)
    for part in parts:
        for shard in part.shards:
            if shard.area:
                boxes.setdefault(shard.name, set()).add(shard.box)
    whole = tensors(shape)
    assert boxes.keys() == whole.keys()
    for name, size in whole.items():
        assert sum(map(box_area, boxes[name])) == math.prod(size), name
        assert not overlap(boxes[name]), name
    rank = data.draw(st.integers(0, layout.world_size - 1))
    held = [shard for part in parts if rank in part.members for shard in part.shards]
    assert sorted(held) == sorted(megatron_map.shards(shape, layout, rank))


def held_by(pair: tuple[ModelShape, TrainLayout], rank: int) -> dict[str, list[tuple[str, Box]]]:
    """By parameter, what it holds."""
    boxes_by_param: dict[str, list[tuple[str, Box]]] = {}
    for shard in megatron_map.shards(*pair, rank, transformer_engine=True):
        for param, _ in cells(shard):
            boxes_by_param.setdefault(param, []).append((shard.name, shard.box))
    return boxes_by_param


@given(models_and_layouts(), st.data())
def test_a_weight_is_split_where_another_tp_rank_holds_another_part(
    pair: tuple[ModelShape, TrainLayout], data: st.DataObject
) -> None:
    """And every routed expert, which EP deals over the TP group."""
    layout = pair[1]
    rank = data.draw(st.integers(0, layout.world_size - 1))
    at, held = layout.coords(rank), held_by(pair, rank)
    everyone = map(layout.coords, range(layout.world_size))
    peers = [
        held_by(pair, coords.rank)
        for coords in everyone
        if (coords.cp, coords.dp, coords.pp) == (at.cp, at.dp, at.pp)
    ]
    assert len(peers) == layout.tp
    split = {param for param in held if any(peer.get(param) != held[param] for peer in peers)}
    experts = {param for param in held if ".mlp.experts." in param}
    assert megatron_map.split_params(*pair, rank, transformer_engine=True) == split | experts
