"""The layouts of blocks that few families have, against what Megatron and SGLang do with the rows of a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.model.tensors import hf_tensors, tensors
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, megatron_map, sglang_map
from megarl.resharding.shards import shape_as_stack
from megarl.resharding.traffic import count_traffic
from tests.model.mixed_family import MIXED_SHAPE, WIDE_SHAPE
from tests.resharding.test_sglang_map import Tensors, fill

DELTA = MIXED_SHAPE.delta
assert DELTA is not None
VALUES = DELTA.num_value_heads // DELTA.num_key_heads  # of a key head
WIDTHS = [DELTA.key_dim, DELTA.key_dim, VALUES * DELTA.value_dim]


# as Qwen3.5's files
SPLIT_SHAPE = replace(MIXED_SHAPE, family="Qwen3_5MoeForConditionalGeneration")


@pytest.fixture(scope="module")
def whole() -> Tensors:
    return random_tensors(MIXED_SHAPE)


def random_tensors(shape: ModelShape) -> Tensors:
    torch.manual_seed(0)
    sizes = {name: size for name, size in tensors(shape).items() if "{}" not in name}
    random = {name: torch.rand(rows, cols) for name, (_, rows, cols) in sizes.items()}
    stacks = {name: size for name, size in tensors(shape).items() if "{}" in name}
    for name, (items, rows, cols) in stacks.items():
        random |= {name.format(item): torch.rand(rows, cols) for item in range(items)}
    return random


def of_ranks(
    whole: Tensors,
    tp: int,
    prefix: str,
    *,
    on_engine: bool = False,
    shape: ModelShape = MIXED_SHAPE,
) -> list[Tensors]:
    """The parameters of each TP rank whose names begin with a prefix, without it."""
    ranks = []
    for rank in range(tp):
        if on_engine:
            shards = sglang_map.shards(shape, EngineLayout(1, tp, 1), rank)
        else:
            shards = megatron_map.shards(shape, TrainLayout(tp, tp, 1, 1), rank)
        params = fill([shard for shard in shards if shard.param.startswith(prefix)], whole, {})
        ranks.append({name.removeprefix(prefix): param[0] for name, param in params.items()})
    return ranks


def ordered(whole: Tensors) -> list[torch.Tensor]:
    """Queries, keys, values, z, b and a of all heads, as transformers splits them: [heads, rows, h]."""
    layer = Qwen3NextGatedDeltaNet.__new__(Qwen3NextGatedDeltaNet)
    torch.nn.Module.__init__(layer)
    assert DELTA is not None
    layer.num_k_heads, layer.num_v_heads = DELTA.num_key_heads, DELTA.num_value_heads
    layer.head_k_dim, layer.head_v_dim = DELTA.key_dim, DELTA.value_dim
    # with the identity as its input, a projection returns its weight
    qkvz, ba = (
        whole[f"model.layers.0.linear_attn.in_proj_{name}.weight"].T[None]
        for name in ("qkvz", "ba")
    )
    parts = layer.fix_query_key_value_ordering(qkvz, ba)
    return [
        part[0].reshape(len(part[0]), DELTA.num_key_heads, -1).permute(1, 2, 0) for part in parts
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_delta_net_has_whole_key_heads_on_each_rank(whole: Tensors, tp: int) -> None:
    """As megarl/parallel reads its rows: by key head q, k, v, z, b, a; the convolution's q, k, v."""
    ranks = of_ranks(whole, tp, "decoder.layers.0.self_attention.")
    assert DELTA is not None
    heads = DELTA.num_key_heads
    rows = torch.cat([rank["in_proj.weight"] for rank in ranks]).unflatten(0, (heads, -1))
    assert torch.equal(rows, torch.cat(ordered(whole), dim=1))
    conv = torch.cat([rank["conv1d.weight"] for rank in ranks]).unflatten(0, (heads, -1))
    file = whole["model.layers.0.linear_attn.conv1d.weight"]
    parts = file.split([heads * width for width in WIDTHS])
    assert torch.equal(conv, torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1))
    for name in ("A_log", "dt_bias"):
        together = torch.cat([rank[name] for rank in ranks])
        assert torch.equal(together, whole[f"model.layers.0.linear_attn.{name}"])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_engine_keeps_the_order_of_the_files(whole: Tensors, tp: int) -> None:
    """But [q; k; v] of the convolution are those of the rank (models/qwen3_next.py)."""
    ranks = of_ranks(whole, tp, "model.layers.0.linear_attn.", on_engine=True)
    for name in ("in_proj_qkvz.weight", "in_proj_ba.weight", "A_log"):
        together = torch.cat([rank[name] for rank in ranks])
        assert torch.equal(together, whole[f"model.layers.0.linear_attn.{name}"])
    assert DELTA is not None
    sizes = [DELTA.num_key_heads * width for width in WIDTHS]
    file = whole["model.layers.0.linear_attn.conv1d.weight"].split(sizes)
    by_rank = [rank["conv1d.weight"].split([size // tp for size in sizes]) for rank in ranks]
    for number, part in enumerate(file):
        assert torch.equal(torch.cat([parts[number] for parts in by_rank]), part)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_projections_that_are_apart_in_the_files(tp: int) -> None:
    """Training ranks have them by key head as those of Qwen3-Next, an engine one after the other."""
    whole = random_tensors(SPLIT_SHAPE)
    qkv, z, b, a = (
        whole[f"model.layers.0.linear_attn.in_proj_{name}.weight"]
        for name in ("qkv", "z", "b", "a")
    )
    assert DELTA is not None
    heads = DELTA.num_key_heads
    parts = [*qkv.split([heads * width for width in WIDTHS]), z, b, a]
    ranks = of_ranks(whole, tp, "decoder.layers.0.self_attention.", shape=SPLIT_SHAPE)
    rows = torch.cat([rank["in_proj.weight"] for rank in ranks]).unflatten(0, (heads, -1))
    assert torch.equal(rows, torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1))
    prefix = "model.layers.0.linear_attn."
    engines = of_ranks(whole, tp, prefix, on_engine=True, shape=SPLIT_SHAPE)
    for name, pieces in (("in_proj_qkvz.weight", parts[:4]), ("in_proj_ba.weight", parts[4:])):
        for rank, held in enumerate(engines):
            expected = torch.cat([piece.chunk(tp)[rank] for piece in pieces])
            assert torch.equal(held[name], expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gated_attention_has_queries_and_gates_where_each_side_reads_them(
    whole: Tensors, tp: int
) -> None:
    name = "model.layers.3.self_attn.q_proj.weight"
    width = MIXED_SHAPE.head_dim
    query, gate = whole[name].unflatten(0, (MIXED_SHAPE.num_heads, 2 * width)).chunk(2, dim=1)
    groups = MIXED_SHAPE.num_kv_heads // tp
    per_group = MIXED_SHAPE.num_heads // MIXED_SHAPE.num_kv_heads
    found: list[tuple[torch.Tensor, ...]] = []
    for rank in of_ranks(whole, tp, "decoder.layers.3.self_attention."):
        rows = rank["linear_qkv.weight"].unflatten(
            0, (groups, -1)
        )  # as get_query_key_value_tensors
        sizes = [per_group * width, per_group * width, width, width]
        found.append(tuple(part.flatten(0, 1) for part in rows.split(sizes, dim=1)))
    for number, part in enumerate((query, gate)):
        assert torch.equal(torch.cat([rank[number] for rank in found]), part.flatten(0, 1))
    k = whole[name.replace("q_proj", "k_proj")]
    assert torch.equal(torch.cat([rank[2] for rank in found]), k)
    engines = of_ranks(whole, tp, "model.layers.3.", on_engine=True)
    rows = [rank["qkv_proj.weight"][: 2 * width * MIXED_SHAPE.num_heads // tp] for rank in engines]
    assert torch.equal(torch.cat(rows), whole[name])


ENGINES = [EngineLayout(1, 4, 2), EngineLayout(2, 2, 2), EngineLayout(1, 4, 4, dp=2)]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize(
    "shape", [MIXED_SHAPE, WIDE_SHAPE, SPLIT_SHAPE], ids=["mixed", "wide norms", "split"]
)
def test_each_element_of_an_engine_has_a_source(shape: ModelShape, engine: EngineLayout) -> None:
    for layout in (TrainLayout(4, 4, 1, 1), TrainLayout(8, 2, 2, 2)):
        sources = megatron_map.parts(shape, layout)
        targets = sglang_map.parts(shape, engine)
        traffic = count_traffic(sources, targets, 8, gpus_per_node=8, dtype="float32")
        assert traffic.dest.sum() > 0


def test_wide_norms_are_cut_with_the_heads() -> None:
    layer = "model.layers.0.self_attn."
    for rank in range(8):
        shards = sglang_map.shards(WIDE_SHAPE, EngineLayout(1, 8, 1), rank)
        found = {shard.param: shard.rows for shard in shards}
        assert found[f"{layer}q_norm.weight"] == (2 * rank, 2 * rank + 2)
        assert found[f"{layer}k_norm.weight"] == (2 * (rank // 2), 2 * (rank // 2) + 2)


def test_files_have_convolutions_of_three_dimensions_and_gates_of_one_row() -> None:
    shapes = hf_tensors(MIXED_SHAPE)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (40, 1, 4)
    assert shape_as_stack("linear_attn.conv1d.weight", (40, 1, 4)) == (1, 40, 4)
    assert shape_as_stack("experts.w2_lora_A", (40, 1, 4)) == (40, 1, 4), "adapters of rank 1"
    assert shapes["model.layers.0.linear_attn.A_log"] == (8,)
    assert shapes["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 6)
    params = {shard.param for shard in megatron_map.shards(MIXED_SHAPE, TrainLayout(1, 1, 1, 1), 0)}
    assert "decoder.layers.0.mlp.shared_experts.gate_weight" in params


def test_adapters_cover_the_queries_and_gates_of_a_rank() -> None:
    size = LoraSize(2, 2, 4.0, ("q_proj",))
    (pair,) = lora_map.pairs(MIXED_SHAPE, TrainLayout(2, 2, 1, 1), 1, size)
    assert pair.rows == (16, 32)
    assert sorted(row for _, row, _ in pair.places) == list(range(0, 16, 2))
