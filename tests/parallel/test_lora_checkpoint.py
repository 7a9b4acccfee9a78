"""Adapters are saved with their optimizer and go on: to the last bit in the same layout, to rounding in another.

And what is exported is the merged model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megarl.checkpoints import peft
from megarl.model.hf_config import model_shape
from megarl.model.lora_pairs import LoraSize
from megarl.parallel.dist_checkpoint import read_factors
from megarl.placement.train_layout import TrainLayout
from tests.parallel.adapters import LORA, lora_recipe, set_b, trained
from tests.parallel.checkpoints import load, write
from tests.parallel.gradients import VOCAB_SIZE, check_same_end, recorded, steps, uneven_part
from tests.parallel.test_dist_checkpoint import (
    EP1,
    EP2,
    check_two_steps,
    load_and_go_on,
    load_and_go_one_step,
    moments,
    save_and_load,
)
from tests.parallel.worlds import assemble, rectangles, run_world

pytestmark = pytest.mark.slow

# fused attention is cut inside groups of heads: unequal parts
FROM = TrainLayout(4, 4, 1, 2, expert_tp=2)


def save_and_go_on(trainer: Any, folder: Path, out: Path) -> dict[str, Any]:
    set_b(trainer)
    with recorded(trainer) as earlier:
        steps(trainer, uneven_part(trainer), 1)
    trainer._model.save(folder).finish()
    trainer.export(out)
    factors = rectangles(trainer)
    with recorded(trainer) as learning:
        after = steps(trainer, uneven_part(trainer), 2)
    ended = {"metrics": after, "learning": learning, "moments": moments(trainer)}
    return {**ended, "earlier": earlier, "factors": factors}


def load_weights(trainer: Any, folder: Path) -> list[Any]:
    before = {name: param.clone() for name, param in trainer.params().items()}
    trainer.load_weights(folder)
    assert all(torch.equal(param, before[name]) for name, param in trainer.params().items())
    assert all(param.any() for param in trained(trainer).values())
    return rectangles(trainer)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("model"), "qwen3-moe", vocab_size=VOCAB_SIZE, pad_token_id=None
    )


@pytest.fixture(scope="module")
def saved(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder, out = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("out") / "hf"
    run_recipe = lora_recipe(path, FROM, weight_decay=0.1)
    return folder, out, run_world(run_recipe, save_and_go_on, folder, out)


def test_the_same_layout_goes_on_to_the_last_bit(saved: Any, path: Path) -> None:
    folder, _, expected = saved
    again = run_world(lora_recipe(path, FROM, weight_decay=0.1), load_and_go_on, folder)
    check_same_end(again, expected)
    base = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < base, (
        "the frozen weights are not saved"
    )


def test_experts_that_are_whole_on_each_rank_and_then_split_go_on_within_rounding(
    saved: Any, path: Path, tmp_path: Path
) -> None:
    folder, _, expected = saved
    first = run_world(
        lora_recipe(path, EP1, weight_decay=0.1), load_and_go_one_step, folder, tmp_path
    )
    second = run_world(lora_recipe(path, EP2, weight_decay=0.1), load_and_go_one_step, tmp_path)
    check_two_steps(expected, first, second)


def test_ranks_without_adapters_and_runs_without_them_outside_experts_are_saved(
    path: Path, tmp_path: Path
) -> None:
    """The first stage has no layer, and the last no adapter among the weights that are whole in each expert's rank."""
    layout = TrainLayout(4, 1, 2, 2, stage_layers=(0, 4))
    run_recipe = lora_recipe(path, layout, LORA | {"targets": ["gate_proj", "up_proj"]})
    assert all(run_world(run_recipe, save_and_load, tmp_path))


def test_a_run_begins_with_the_adapters_of_another(saved: Any, path: Path, tmp_path: Path) -> None:
    """They are read from a checkpoint without ranks, written in PEFT's format, and loaded in another layout."""
    folder, _, expected = saved
    factors, adapters = assemble([rank["factors"] for rank in expected]), tmp_path / "adapters"
    read, size = read_factors(folder), LoraSize(LORA["rank"], LORA["experts"], LORA["alpha"], ())
    assert read.keys() == factors.keys()
    assert all(np.array_equal(factor, factors[name]) for name, factor in read.items())
    peft.write(read, model_shape(path), size, str(path), adapters)
    assert peft.check(str(adapters), model_shape(path), size) == []
    layout = TrainLayout(4, 1, 2, 2)
    begun = run_world(lora_recipe(path, layout, LORA | {"path": str(adapters)}), rectangles)
    for name, values in assemble(begun).items():
        np.testing.assert_array_equal(values, factors[name], err_msg=name)


def test_the_export_is_the_merged_model(saved: Any, path: Path) -> None:
    """W + (alpha / rank) B A, and every other tensor as it was."""
    folder, out, expected = saved
    factors = assemble([rank["factors"] for rank in expected])
    base, merged = load_file(path / "model.safetensors"), load_file(out / "model.safetensors")
    assert base.keys() == merged.keys()
    for name, before in base.items():
        a, b = (factors.get(name.replace(".weight", f".lora_{factor}.weight")) for factor in "AB")
        if a is None or b is None:
            np.testing.assert_array_equal(merged[name], before, err_msg=name)
            continue
        merged_weight = before + np.float32(LORA["alpha"] / len(a)) * (b @ a)
        np.testing.assert_allclose(merged[name], merged_weight, rtol=1e-6, atol=1e-6, err_msg=name)
        assert not np.allclose(merged[name], before, atol=1e-3), name
    assert not load(out)[1]["missing_keys"]
    one_rank = run_world(lora_recipe(path, TrainLayout(1, 1, 1, 1)), load_weights, folder)
    for name, values in assemble(one_rank).items():
        np.testing.assert_array_equal(values, factors[name], err_msg=name)
