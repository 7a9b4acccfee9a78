"""What rounding keeps of the deltas of adapters: to the nearest number, and stochastically."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import lora_map, megatron_map
from megarl.resharding.lora_merge import Merge, MergedBox
from megarl.resharding.shards import Range, Shard, param_table
from tests.resharding.test_lora_map import of_rank, whole_tensors
from tests.resharding.test_sglang_map import LLAMA, QWEN3_MOE, Tensors

ONE_RANK = TrainLayout(1, 1, 1, 1)
SIZE = LoraSize(16, 16, 32.0, ("q_proj",))
WIDE = replace(LLAMA, num_layers=1, hidden_size=2048)


def merged(
    merge: Merge, shards: list[Shard], params: Tensors
) -> dict[tuple[str, Range, Range], torch.Tensor]:
    """The merged elements of each of a rank's weights, by name, rows and columns; of experts, of each item."""
    parts = {}
    for shard in shards:
        boxes = merge.boxes(shard.name, params, shard.param, shard.at, shard.size)
        for item, box in zip(range(*shard.items), boxes or [], strict=True):
            part = torch.empty(box.shape, dtype=torch.bfloat16)
            box.write(part)
            parts[shard.name.format(item), shard.rows, shard.cols] = part[0]
    return parts


Case = tuple[list[Shard], Tensors, Tensors]


@pytest.fixture
def case() -> Case:
    """(shards of the weights, weights as models have them, factors)."""
    generator = torch.Generator().manual_seed(3)
    weights = [
        weight
        for weight in megatron_map.shards(WIDE, ONE_RANK, 0)
        if weight.name.endswith("q_proj.weight")
    ]
    params = {
        name: 0.02 * torch.randn(size[1:], generator=generator)
        for name, size in param_table(weights).items()
    }
    factors = {}
    for name, size in param_table(lora_map.shards(WIDE, ONE_RANK, 0, SIZE)).items():
        uniform = 2 * torch.rand(size[1:], generator=generator) - 1
        factors[name] = uniform / WIDE.hidden_size**0.5 if name.endswith("A") else uniform
    return weights, {name: param.bfloat16() for name, param in params.items()}, factors


def merge_of(case: Case, rms: float, rounding: str) -> tuple[Merge, Tensors]:
    """The merge, begun with version 3; rms: of B."""
    weights, _, factors = case
    size = replace(SIZE, rounding=rounding)
    held = {
        name: factor if name.endswith("A") else 3**0.5 * rms * factor
        for name, factor in factors.items()
    }
    merge = Merge.of(size, weights, lora_map.shards(WIDE, ONE_RANK, 0, size), held)
    merge.begin(3)
    return merge, held


@pytest.mark.parametrize(("rms", "nearest"), [(1e-4, 0.2), (1e-3, 0.9), (1e-2, 1.0)])
def test_the_kept_share_says_what_arrives(case: Case, rms: float, nearest: float) -> None:
    """Of small deltas little; stochastic rounding keeps all of them in the mean."""
    weights, params, _ = case
    for rounding, expected in (("nearest", nearest), ("stochastic", 1.0)):
        merge, _ = merge_of(case, rms, rounding)
        merged(merge, weights, params)
        share = merge.kept_share()
        assert share == pytest.approx(expected, abs=0.1), rounding


def test_without_a_delta_there_is_no_share_and_no_change(case: Case) -> None:
    weights, params, _ = case
    merge, _ = merge_of(case, 0.0, "stochastic")
    parts = merged(merge, weights, params)
    assert merge.kept_share() is None
    for (name, rows, _), part in parts.items():
        (shard,) = [weight for weight in weights if weight.name == name and weight.rows == rows]
        start = shard.at[1]
        assert torch.equal(part, params[shard.param][start : start + shard.size[1]]), (
            "numbers of the type stay"
        )


def test_an_element_is_one_of_its_neighbours_and_their_mean(case: Case) -> None:
    weights, params, _ = case
    merge, held = merge_of(case, 1e-3, "stochastic")
    shard = weights[0]
    a, b = (
        next(matrix for name, matrix in held.items() if name.endswith(factor)) for factor in "AB"
    )
    exact = (
        params[shard.param][: shard.size[1]].float()
        + SIZE.alpha / SIZE.rank * b[: shard.size[1]] @ a
    )
    nearest = exact.bfloat16().float()
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs())) - 7)
    total, count = torch.zeros_like(exact), 64
    for version in range(count):
        merge.begin(version)
        part = merged(merge, [shard], params)[shard.name.format(0), shard.rows, shard.cols].float()
        assert ((part - exact).abs() < 1.001 * ulp).all()
        total += part
    # of a uniform choice between two: a deviation of at most 1 / 2 / sqrt(64)
    off = (total / count - exact) / ulp
    assert off.mean().abs() < 1e-3 and off.std() < 0.0626
    assert ((nearest - exact) / ulp).abs().mean() > 0.2, (
        "which rounding to nearest does not make good"
    )


def test_boxes_that_are_kept_read_the_version_of_the_exchange(case: Case) -> None:
    """An executor keeps them over all exchanges, and what is verified is read by new ones."""
    weights, params, _ = case
    merge, _ = merge_of(case, 1e-3, "stochastic")
    shard = weights[0]

    def boxes() -> list[MergedBox]:
        return merge.boxes(shard.name, params, shard.param, shard.at, shard.size) or []

    def read(box: MergedBox) -> torch.Tensor:
        part = torch.empty(box.shape, dtype=torch.bfloat16)
        box.write(part)
        return part

    (kept,), values = boxes(), []
    for version in (1, (1 << 40) + 2):
        merge.begin(version)
        values.append(read(kept))
        assert torch.equal(values[-1], read(boxes()[0]))
    assert not torch.equal(*values)


@pytest.mark.parametrize("layout", [TrainLayout(4, 4, 1, 1), TrainLayout(4, 2, 1, 2, expert_tp=2)])
def test_layouts_round_alike(layout: TrainLayout) -> None:
    """But where float32 sums differ in their last bit."""
    shape, size = QWEN3_MOE, LoraSize(3, 2, 6.0, (), "stochastic")
    whole = {
        name: tensor.bfloat16() if ".lora_" not in name else tensor
        for name, tensor in whole_tensors(shape)[0].items()
    }
    expected = all_merged(shape, ONE_RANK, size, whole)
    rounded = all_merged(shape, layout, size, whole)
    assert rounded.keys() == expected.keys()
    for name, values in rounded.items():
        assert (values == expected[name]).float().mean() > 0.99, name


def all_merged(shape: ModelShape, layout: TrainLayout, size: LoraSize, whole: Tensors) -> Tensors:
    """The whole merged tensors that all ranks make together."""
    tensors: Tensors = {}
    for rank in range(layout.world_size):
        weights = [
            weight
            for weight in megatron_map.shards(shape, layout, rank)
            if weight.name.format(0) in whole
        ]
        factors = lora_map.shards(shape, layout, rank, size)
        params = {name: param.bfloat16() for name, param in of_rank(weights, whole).items()}
        merge = Merge.of(size, weights, factors, of_rank(factors, whole))
        merge.begin(7)
        for (name, rows, cols), part in merged(merge, weights, params).items():
            tensors.setdefault(name, torch.zeros_like(whole[name]))[slice(*rows), slice(*cols)] = (
                part
            )
    return tensors
