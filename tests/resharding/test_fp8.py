"""fp8 weights: what a tile becomes, that it depends on that tile alone, and who can compute its scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.fp8.codes import LARGEST, quantise, tile_scales
from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from megarl.resharding.fp8 import with_scales
from megarl.resharding.shards import LayoutError, Part, Shard
from tests.resharding.fp8_tiles import TILE, one_tile_at_a_time

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.tuples(st.integers(1, 2), st.integers(1, 300), st.integers(1, 300))


def random_block(
    size: tuple[int, int, int], seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Tiles whose magnitudes differ by up to 1e12, so that one tile's scale would ruin its neighbour."""
    generator = torch.Generator().manual_seed(seed)
    items, rows, cols = size
    exponents = torch.randint(
        -6, 7, (items, -(-rows // TILE), -(-cols // TILE)), generator=generator
    ).double()
    magnitude = (
        (10.0**exponents).repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, :rows, :cols]
    )
    return (torch.randn(size, generator=generator, dtype=torch.float64) * magnitude).to(dtype)


@settings(max_examples=30)
@given(SIZES, st.integers(0, 99), DTYPES)
def test_every_tile_has_the_scale_of_its_own_largest_element(
    size: tuple[int, int, int], seed: int, dtype: torch.dtype
) -> None:
    block = random_block(size, seed, dtype)
    before = block.clone()
    quantised, scales = quantise(block), tile_scales(block)
    expected_quantised, expected_scales = one_tile_at_a_time(block)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantised.view(torch.uint8), expected_quantised.view(torch.uint8))
    assert torch.equal(block, before)


@settings(max_examples=40)
@given(st.data())
def test_a_part_on_tile_boundaries_gives_the_bytes_of_the_whole(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 520)), data.draw(st.integers(1, 520))
    block = random_block((2, rows, cols), data.draw(st.integers(0, 99)), data.draw(DTYPES))
    (top, bottom), (left, right) = (
        sorted(
            data.draw(
                st.lists(st.integers(0, -(-size // TILE)), min_size=2, max_size=2, unique=True)
            )
        )
        for size in (rows, cols)
    )
    elements = (slice(None), slice(top * TILE, bottom * TILE), slice(left * TILE, right * TILE))
    part = block[elements]  # not contiguous, as a shard of a larger parameter is not
    assert torch.equal(
        quantise(part).view(torch.uint8), quantise(block)[elements].view(torch.uint8)
    )
    assert torch.equal(tile_scales(part), tile_scales(block)[:, top:bottom, left:right])


class Divisions(TorchDispatchMode):
    """Notes what is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.divisors.append(args[1])
        return func(*args, **(kwargs or {}))


def test_nothing_is_divided_by_a_number() -> None:
    """CUDA would multiply by the number's rounded inverse, and a scale's last bit would not be the CPU's."""
    with Divisions() as divisions:
        quantise(torch.ones(1, 200, 200))
    assert divisions.divisors
    assert all(torch.is_tensor(divisor) and divisor.dim() for divisor in divisions.divisors)
    largest = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(largest / LARGEST, largest * torch.tensor(1 / LARGEST)), "the two differ"


def test_zero_tiles_keep_scale_one() -> None:
    block = torch.zeros(1, 200, 130)
    block[0, 0, 129] = 2.0
    assert tile_scales(block).tolist() == [[[1.0, pytest.approx(2 / 448)], [1.0, 1.0]]]
    assert quantise(block).float().nonzero().tolist() == [[0, 0, 129]]


@pytest.mark.parametrize("largest", [torch.finfo(torch.bfloat16).max, 1.0, 1e-37, 2.0e-42, 1e-45])
def test_huge_and_tiny_tiles_stay_finite(largest: float) -> None:
    block = torch.full((1, 3, 3), largest)
    block[0, 1, 1] *= -0.5
    quantised, scales = quantise(block), tile_scales(block)
    assert quantised.float().isfinite().all() and scales.isfinite().all() and (scales > 0).all()
    if largest > 1e-37:
        assert quantised[0, 0, 0].float() == LARGEST and quantised[0, 1, 1].float() == -LARGEST / 2


def wide_model(moe_ffn_size: int = 512) -> ModelShape:
    return ModelShape(
        num_layers=2,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=100,
        num_experts=4,
        experts_per_token=2,
        moe_ffn_size=moe_ffn_size,
    )


def test_a_scale_stands_behind_its_weight_in_tiles_of_the_same_parameter() -> None:
    weight = Shard("w", (256, 512), (0, 200), "fused", (3, 128, 0), (4, 6))
    (part,) = with_scales([Part((weight,), (0, 1))], [asking("w")])
    assert part.members == (0, 1) and part.shards[0] == weight
    assert part.shards[1] == Shard(
        "w_scale_inv", (2, 4), (0, 2), "fused", (3, 1, 0), (4, 6), "float32"
    )


def asking(name: str) -> Part:
    return Part((Shard(f"{name}_scale_inv", (0, 9), (0, 9), "s", dtype="float32"),), (0,))


@pytest.mark.parametrize(
    "shard",
    [
        Shard("w", (64, 128), (0, 128), "p"),  # starts inside a tile
        Shard("w", (0, 128), (192, 256), "p"),
        Shard("w", (0, 100), (0, 128), "p"),  # ends inside a tile that another rank goes on with
        # sits across two tiles' rows of its own parameter
        Shard("w", (0, 128), (0, 128), "p", (0, 64, 0)),
    ],
)
def test_a_tile_that_the_training_layout_cuts_is_refused_by_name(shard: Shard) -> None:
    rest = Shard("w", (128, 300), (0, 300), "p")
    with pytest.raises(LayoutError, match=r"^w: .*cut a tile of 128"):
        with_scales([Part((shard,), (0,)), Part((rest,), (1,))], [asking("w")])


def test_a_real_layout_that_cuts_tiles_is_refused_by_name() -> None:
    shape = wide_model(moe_ffn_size=192)
    # the experts' width over two ranks: 96
    sources = megatron_map.parts(shape, TrainLayout(2, tp=2, pp=1, ep=1))
    with pytest.raises(
        LayoutError, match=r"^model\.layers\.0\.mlp\.experts\.\{\}\.gate_proj\.weight: "
    ):
        with_scales(sources, [asking("model.layers.0.mlp.experts.{}.gate_proj.weight")])
