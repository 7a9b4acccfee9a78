"""Scales that are powers of two: where the codes of all quantisers in use are the same."""

from __future__ import annotations

import pytest
import torch

from megarl.fp8 import TILE, ScaleRule
from megarl.fp8.codes import FP8, LARGEST, quantise, quantise_groups, scales_of, tile_scales


def magnitudes() -> torch.Tensor:
    """Every positive bfloat16 that is not denormal and whose scale is not, and its neighbours in float32."""
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite() & (every > 1e-35)]
    above = torch.nextafter(every, every.new_tensor(float("inf")))
    return torch.cat([every, above, torch.nextafter(every, every.new_zeros(()))])


def of_transformer_engine(largest: torch.Tensor) -> torch.Tensor:
    """448 / amax without its mantissa, and the inverse of that (recipe_common.cuh)."""
    factor = torch.full_like(largest, LARGEST) / largest
    return 1 / (factor.view(torch.int32) & 0x7F800000).view(torch.float32)


def of_sglang(largest: torch.Tensor) -> torch.Tensor:
    """amax / 448, rounded up to a power of two (ceil_to_ue8m0)."""
    return torch.exp2(torch.ceil(torch.log2(largest.double() / LARGEST))).float()


def test_all_quantisers_have_the_same_power_of_two() -> None:
    largest = magnitudes()
    scales = scales_of(largest, "powers_of_two")
    assert torch.equal(scales, of_transformer_engine(largest))
    assert torch.equal(scales, of_sglang(largest))
    assert (largest / scales <= LARGEST).all() and (largest / scales > LARGEST / 2).all()


def test_the_ways_to_scale_give_the_same_codes_for_powers_of_two_alone() -> None:
    """x / s, x * (1 / s) and x * (448 / amax) are three of the ways in use."""
    values = torch.randn(64, TILE, generator=torch.Generator().manual_seed(0))
    largest = values.abs().amax(1, keepdim=True)
    for rule, all_equal in (("powers_of_two", True), ("exact", False)):
        scales = scales_of(largest, rule)  # type: ignore[arg-type]
        products = values * (1 / scales)
        assert torch.equal(values / scales, products) == all_equal
        assert all_equal or not torch.equal(scales, largest * (1 / LARGEST))
    codes, scales = quantise_groups(values, "powers_of_two")
    assert torch.equal(codes.float(), (values / scales).to(FP8).float())


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 448.0, 3e38])
def test_scales_are_normal_powers_of_two(largest: float) -> None:
    block = torch.full((1, 130, 3), largest)
    codes = quantise(block, "powers_of_two")
    scales = tile_scales(block, "powers_of_two")
    assert codes.float().isfinite().all()
    assert (torch.frexp(scales)[0] == 0.5).all() and (scales >= 2.0**-126).all()
    if largest in (448.0, 0.0):
        assert (scales == 1).all() and (codes.float() == largest).all()


@pytest.mark.parametrize("rule", ["powers_of_two", "exact"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_what_is_not_finite_stays_so(rule: ScaleRule, value: str) -> None:
    rows = torch.ones(1, TILE)
    rows[0, 3] = float(value)
    codes, scales = quantise_groups(rows, rule)
    assert not (codes.float() * scales).isfinite()[0, 3]


def test_a_group_depends_on_nothing_outside_of_it() -> None:
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = quantise_groups(rows, "powers_of_two")
    assert codes.shape == rows.shape and scales.shape == (5, 3)
    part, of_part = quantise_groups(rows[2:3, TILE:], "powers_of_two")
    assert torch.equal(part.float(), codes[2:3, TILE:].float())
    assert torch.equal(of_part, scales[2:3, 1:])
