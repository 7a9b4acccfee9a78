"""The factors of all ranks make up whole factors, and what a rank merges is its part of W + s B A."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.model.lora_pairs import LoraSize, factor_name, leaf_of
from megarl.model.shape import ModelShape
from megarl.model.tensors import STACK, tensors
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, megatron_map
from megarl.resharding.lora_merge import TILE_COLS, Merge
from megarl.resharding.shards import Shard, param_table
from tests.resharding.test_sglang_map import (
    DEEPSEEK,
    LLAMA,
    NO_QUERY_RANK,
    QWEN3_MOE,
    TWO_KV_HEADS,
    Tensors,
    fill,
)

FAMILIES = {
    "qwen3-moe": QWEN3_MOE,
    "two kv heads": TWO_KV_HEADS,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
}
FAMILIES |= {"no query rank": NO_QUERY_RANK}
LAYOUTS = [TrainLayout(4, 4, 1, 1), TrainLayout(4, 2, 2, 2), TrainLayout(4, 2, 1, 2, expert_tp=2)]
SIZE = LoraSize(3, 2, 6.0, ())


def layouts(shape: ModelShape) -> list[TrainLayout]:
    """The layouts that fit a family."""
    fitting = [TrainLayout(1, 1, 1, 1), *(layout for layout in LAYOUTS if not layout.errors(shape))]
    return fitting if len(fitting) > 1 else [*fitting, TrainLayout(2, 2, 1, 1)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pairs_of_a_rank_are_its_shards(name: str) -> None:
    """Every tensor-parallel rank stacks the same A, whichever rows it holds; places are rows of the output."""
    shape = FAMILIES[name]
    for layout in layouts(shape):
        stacked = {}
        for rank in range(layout.world_size):
            at, pairs = layout.coords(rank), lora_map.pairs(shape, layout, rank, SIZE)
            dense = tuple((pair.param, pair.name) for pair in pairs if not pair.is_expert)
            assert stacked.setdefault(at.pp, dense) == dense
            shards = lora_map.shards(shape, layout, rank, SIZE)
            numbered = [shard.name.format(item) for shard in shards for item in range(*shard.items)]
            expected = [factor_name(pair.name, "A") for pair in pairs]
            expected += [
                factor_name(pair.name, "B") for pair in pairs if pair.rows[1] > pair.rows[0]
            ]
            assert sorted(numbered) == sorted(expected)
            for pair in pairs:
                assert sum(number for _, _, number in pair.places) == pair.rows[1] - pair.rows[0]


def test_ranks_without_a_row_of_any_target_have_its_a() -> None:
    """Of four ranks over two groups of heads, two hold no key: all of them take part in the gathering of A x."""
    layout, size = TrainLayout(4, 4, 1, 1), replace(SIZE, targets=("k_proj",))
    held = [lora_map.pairs(TWO_KV_HEADS, layout, rank, size) for rank in range(4)]
    assert all(
        [pair.name for pair in pairs] == [pair.name for pair in held[0]] and pairs for pairs in held
    )
    assert {pair.rows[1] - pair.rows[0] == 0 for pairs in held for pair in pairs} == {True, False}


def test_a_layer_that_is_no_target_has_no_factor() -> None:
    layout = TrainLayout(1, 1, 1, 1)
    pairs = lora_map.pairs(
        QWEN3_MOE, layout, 0, replace(SIZE, targets=("q_proj", "down_proj"), expert_rank=0)
    )
    assert {pair.leaf for pair in pairs} == {"q_proj"}
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert lora_map.targets_of(QWEN3_MOE) == ("q_proj", "k_proj", "v_proj", "o_proj", *mlp)
    assert not {"q_proj", "k_proj"} & {*lora_map.targets_of(DEEPSEEK)}


def of_rank(shards: list[Shard], whole: Tensors) -> Tensors:
    """A rank's parameters with its parts of whole tensors."""
    return {name: tensor[0] for name, tensor in fill(shards, whole, {}).items()}


def whole_tensors(shape: ModelShape) -> tuple[Tensors, Tensors]:
    """(weights and factors, merged weights), of the linear layers alone."""
    generator = torch.Generator().manual_seed(3)
    unmerged, merged = {}, {}
    for stack, (items, rows, cols) in tensors(shape).items():
        if leaf_of(stack) not in lora_map.TARGETS or lora_map._layer(stack) >= shape.num_layers:
            continue
        rank, scale = SIZE.rank_of(STACK in stack), SIZE.scale_of(STACK in stack)
        for name in {stack.format(item) for item in range(items)}:
            sizes = {
                name: (rows, cols),
                factor_name(name, "A"): (rank, cols),
                factor_name(name, "B"): (rows, rank),
            }
            unmerged |= {
                each: torch.randn(size, generator=generator) for each, size in sizes.items()
            }
            weight, a, b = (unmerged[each] for each in sizes)
            merged[name] = weight + scale * b @ a
    return unmerged, merged


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_merges_its_part_of_the_weights(name: str) -> None:
    shape = FAMILIES[name]
    whole, merged = whole_tensors(shape)
    for layout in layouts(shape)[1:]:
        for rank in range(layout.world_size):
            weights = [
                weight
                for weight in megatron_map.shards(shape, layout, rank)
                if weight.name.format(0) in merged
            ]
            factors = lora_map.shards(shape, layout, rank, SIZE)
            params, merge = (
                of_rank(weights, whole),
                Merge.of(SIZE, weights, factors, of_rank(factors, whole)),
            )
            for shard in weights:
                boxes = merge.boxes(shard.name, params, shard.param, shard.at, shard.size)
                assert boxes is not None
                for item, box in zip(range(*shard.items), boxes, strict=True):
                    written = torch.empty(box.shape)
                    box.write(written)
                    expected = merged[shard.name.format(item)][
                        slice(*shard.rows), slice(*shard.cols)
                    ]
                    torch.testing.assert_close(written[0], expected, rtol=1e-5, atol=1e-5)


WIDE = replace(LLAMA, num_layers=1, hidden_size=TILE_COLS + 40)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_an_element_does_not_depend_on_the_box(data: st.DataObject) -> None:
    """To the last bit: what is verified, strip by strip, is what was sent in other boxes."""
    generator, name = torch.Generator().manual_seed(3), "model.layers.0.self_attn.q_proj.weight"
    weights = [
        weight
        for weight in megatron_map.shards(WIDE, TrainLayout(1, 1, 1, 1), 0)
        if weight.name == name
    ]
    size = replace(SIZE, targets=("q_proj",))
    factors = lora_map.shards(WIDE, TrainLayout(1, 1, 1, 1), 0, size)
    params = {p: torch.randn(s[1:], generator=generator) for p, s in param_table(weights).items()}
    held = {p: torch.randn(s[1:], generator=generator) for p, s in param_table(factors).items()}
    merge, shard = Merge.of(size, weights, factors, held), weights[0]
    whole, part = (torch.empty(0), torch.empty(0))
    rows, cols = (
        sorted(
            data.draw(
                st.tuples(st.integers(0, n), st.integers(0, n)).filter(
                    lambda ends: ends[0] != ends[1]
                )
            )
        )
        for n in shard.size[1:]
    )
    for start, ends in (
        ((0, 0), shard.size[1:]),
        ((rows[0], cols[0]), (rows[1] - rows[0], cols[1] - cols[0])),
    ):
        at = (0, shard.at[1] + start[0], shard.at[2] + start[1])
        boxes = merge.boxes(name, params, shard.param, at, (1, *ends))
        assert boxes
        whole, part = part, torch.empty(1, *ends)
        boxes[0].write(part)
    assert torch.equal(part, whole[:, slice(*rows), slice(*cols)])
