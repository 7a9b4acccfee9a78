"""Both maps against layouts built another way: by cutting and stacking whole tensors as the two libraries describe."""

from __future__ import annotations

import pytest
import torch

from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.shards import LayoutError, Shard, param_table, rectangle, verify_params
from megarl.resharding.tensors import model_tensors
from megarl.types import ModelShape

SHAPE = ModelShape(4, 6, 8, 4, 2, 300, 8, 2, 64)
SHARED_KV = ModelShape(2, 6, 8, 2, 2, 100, 4, 2, 64)
Tensors = dict[str, torch.Tensor]


def checkpoint(shape: ModelShape) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(size, generator=generator) for name, size in model_tensors(shape).items()}


def fill(shards: list[Shard], whole: Tensors, padded: dict[str, int]) -> Tensors:
    """Parameters made through the map; vocabulary parameters get their padding rows, as zeros."""
    params = {n: torch.zeros(padded.get(n, rows), cols) for n, (rows, cols) in param_table(shards).items()}
    for s in shards:
        tensor = whole[s.name] if whole[s.name].dim() == 2 else whole[s.name].unsqueeze(1)
        part = tensor[s.rows[0] : s.rows[1], s.cols[0] : s.cols[1]]
        rectangle(params[s.param], s.at, s.num_rows, s.num_cols).copy_(part)
    return params


def padded_chunk(tensor: torch.Tensor, rows: int, parts: int, index: int) -> torch.Tensor:
    return torch.cat([tensor, torch.zeros(rows - len(tensor), tensor.shape[1])]).chunk(parts)[index]


@pytest.mark.parametrize("layout", [TrainLayout(1, 1, 1, 1), TrainLayout(8, 2, 2, 2), TrainLayout(4, 4, 1, 1)])
def test_megatron_map(layout: TrainLayout) -> None:
    whole, padded = checkpoint(SHAPE), layout.padded_vocab(SHAPE.vocab_size)
    for rank in range(layout.world_size):
        at, per_rank = layout.coords(rank), padded // layout.tp
        sizes = {"embedding.word_embeddings.weight": per_rank, "output_layer.weight": per_rank}
        params = fill(megatron_map.shards(SHAPE, layout, rank), whole, sizes)
        wanted: Tensors = {}
        if at.pp == 0:
            embedding = whole["model.embed_tokens.weight"]
            wanted["embedding.word_embeddings.weight"] = padded_chunk(embedding, padded, layout.tp, at.tp)
        for local, layer in enumerate(layout.layers(at.pp, SHAPE.num_layers)):
            wanted |= megatron_layer(SHAPE, whole, layout, at, f"model.layers.{layer}.", f"decoder.layers.{local}.")
        if at.pp == layout.pp - 1:
            wanted["decoder.final_layernorm.weight"] = whole["model.norm.weight"].unsqueeze(1)
            wanted["output_layer.weight"] = padded_chunk(whole["lm_head.weight"], padded, layout.tp, at.tp)
        assert params.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(params[name], wanted[name]), name


def megatron_layer(shape: ModelShape, whole: Tensors, layout: TrainLayout, at, source: str, param: str) -> Tensors:
    attention, experts = source + "self_attn.", shape.num_experts // layout.ep
    q, k, v = (whole[f"{attention}{x}_proj.weight"].chunk(shape.num_kv_heads) for x in "qkv")
    groups = torch.cat([torch.cat(parts) for parts in zip(q, k, v, strict=True)])
    wanted = {
        "input_layernorm.weight": whole[source + "input_layernorm.weight"].unsqueeze(1),
        "pre_mlp_layernorm.weight": whole[source + "post_attention_layernorm.weight"].unsqueeze(1),
        "mlp.router.weight": whole[source + "mlp.gate.weight"],
        "self_attention.linear_qkv.weight": groups.chunk(layout.tp)[at.tp],
        "self_attention.linear_proj.weight": whole[attention + "o_proj.weight"].chunk(layout.tp, dim=1)[at.tp],
        "self_attention.q_layernorm.weight": whole[attention + "q_norm.weight"].unsqueeze(1),
        "self_attention.k_layernorm.weight": whole[attention + "k_norm.weight"].unsqueeze(1),
    }
    for local in range(experts):
        expert = f"{source}mlp.experts.{at.ep * experts + local}."
        gate, up = (whole[f"{expert}{x}_proj.weight"].chunk(layout.etp)[at.etp] for x in ("gate", "up"))
        down = whole[expert + "down_proj.weight"].chunk(layout.etp, dim=1)[at.etp]
        wanted[f"mlp.experts.local_experts.{local}.linear_fc1.weight"] = torch.cat([gate, up])
        wanted[f"mlp.experts.local_experts.{local}.linear_fc2.weight"] = down
    return {param + name: tensor for name, tensor in wanted.items()}


def test_transformer_engine_names_hold_the_same_tensors() -> None:
    layout = TrainLayout(4, 2, 2, 2)
    local = megatron_map.shards(SHAPE, layout, 3)
    engine = megatron_map.shards(SHAPE, layout, 3, transformer_engine=True)
    assert [(s.name, s.rows, s.cols, s.at) for s in local] == [(s.name, s.rows, s.cols, s.at) for s in engine]
    renamed = {a.param: b.param for a, b in zip(local, engine, strict=True) if a.param != b.param}
    assert renamed["decoder.layers.0.input_layernorm.weight"] == (
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    )
    assert renamed["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"] == (
        "decoder.layers.1.mlp.experts.linear_fc2.weight3"
    )
    assert len(renamed) == 2 * (1 + 2 * 4)


ENGINES = [(SHAPE, EngineLayout(1, 1, 1)), (SHAPE, EngineLayout(1, 4, 2)), (SHARED_KV, EngineLayout(2, 8, 4))]


@pytest.mark.parametrize(("shape", "engine"), ENGINES)
def test_sglang_map(shape: ModelShape, engine: EngineLayout) -> None:
    whole, tp = checkpoint(shape), engine.tp
    padded = sglang_map.padded_vocab(shape.vocab_size, tp)
    for rank in range(tp):
        sizes = dict.fromkeys(["model.embed_tokens.weight", "lm_head.weight"], padded // tp)
        params = fill(sglang_map.shards(shape, engine, rank), whole, sizes)
        wanted = {name: padded_chunk(whole[name], padded, tp, rank) for name in sizes}
        wanted["model.norm.weight"] = whole["model.norm.weight"].unsqueeze(1)
        for layer in range(shape.num_layers):
            wanted |= sglang_layer(shape, whole, engine, rank, f"model.layers.{layer}.")
        assert params.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(params[name], wanted[name]), name


def sglang_layer(shape: ModelShape, whole: Tensors, engine: EngineLayout, rank: int, prefix: str) -> Tensors:
    attention, tp = prefix + "self_attn.", engine.tp
    query = whole[attention + "q_proj.weight"].chunk(tp)[rank]
    key, value = (whole[f"{attention}{x}_proj.weight"].view(shape.num_kv_heads, shape.head_dim, -1) for x in "kv")
    first = rank * shape.num_kv_heads // tp  # with fewer heads than ranks, several ranks come to the same head
    heads = slice(first, first + max(1, shape.num_kv_heads // tp))
    gate_up, down = [], []
    per_rank, (expert_rank, part) = shape.num_experts // engine.ep, divmod(rank, engine.moe_tp)
    for expert in range(expert_rank * per_rank, (expert_rank + 1) * per_rank):
        name = f"{prefix}mlp.experts.{expert}."
        gate_up += [whole[f"{name}{x}_proj.weight"].chunk(engine.moe_tp)[part] for x in ("gate", "up")]
        down.append(whole[name + "down_proj.weight"].chunk(engine.moe_tp, dim=1)[part])
    wanted = {
        attention + "qkv_proj.weight": torch.cat([query, key[heads].flatten(0, 1), value[heads].flatten(0, 1)]),
        attention + "o_proj.weight": whole[attention + "o_proj.weight"].chunk(tp, dim=1)[rank],
        prefix + "mlp.experts.w13_weight": torch.cat(gate_up),
        prefix + "mlp.experts.w2_weight": torch.cat(down),
        prefix + "mlp.gate.weight": whole[prefix + "mlp.gate.weight"],
    }
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    return wanted | {f"{prefix}{norm}.weight": whole[f"{prefix}{norm}.weight"].unsqueeze(1) for norm in norms}


VOCABULARIES = [(100, 1, 128), (100, 2, 128), (320, 2, 320), (320, 4, 320), (65, 3, 192)]


@pytest.mark.parametrize(("vocab", "tp", "rows"), VOCABULARIES)
def test_sglang_vocabulary_padding(vocab: int, tp: int, rows: int) -> None:
    assert sglang_map.padded_vocab(vocab, tp) == rows


def model_params(shards: list[Shard]) -> Tensors:
    return {name: torch.zeros(size) for name, size in param_table(shards).items()}


def test_verify_accepts_three_dimensions_vectors_and_padding() -> None:
    shards = sglang_map.shards(SHAPE, EngineLayout(1, 2, 1), 0)
    params = model_params(shards)
    params["model.layers.0.mlp.experts.w13_weight"] = torch.zeros(8, 64, 6)
    params["model.norm.weight"] = torch.zeros(6)
    params["lm_head.weight"] = torch.zeros(192, 6)
    verify_params(shards, params)


def change(name: str, tensor: torch.Tensor | None):
    return lambda params: params.pop(name) if tensor is None else params.update({name: tensor})


BREAKS = [
    (change("model.norm.weight", None), r"model\.norm\.weight: the model has no such parameter"),
    (change("model.extra.bias", torch.zeros(3)), r"model\.extra\.bias: the map does not know"),
    (change("model.norm.weight", torch.zeros(7)), r"model\.norm\.weight: the map needs \[6, 1\], the model has \[7\]"),
    (change("lm_head.weight", torch.zeros(149, 6)), r"lm_head\.weight: the map needs \[160, 6\]"),
    (change("model.layers.1.mlp.experts.w2_weight", torch.zeros(8, 32, 6)), r"layers\.1\.mlp\.experts\.w2_weight"),
    (change("lm_head.weight", torch.zeros(6, 192).t()), r"lm_head\.weight: the parameter is not contiguous"),
]


@pytest.mark.parametrize(("damage", "message"), BREAKS)
def test_verify_names_the_parameter(damage, message: str) -> None:
    shards = sglang_map.shards(SHAPE, EngineLayout(1, 2, 1), 0)
    params = model_params(shards)
    damage(params)
    with pytest.raises(LayoutError, match=message):
        verify_params(shards, params)


def test_verify_sees_holes_and_overlaps() -> None:
    hole = [Shard("a", (0, 2), (0, 4), "p", (0, 0)), Shard("b", (0, 1), (0, 2), "p", (2, 2))]
    with pytest.raises(LayoutError, match="p: the map does not cover every element"):
        verify_params(hole, {"p": torch.zeros(3, 4)})
    twice = [Shard("a", (0, 2), (0, 2), "p", (0, 0)), Shard("b", (0, 2), (0, 2), "p", (1, 0))] + [
        Shard("c", (0, 1), (0, 2), "p", (0, 0))
    ]
    with pytest.raises(LayoutError, match="p: the map does not cover every|p: the map covers an element twice"):
        verify_params(twice, {"p": torch.zeros(3, 2)})
    same_area = [Shard("a", (0, 2), (0, 2), "p", (0, 0)), Shard("b", (0, 2), (0, 1), "p", (1, 1))]
    with pytest.raises(LayoutError, match="p: the map covers an element twice"):
        verify_params(same_area, {"p": torch.zeros(3, 2)})
