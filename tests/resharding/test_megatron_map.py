"""Megatron's map: what all ranks hold together, what TP splits, and TransformerEngine's names.

Real models of every family are loaded through it in tests/parallel and tests/model, and compute in every layout what
transformers does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megarl.model.shape import ModelShape
from megarl.model.tensors import tensors
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.shards import Box, box_area, cells, overlap
from tests.model.mixed_family import MIXED_SHAPE, WIDE_SHAPE
from tests.resharding.test_sglang_map import (
    DEEPSEEK,
    LLAMA,
    NO_QUERY_RANK,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TWO_KV_HEADS,
)

FOUR_LAYERS = replace(QWEN3_MOE, num_layers=4)
FAMILIES = (QWEN3_MOE, TWO_KV_HEADS, QWEN3, QWEN2, LLAMA, DEEPSEEK, NO_QUERY_RANK)


LAYOUTS = {
    "tp2 pp2 ep2": (QWEN3_MOE, TrainLayout(8, 2, 2, 2)),
    "deepseek tp2 pp3": (DEEPSEEK, TrainLayout(6, 2, 3, 2)),
    "vpp2": (FOUR_LAYERS, TrainLayout(4, 2, 2, 2, vpp=2)),
}
ALWAYS = {
    r"\.local_experts\.{}\.(linear_fc.\.weight)$": r".\1{}",
    r"\bkv_layernorm\.weight$": "linear_kv_up_proj.layer_norm_weight",
}
IN_LATENT_ATTENTION = {r"\bq_layernorm\.weight$": "linear_q_up_proj.layer_norm_weight"}
IN_GROUPED_ATTENTION = {
    r"\binput_layernorm\.weight$": "self_attention.linear_qkv.layer_norm_weight"
}
IN_DENSE_LAYERS = {r"\bpre_mlp_layernorm\.weight$": "mlp.linear_fc1.layer_norm_weight"}


@pytest.mark.parametrize("shape", FAMILIES, ids=lambda shape: "latent" if shape.mla else "grouped")
def test_transformer_engine_has_norms_in_linear_layers_and_numbers_experts(
    shape: ModelShape,
) -> None:
    """And everything in the same places: tests/parallel loads real layers through the map under their own names."""
    renamed = ALWAYS | (IN_LATENT_ATTENTION if shape.mla else IN_GROUPED_ATTENTION)
    expected = []
    for shard in megatron_map.shards(shape, TrainLayout(2, 2, 1, 1), 1):
        layer = re.match(r"model\.layers\.(\d+)\.", shard.name)
        names = IN_DENSE_LAYERS if layer and shape.is_dense(int(layer[1])) else {}
        param = shard.param
        for own, engines in (renamed | names).items():
            param = re.sub(own, engines, param)
        expected.append(shard._replace(param=param))
    found = megatron_map.shards(shape, TrainLayout(2, 2, 1, 1), 1, transformer_engine=True)
    assert found == expected and len({shard.param for shard in found}) > 10


def shards_by_layer(shape: ModelShape, layout: TrainLayout) -> Iterator[list[int]]:
    for part in megatron_map.parts(shape, layout):
        yield [int(shard.name.split(".")[2]) for shard in part.shards if ".layers." in shard.name]


@pytest.mark.parametrize("pair", LAYOUTS)
def test_a_part_is_in_the_order_of_the_layers(pair: str) -> None:
    assert all(layers == sorted(layers) for layers in shards_by_layer(*LAYOUTS[pair]))


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelShape, TrainLayout]:
    """Every family on up to 128 ranks, with all axes; only what the layout itself does not refuse."""
    shape = replace(
        draw(st.sampled_from((*FAMILIES, MIXED_SHAPE, WIDE_SHAPE))),
        vocab_size=draw(st.integers(1, 700)),
    )
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
