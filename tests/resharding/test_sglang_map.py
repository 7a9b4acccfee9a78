"""SGLang's map: its parts, its padding and its fp8 tiles; test_real_engines.py holds it against SGLang's own loader."""

from __future__ import annotations

import cProfile
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from megarl.model.precision import FP8_TILES
from megarl.model.shape import MlaShape, ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import sglang_map
from megarl.resharding.shards import LayoutError, Shard, param_table, views

Tensors = dict[str, torch.Tensor]
QWEN3_MOE = ModelShape(2, 6, 8, 4, 2, 300, num_experts=8, experts_per_token=2, moe_ffn_size=16)
TWO_KV_HEADS = replace(QWEN3_MOE, num_kv_heads=2, vocab_size=65)
QWEN3 = ModelShape(2, 6, 8, 4, 2, 100, num_dense_layers=2, ffn_size=16, tied=True)
QWEN2 = replace(QWEN3, tied=False, qk_norm=False, qkv_bias=True)
LLAMA = replace(QWEN3, tied=False, qk_norm=False)
MLA = MlaShape(q_lora_rank=10, kv_lora_rank=6, nope_dim=4, rope_dim=2, v_dim=3)
DEEPSEEK = ModelShape(
    3, 6, 8, 8, 6, 300, num_experts=8, experts_per_token=2, moe_ffn_size=16, num_dense_layers=1, ffn_size=24,
    num_shared_experts=2, router_bias=True, qk_norm=False, num_mtp_layers=1, mla=MLA,
)  # fmt: skip
NO_QUERY_RANK = replace(DEEPSEEK, mla=replace(MLA, q_lora_rank=None))
V3 = ModelShape(
    61, 7168, 128, 128, 192, 129280, num_experts=256, experts_per_token=8, moe_ffn_size=2048, num_dense_layers=3,
    ffn_size=18432, num_shared_experts=1, router_bias=True, qk_norm=False, num_mtp_layers=1,
    mla=MlaShape(1536, 512, 128, 64, 128),
)  # fmt: skip


def fill(shards: list[Shard], whole: Tensors, padded: Mapping[str, int]) -> Tensors:
    """Parameters [items, rows, cols] made through the map; vocabulary parameters get their padding rows, as zeros."""
    table = param_table(shards)
    params = {
        n: torch.zeros(items, padded.get(n, rows), cols) for n, (items, rows, cols) in table.items()
    }
    for s in shards:
        planes = [plane for view in views(params, s.param, s.at, s.size) for plane in view]
        for item, plane in zip(range(*s.items), planes, strict=True):
            plane.copy_(
                stack(whole[s.name.format(item)])[s.rows[0] : s.rows[1], s.cols[0] : s.cols[1]]
            )
    return params


def stack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() > 1 else tensor.unsqueeze(1)


PAIRS = {
    "qwen3-moe tp1": (QWEN3_MOE, EngineLayout(1, 1, 1)),
    "qwen3-moe tp4 ep2": (QWEN3_MOE, EngineLayout(1, 4, 2)),
    "qwen3-moe tp8 ep4, two kv heads": (TWO_KV_HEADS, EngineLayout(1, 8, 4)),
    "qwen3-moe tp8 ep8 dp2, two kv heads": (TWO_KV_HEADS, EngineLayout(1, 8, 8, dp=2)),
    "qwen3 tied tp2": (QWEN3, EngineLayout(1, 2, 1)),
    "qwen2 tp4": (QWEN2, EngineLayout(1, 4, 1)),
    "qwen2 tp8, kv heads shared": (QWEN2, EngineLayout(1, 8, 1)),
    "llama tp2": (LLAMA, EngineLayout(1, 2, 1)),
    "deepseek tp2": (DEEPSEEK, EngineLayout(1, 2, 1)),
    "deepseek tp4 ep2": (DEEPSEEK, EngineLayout(1, 4, 2)),
    "deepseek tp4 ep4 dp4": (DEEPSEEK, EngineLayout(1, 4, 4, dp=4)),
    "deepseek tp8 ep2 dp2": (DEEPSEEK, EngineLayout(1, 8, 2, dp=2)),
    "deepseek tp8 ep2 dp2, whole dense layers": (
        DEEPSEEK,
        EngineLayout(1, 8, 2, dp=2, whole_dense=True),
    ),
    "deepseek tp8 ep2 dp2, whole shared experts": (
        DEEPSEEK,
        EngineLayout(1, 8, 2, dp=2, whole_shared=True),
    ),
    "qwen3-moe tp4 ep2 dp2, a head of each group": (
        QWEN3_MOE,
        EngineLayout(1, 4, 2, dp=2, group_head=True),
    ),
    "deepseek without query rank tp2": (NO_QUERY_RANK, EngineLayout(1, 2, 1)),
    "deepseek tp4 ep2, drafts": (DEEPSEEK, EngineLayout(1, 4, 2, draft=1)),
    "deepseek tp8 ep2 dp2, whole, drafts": (
        DEEPSEEK,
        EngineLayout(1, 8, 2, dp=2, whole_dense=True, whole_shared=True, group_head=True, draft=3),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_parts_hold_what_their_members_hold_alike(pair: str) -> None:
    shape, alone = PAIRS[pair]
    assert alone.errors(shape, alone.tp) == []
    engine = replace(alone, count=3, first=5)
    parts = sglang_map.parts(shape, engine)
    assert len({part.members for part in parts}) == len(parts)
    assert all(list(part.members) == sorted(part.members) for part in parts)
    for slot in range(engine.end + 1):
        at = engine.member(slot)
        held = [shard for part in parts if slot in part.members for shard in part.shards]
        assert held == (sglang_map.shards(shape, alone, at[1]) if at else [])


def test_replicas_are_one_part() -> None:
    """What every rank holds is one part, and so is a shared key/value head: a slice enters a node once."""
    parts = sglang_map.parts(TWO_KV_HEADS, EngineLayout(2, 4, 2))
    by_members = {part.members: {shard.name for shard in part.shards} for part in parts}
    assert "model.norm.weight" in by_members[tuple(range(8))]
    assert "model.layers.0.mlp.gate.weight" in by_members[tuple(range(8))]
    kv = {f"model.layers.{layer}.self_attn.{x}_proj.weight" for layer in range(2) for x in "kv"}
    assert by_members[0, 1, 4, 5] == by_members[2, 3, 6, 7] == kv
    assert len(parts) == 1 + 2 + 4


VOCABULARIES = [(100, 1, 128), (100, 2, 128), (320, 2, 320), (320, 4, 320), (65, 3, 192)]


@pytest.mark.parametrize(("vocab", "ranks", "rows"), VOCABULARIES)
def test_vocabulary_padding(vocab: int, ranks: int, rows: int) -> None:
    assert sglang_map.padded_vocab(vocab, ranks) == rows


def test_fp8_weights_have_their_scales_in_tiles() -> None:
    engine = EngineLayout(1, 8, 8, dp=2, precision=FP8_TILES)
    assert engine.errors(V3, 8) == []
    shards = {shard.name: shard for shard in sglang_map.shards(V3, engine, 5)}
    up, scale = (
        shards[f"model.layers.9.mlp.experts.{{}}.up_proj.weight{end}"] for end in ("", "_scale_inv")
    )
    assert (up.box, up.at, up.dtype) == (
        ((160, 192), (0, 2048), (0, 7168)),
        (0, 2048, 0),
        "float8_e4m3fn",
    )
    assert (scale.box, scale.at, scale.dtype) == (
        ((160, 192), (0, 16), (0, 56)),
        (0, 16, 0),
        "float32",
    )
    assert scale.param == "model.layers.9.mlp.experts.w13_weight_scale_inv"
    kv = shards["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"]
    assert (kv.rows, kv.at) == ((0, 5), (0, 12, 0)), "576 rows end inside a tile"
    assert kv.param == "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv"
    quantised = {name for name, shard in shards.items() if shard.dtype == "float8_e4m3fn"}
    assert {f"{name}_scale_inv" for name in quantised} == {
        name for name in shards if name.endswith("_scale_inv")
    }


@pytest.mark.parametrize(("layers", "number"), [(0, "no"), (2, "2")])
def test_a_model_that_cannot_draft_is_refused(layers: int, number: str) -> None:
    shape = replace(V3, num_mtp_layers=layers)
    (error,) = EngineLayout(1, 8, 8, dp=8, draft=2).errors(shape, 8)
    assert error.where == "rollout.engine.draft"
    assert error.problem.startswith(f"2, but the model has {number} multi-token prediction layers")
    assert not EngineLayout(1, 8, 8, dp=8).errors(shape, 8)


def test_drafts_need_a_gpu() -> None:
    errors = EngineLayout(1, 2, 1, draft=1).cpu_errors(V3)
    assert [error.where for error in errors] == ["rollout.engine.draft"]
    assert "verifies drafts greedily" in errors[0].problem


CUT_TILES = [
    (EngineLayout(1, 32, 1, precision=FP8_TILES), "a dense layer", "set rollout.engine.tp to 16"),
    (
        EngineLayout(1, 32, 32, precision=FP8_TILES),
        "the shared experts",
        "set rollout.engine.tp to 16",
    ),
]


@pytest.mark.parametrize(("engine", "what", "hint"), CUT_TILES)
def test_a_cut_tile_is_refused_by_name(engine: EngineLayout, what: str, hint: str) -> None:
    errors = engine.errors(V3, 32)
    assert {error.where for error in errors} == {"rollout.engine.tp"}
    assert any(what in error.problem for error in errors)
    assert all(hint in error.hint for error in errors)
    with pytest.raises(
        LayoutError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: .* cut a tile of 128"
    ):
        sglang_map.parts(V3, engine)


def calls_of_mapping(engine: EngineLayout) -> int:
    profile = cProfile.Profile()
    profile.runcall(sglang_map.parts, V3, engine)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("ep", [1, 8])
def test_a_cluster_sixteen_times_as_large_costs_less_than_sixteen_times_as_much(ep: int) -> None:
    assert len(sglang_map.parts(V3, EngineLayout(16, 32, ep * 4))) == 33
    assert calls_of_mapping(EngineLayout(16, 32, ep * 4)) < 8 * calls_of_mapping(
        EngineLayout(4, 8, ep)
    )
