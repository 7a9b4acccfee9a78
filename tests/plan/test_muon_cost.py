"""What Muon costs and saves by plan."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.model.hf_config import read_model
from megarl.model.matrices import matrices
from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.plan.muon_cost import MuonWork, matrix_elements, muon_work
from tests.plan import plans
from tests.plan.test_step_time import CARD, LAYERS, MODEL


def deepseek(folder: Path) -> ModelShape:
    shape = read_model(plans.recipe(folder, "deepseek-v3", 8).model.path).known_shape
    assert shape
    return shape


@pytest.mark.parametrize("trains_mtp", [False, True])
def test_the_ranks_of_all_stages_have_all_matrices(tmp_path: Path, trains_mtp: bool) -> None:
    """Tensor-parallel ranks have copies of MLA's down projections, of each of which one rank computes."""
    shape = deepseek(tmp_path)
    layout = TrainLayout(256, 2, 16, 16, stage_layers=(3, *[4] * 14, 2))
    works = [muon_work(shape, layout, stage, trains_mtp=trains_mtp) for stage in range(16)]
    stepped = 16 * sum(work.elements for work in works)
    whole = matrix_elements(shape)
    found = [each for each in matrices(shape) if trains_mtp or ".layers.61." not in each.tensor]
    everything = sum(each.count * each.rows * each.cols for each in found)
    assert (everything > whole) == trains_mtp
    downs = sum(each.count * each.rows * each.cols for each in found if "_a_proj" in each.tensor)
    assert stepped == everything + downs
    products = sum(
        each.count * 5 * (4 * math.prod(size) * min(size) + 2 * min(size) ** 3)
        for each in found
        for size in [(each.rows, each.cols)]
    )
    assert 16 * sum(work.flops for work in works) == pytest.approx(products)


def test_a_step_has_muons_products_and_what_crosses_tensor_parallel_ranks() -> None:
    reached = CARD.bf16_flops * CARD.compute_share
    work = MuonWork(elements=1e9, sent=1e8, flops=reached / 2)
    more_s = replace(MODEL, muon=work).optimizer_s - MODEL.optimizer_s
    assert LAYERS.layout.tp > 1
    assert more_s == pytest.approx(0.5 + 2 * 2 * 1e8 / CARD.nvlink_reached_per_s)
