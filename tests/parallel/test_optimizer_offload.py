"""An optimizer on the host steps, saves and loads as one beside the weights: here a CPU's tensors are said a GPU's."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import TrainConfig
from megarl.device import Address
from megarl.parallel.optimizer import optimizer_config
from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError
from tests.parallel.checkpoints import write
from tests.parallel.gradients import LR, VOCAB_SIZE, steps, uneven_part
from tests.parallel.worlds import (
    recipe,
    rectangles,
    role_of,
    run_ranks,
)

pytestmark = pytest.mark.slow

LAYOUT = TrainLayout(2, 1, 1, 2)
STATE = ("param", "exp_avg", "exp_avg_sq")


def say_gpu() -> None:
    """Have megarl and Megatron's HybridDeviceOptimizer take the weights for a GPU's, in this process."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from megarl.cpu import megatron_patches
    from megarl.parallel import optimizer

    optimizer.offloads = lambda train: train.optimizer_offload
    megatron_patches._Stream.wait = lambda *_: None  # type: ignore[attr-defined]
    plain = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def marking(self: Any, offload_fraction: float) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.is_said_gpu = True
        return plain(self, offload_fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = marking
    torch.Tensor.is_cuda = property(lambda self: getattr(self, "is_said_gpu", False))  # type: ignore[misc]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def on_rank(rank: int, meet: Address, made: Any, work: Any, folder: Path) -> Any:
    if made.train.optimizer_offload:
        say_gpu()
    from megarl.training.policy import PolicyRank

    return work(PolicyRank(rank, role_of(made), meet), folder)


def steps_in_turn(trainer: Any, count: int) -> list[dict[str, float]]:
    """With a turn of the others after each."""
    part = uneven_part(trainer, num_micro_batches=2)
    metrics = []
    for _ in range(count):
        metrics += steps(trainer, part, 1)
        trainer.offload()
        trainer.onload()
    return metrics


def state(trainer: Any) -> dict[tuple[int, int, str], np.ndarray]:
    """This rank's masters and moments, by Megatron's order."""
    arrays = {}
    for index, chained in enumerate(trainer._model.optimizer.chained_optimizers):
        for place, param in enumerate(chained.model_param_group_index_map):
            tensors = chained._get_main_param_and_optimizer_states(param)
            arrays |= {
                (index, place, name): tensors[name].detach().numpy().copy() for name in STATE
            }
    return arrays


def hybrids() -> int:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return sum(isinstance(instance, HybridDeviceOptimizer) for instance in gc.get_objects())


def train_and_save(trainer: Any, folder: Path) -> dict[str, Any]:
    optimizers = trainer._model.optimizer.chained_optimizers
    groups = [
        group for optimizer in optimizers for group in optimizer.shard_fp32_from_float16_groups
    ]
    facts: dict[str, Any] = {
        "beside": sum(master is not None for group in groups for master in group), "hybrids": hybrids(),
        "before": steps_in_turn(trainer, 3), "saved": state(trainer),
    }  # fmt: skip
    pending = trainer._model.save(folder)
    facts |= {
        "after": steps_in_turn(trainer, 2),
        "ended": state(trainer),
        "weights": rectangles(trainer),
    }
    pending.finish()
    return facts


def load_and_go_on(trainer: Any, folder: Path) -> dict[str, Any]:
    trainer._model.load(folder)
    loaded = state(trainer)
    optimizers = trainer._model.optimizer.chained_optimizers
    tensors = [
        value
        for chained in optimizers
        for held in chained.optimizer.state.values()
        for value in held.values()
    ]
    parts = sum(
        tensor.untyped_storage().nbytes() > tensor.nbytes
        for tensor in tensors
        if torch.is_tensor(tensor)
    )
    return {
        "loaded": loaded,
        "parts": parts,
        "after": steps_in_turn(trainer, 2),
        "ended": state(trainer),
    }


def run(path: Path, offloads: bool, work: Any, folder: Path) -> list[dict[str, Any]]:
    run_recipe = recipe(
        path, LAYOUT, dtype="bfloat16", optimizer_offload=offloads, weight_decay=0.1
    )
    return run_ranks(LAYOUT.world_size, on_rank, run_recipe, work, folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, more = (
        tmp_path_factory.mktemp("qwen3-moe"),
        {"num_hidden_layers": 2, "pad_token_id": None},
    )
    return write(folder, "qwen3-moe", 0, vocab_size=VOCAB_SIZE, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(
    path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, tuple[Path, list[dict[str, Any]]]]:
    """By whether the optimizer is on the host: the checkpoint, and what the ranks say."""
    folders = {offloads: tmp_path_factory.mktemp("checkpoint") for offloads in (False, True)}
    return {
        offloads: (folder, run(path, offloads, train_and_save, folder))
        for offloads, folder in folders.items()
    }


def test_the_steps_are_those_of_an_optimizer_beside_the_weights(runs: Any) -> None:
    for rank, other in zip(runs[True][1], runs[False][1], strict=True):
        for name in ("before", "after"):
            for metrics, expected in zip(rank[name], other[name], strict=True):
                assert metrics == pytest.approx(expected, rel=1e-6)
        for key, values in rank["ended"].items():
            np.testing.assert_allclose(values, other["ended"][key], rtol=1e-5, atol=1e-6)
        for rectangle, other_rectangle in zip(rank["weights"], other["weights"], strict=True):
            assert rectangle[:3] == other_rectangle[:3]
            # a master on the verge may be rounded the other way
            assert np.mean(rectangle[3] != other_rectangle[3]) < 1e-3, rectangle[0]


def test_it_has_no_masters_beside_the_weights_and_keeps_one_of_itself(runs: Any) -> None:
    assert {(rank["beside"] > 0, rank["hybrids"]) for rank in runs[False][1]} == {(True, 0)}
    # of dense weights, of experts
    assert {(rank["beside"], rank["hybrids"]) for rank in runs[True][1]} == {(0, 2)}


@pytest.mark.parametrize(("source", "target"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_goes_on_wherever_the_optimizer_is(
    path: Path, runs: Any, source: bool, target: bool
) -> None:
    folder, expected = runs[source]
    for rank, other in zip(run(path, target, load_and_go_on, folder), expected, strict=True):
        assert not rank["parts"]  # of the other ranks' state
        for key, values in other["saved"].items():
            np.testing.assert_array_equal(rank["loaded"][key], values)
        for metrics, others in zip(rank["after"], other["after"], strict=True):
            assert metrics == pytest.approx(others, rel=1e-6)
        for key, values in other["ended"].items():
            np.testing.assert_allclose(rank["ended"][key], values, rtol=1e-5, atol=1e-6)


def test_weights_in_float32_have_no_copies_to_step_on() -> None:
    with pytest.raises(UserError, match=r"train\.optimizer_offload: .* set it to false"):
        optimizer_config(TrainConfig(lr=LR, optimizer_offload=True), torch.float32, True)
