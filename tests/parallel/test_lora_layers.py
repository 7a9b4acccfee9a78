"""Adapters of layers like TransformerEngine's, with stand-ins: one has a norm inside, one several experts.

The layers themselves need a GPU: tests/gpu/test_rank.py.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine

from megarl.model.lora_pairs import LoraSize
from megarl.model.tensors import STACK
from megarl.parallel import groups, lora, model
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, megatron_map
from megarl.resharding.shards import views
from tests.resharding.test_sglang_map import QWEN3_MOE

SIZE, EPS = LoraSize(3, 2, 6.0, ()), 1e-5
SHAPE = replace(QWEN3_MOE, num_layers=1)
ONE_RANK = TrainLayout(1, 1, 1, 1)


class Normed(torch.nn.Module):
    """As TELayerNormColumnParallelLinear."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, cols))
        self.layer_norm_weight, self.eps = torch.nn.Parameter(torch.rand(cols)), EPS

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(
            F.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, EPS), self.weight
        ), None


class Grouped(torch.nn.Module):
    """As TEColumnParallelGroupedLinear and TERowParallelGroupedLinear."""

    def __init__(self, count: int, rows: int, cols: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.randn(rows, cols)))

    def forward(self, hidden: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, None]:
        # adapters come behind the weights
        parts = zip(hidden.split([*m_splits]), self.parameters(), strict=False)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None


def chunk_of(sizes: dict[str, tuple[int, ...]]) -> torch.nn.Module:
    """A model with a stand-in at each parameter of the map, by the parameters' sizes."""
    chunk = torch.nn.Module()
    for param, (count, rows, cols) in sizes.items():
        path, _, weight = param.rpartition(".")
        *parents, name = path.split(".")
        place = chunk
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(
                    parent, torch.nn.ModuleList() if parent == "layers" else torch.nn.Module()
                )
            place = getattr(place, parent)
        place.add_module(
            name, Grouped(count, rows, cols) if STACK in weight else Normed(rows, cols)
        )
    return chunk


@pytest.fixture(scope="module")
def linears() -> dict[str, tuple[int, ...]]:
    """The map's linear layers of the decoder, with the extent of each."""
    extents: dict[str, tuple[int, ...]] = {}
    for shard in megatron_map.shards(SHAPE, ONE_RANK, 0, transformer_engine=True):
        if lora_map.leaf_of(shard.name) in lora_map.TARGETS:
            ends = tuple(at + size for at, size in zip(shard.at, shard.size, strict=True))
            extents[shard.param] = tuple(map(max, ends, extents.get(shard.param, ends)))
    return extents


@pytest.fixture
def adapted(
    linears: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> torch.nn.Module:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    for name in ("tp_group", "etp_group"):
        monkeypatch.setattr(groups, name, lambda: alone)
    monkeypatch.setattr(lora, "CUTS", {Normed: "columns", Grouped: "columns"})
    torch.manual_seed(3)
    chunk = chunk_of(linears)
    lora.attach(
        [chunk], lora_map.pairs(SHAPE, ONE_RANK, 0, SIZE, transformer_engine=True), SIZE, seed=1
    )
    for name, factor in model.factors([chunk]).items():
        if name.endswith(".B"):
            factor.normal_()
    return chunk


def test_factors_have_the_names_and_the_order_of_the_map(adapted: torch.nn.Module) -> None:
    held = model.factors([adapted])
    named = set()
    for shard in lora_map.shards(SHAPE, ONE_RANK, 0, SIZE, transformer_engine=True):
        (view,) = {tensor.shape for tensor in views(held, shard.param, shard.at, shard.size)}
        assert view[-2:] == torch.Size(shard.size[1:])
        named |= {shard.param.format(number) for number in range(*shard.items)}
    assert named == held.keys()


def merged(linear: Any, weight: str, tensor: str) -> torch.Tensor:
    """Rows of a layer's weight that are a tensor of the checkpoint with its delta."""
    pairs = {pair.held.name: pair for pair in linear.modules() if isinstance(pair, lora.FactorPair)}
    pair, summed = pairs[tensor], getattr(linear, weight).clone()
    delta = SIZE.scale_of(pair.held.is_expert) * pair.B @ pair.A
    for row, start, number in pair.held.places:
        summed[row : row + number] += delta[start : start + number]
    return summed


def test_the_norm_inside_a_layer_comes_before_its_adapter(adapted: Any) -> None:
    linear = adapted.decoder.layers.get_submodule("0").self_attention.linear_proj
    hidden = torch.randn(5, linear.weight.shape[1])
    weight = merged(linear, "weight", "model.layers.0.self_attn.o_proj.weight")
    normed = F.rms_norm(hidden, hidden.shape[-1:], linear.layer_norm_weight, EPS)
    torch.testing.assert_close(linear(hidden)[0], F.linear(normed, weight))


def test_each_expert_of_a_layer_has_its_own_adapter(adapted: Any) -> None:
    """One of them without a token."""
    linear = adapted.decoder.layers.get_submodule("0").mlp.experts.linear_fc2
    splits = [3, 0, *[2] * (SHAPE.num_experts - 2)]
    hidden = torch.randn(sum(splits), linear.weight0.shape[1])
    expected = [
        F.linear(
            part,
            merged(
                linear, f"weight{number}", f"model.layers.0.mlp.experts.{number}.down_proj.weight"
            ),
        )
        for number, part in enumerate(hidden.split(splits))
    ]
    output, _ = linear(hidden, splits)
    torch.testing.assert_close(output, torch.cat(expected))
    output.sum().backward()
    factors = {
        name: param
        for name, param in linear.named_parameters()
        if ".lora" in name or name.startswith("lora")
    }
    assert {name: bool(param.grad.any()) for name, param in factors.items()} == {
        name: ".1." not in name for name in factors
    }


def test_the_parallel_modes_are_those_of_megatrons_classes() -> None:
    """By its source: the classes themselves need TransformerEngine."""
    tree = ast.parse(Path(transformer_engine.__file__).read_text(encoding="utf-8"))
    modes = {}
    for class_node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        keywords = [
            keyword
            for node in ast.walk(class_node)
            if isinstance(node, ast.Call)
            for keyword in node.keywords
        ]
        values = {
            keyword.value.value
            for keyword in keywords
            if keyword.arg == "parallel_mode" and isinstance(keyword.value, ast.Constant)
        }
        modes |= {class_node.name: values}
    # duplicated: as its caller says
    expected = {"columns": {"column"}, "rows": {"row"}, "nothing": set()}
    assert {name: modes[name] for name in lora.TE_CUTS} == {
        name: expected[cut] for name, cut in lora.TE_CUTS.items()
    }
