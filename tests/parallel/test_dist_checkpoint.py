"""What is saved and loaded goes on exactly: to the last bit in the same layout, to rounding in another."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.disk import begin
from megarl.parallel import dist_checkpoint
from megarl.placement.train_layout import TrainLayout
from megarl.types import Silence
from tests.parallel.checkpoints import load, write
from tests.parallel.gradients import (
    LINEAR,
    VOCAB_SIZE,
    check_gradients,
    check_learning,
    check_same_end,
    check_weights,
    recorded,
    resumed,
    steps,
    uneven_part,
    whole,
)
from tests.parallel.precision import within
from tests.parallel.worlds import (
    assemble,
    recipe,
    run_world,
    trained,
)
from tests.small_disk import small_disk
from tests.stalling_disk import stalling_disk

pytestmark = pytest.mark.slow

FROM = TrainLayout(4, 2, 2, 2)
TO = TrainLayout(8, 2, 2, 4, cp=2, vpp=2)
SETTINGS = {"weight_decay": 0.1, "mtp_loss": 0.1, "router_bias_rate": 1e-3}
EP1, EP2 = TrainLayout(2, 1, 2, 1), TrainLayout(2, 1, 1, 2)


def moments(trainer: Any) -> list[np.ndarray]:
    """All of the optimizer's state on this rank."""
    from megarl.parallel.optimizer import stepping

    inner = [chained.optimizer for chained in stepping(trainer._model.optimizer)]
    params = [
        param
        for optimizer in inner
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    states = {**{key: value for optimizer in inner for key, value in optimizer.state.items()}}
    return [
        states[param][name].cpu().numpy().copy()
        for param in params
        for name in ("step", "exp_avg", "exp_avg_sq")
    ]


def draws() -> list[float]:
    """One number of each generator."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():  # type: ignore[union-attr]
        tracked = float(torch.rand(()))
    return [random.random(), float(np.random.rand()), float(torch.rand(())), tracked]


def save_and_go_on(trainer: Any, folder: Path) -> dict[str, Any]:
    with recorded(trainer) as earlier:
        steps(trainer, uneven_part(trainer), 2)
    pending = trainer._model.save(folder)
    with recorded(trainer) as learning:
        after = steps(trainer, uneven_part(trainer), 2)  # while the files are written
    pending.finish()
    ended = {"metrics": after, "learning": learning, "moments": moments(trainer)}
    return {**ended, "earlier": earlier, "files": pending.files}


def convert(trainer: Any, folder: Path, out: Path) -> None:
    trainer.load_weights(folder)
    trainer.export(out)


def load_and_go_on(trainer: Any, folder: Path) -> dict[str, Any]:
    trainer._model.load(folder)
    with recorded(trainer) as learning:
        metrics = steps(trainer, uneven_part(trainer), 2)
    return {"metrics": metrics, "learning": learning, "moments": moments(trainer)}


def load_and_go_one_step(trainer: Any, folder: Path, then: Path | None = None) -> dict[str, Any]:
    """And save in the folder `then`."""
    trainer._model.load(folder)
    with recorded(trainer) as learning:
        metrics = steps(trainer, uneven_part(trainer), 1)
    if then:
        trainer._model.save(then).finish()
    return {"metrics": metrics, "learning": learning}


def check_two_steps(
    saved: list[dict[str, Any]], first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> None:
    """Those after `saved`, which were taken in two other layouts, are those of its own ranks."""
    for index, ranks in enumerate((first, second)):
        expected = next(rank["metrics"][index] for rank in saved if "loss" in rank["metrics"][0])
        for metrics in (rank["metrics"][0] for rank in ranks if "loss" in rank["metrics"][0]):
            assert metrics == pytest.approx(expected, rel=within(1e-4))
    earlier, after_first, after_second = (
        whole([rank["learning"] for rank in ranks]) for ranks in (saved, first, second)
    )
    learning = resumed(
        whole([rank["earlier"] for rank in saved]), resumed(after_first, after_second)
    )
    check_gradients(learning.gradients[-2:], earlier.gradients)
    check_weights(learning)


def check_goes_on(
    ranks: list[dict[str, Any]], expected: list[dict[str, Any]], rounding: float = 1.0
) -> None:
    for metrics, other in zip(ranks[-1]["metrics"], expected[-1]["metrics"], strict=True):
        assert metrics == pytest.approx(other, rel=within(1e-5 * rounding))
    learning, other = ([rank["learning"] for rank in world] for world in (ranks, expected))
    earlier = [rank["earlier"] for rank in expected]
    check_learning(learning, other, earlier=earlier, rounding=rounding)


def save_and_load(trainer: Any, folder: Path) -> bool:
    """Whether loading what was just saved changes nothing."""
    steps(trainer, uneven_part(trainer), 1)
    trainer._model.save(folder).finish()
    before = [
        *moments(trainer),
        *(param.cpu().numpy().copy() for param in trained(trainer).values()),
    ]
    steps(trainer, uneven_part(trainer), 1)
    trainer._model.load(folder)
    after = [*moments(trainer), *(param.cpu().numpy() for param in trained(trainer).values())]
    return all(np.array_equal(array, other) for array, other in zip(before, after, strict=True))


def save_random_states(trainer: Any, folder: Path) -> list[float]:
    draws()
    trainer._model.save(folder).finish()
    return draws()


def load_random_states(trainer: Any, folder: Path) -> list[float]:
    trainer._model.load(folder)
    return draws()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write(folder, "deepseek-v3", mtp_layers=1, vocab_size=VOCAB_SIZE, pad_token_id=None)


@pytest.fixture(scope="module")
def saved(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_world(recipe(path, FROM, **SETTINGS), save_and_go_on, folder)


def test_the_same_layout_goes_on_to_the_last_bit(saved: tuple[Path, Any], path: Path) -> None:
    folder, expected = saved
    check_same_end(run_world(recipe(path, FROM, **SETTINGS), load_and_go_on, folder), expected)
    files = [name for rank in expected for name in rank["files"]]
    assert len(files) == len(set(files)) and all((folder / name).stat().st_size for name in files)


def test_another_layout_goes_on_within_rounding(saved: tuple[Path, Any], path: Path) -> None:
    folder, expected = saved
    check_goes_on(run_world(recipe(path, TO, **SETTINGS), load_and_go_on, folder), expected)


@pytest.mark.parametrize("family", ["qwen3-next", "minimax-m2"])
def test_split_parameters_of_our_own_modules_go_on_in_another_layout(
    tmp_path: Path, family: str
) -> None:
    """Linear attention's decay, steps and convolution; norms over the heads of all ranks."""
    path = write(tmp_path / "model", family, vocab_size=VOCAB_SIZE, pad_token_id=None)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    begun, resumed_in = (
        recipe(path, layout, weight_decay=0.1)
        for layout in (TrainLayout(2, 2, 1, 2), TrainLayout(2, 1, 1, 1, cp=2))
    )
    expected = run_world(begun, save_and_go_on, folder)
    ranks = run_world(resumed_in, load_and_go_on, folder)
    check_goes_on(ranks, expected, LINEAR if family == "qwen3-next" else 1.0)


def test_experts_that_are_whole_on_each_rank_and_then_split_go_on_within_rounding(
    saved: tuple[Path, Any], path: Path, tmp_path: Path
) -> None:
    """Megatron has an optimizer of their own for experts at EP > 1, and none at EP 1."""
    folder, expected = saved
    first = run_world(recipe(path, EP1, **SETTINGS), load_and_go_one_step, folder, tmp_path)
    second = run_world(recipe(path, EP2, **SETTINGS), load_and_go_one_step, tmp_path)
    check_two_steps(expected, first, second)


def test_the_weights_alone_become_a_hugging_face_checkpoint(
    saved: tuple[Path, Any], path: Path, tmp_path: Path
) -> None:
    folder, ranks = saved
    expected = assemble([rank["earlier"].after for rank in ranks])
    run_world(recipe(path, EP1, **SETTINGS), convert, folder, tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    begun = load_file(path / "model.safetensors")
    assert written.keys() == begun.keys()
    for name, values in expected.items():
        assert np.array_equal(written[name].numpy().reshape(values.shape), values), name
        assert not np.array_equal(begun[name].numpy().reshape(values.shape), values), (
            f"{name} was not trained"
        )
    _, info = load(tmp_path / "hf")
    assert not info["missing_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize(
    "layout", [TrainLayout(2, 1, 1, 1), TrainLayout(2, 1, 1, 1, cp=2)], ids=["dp2", "cp2"]
)
def test_ranks_that_hold_the_same_share_the_writing(
    path: Path, tmp_path: Path, layout: TrainLayout
) -> None:
    assert all(run_world(recipe(path, layout), save_and_load, tmp_path))
    sizes = {file.name: file.stat().st_size for file in tmp_path.glob("*.distcp")}
    of_ranks = [
        sum(size for name, size in sizes.items() if name.startswith(f"__{rank}_"))
        for rank in range(2)
    ]
    assert max(of_ranks) < 2 * min(of_ranks)


def test_weights_are_copied_and_an_optimizers_own_state_is_not() -> None:
    weights = torch.arange(6.0)
    moments = torch.arange(4.0)
    live = {weights.untyped_storage().data_ptr()}
    copied = dist_checkpoint._frozen(lambda: weights[2:], live)
    in_place = dist_checkpoint._frozen(lambda: moments[1:], live)
    weights += 10
    moments += 10
    assert copied().tolist() == [2, 3, 4, 5]
    assert in_place().tolist() == [11, 12, 13]


def test_every_generator_goes_on(path: Path, tmp_path: Path) -> None:
    run_recipe = recipe(path, TrainLayout(2, 2, 1, 2))
    assert run_world(run_recipe, save_random_states, tmp_path) == run_world(
        run_recipe, load_random_states, tmp_path
    )


def save_with_room(trainer: Any, disk: Path) -> tuple[dict[str, str], float]:
    """What is said of a checkpoint on a disk that becomes full at its beginning, in its middle and at its end.

    And the loss of a step after all of these, which the ranks take together.
    """
    folder = disk / "checkpoints" / ".step-000001.partial-abcd"
    is_first = dist.get_rank() == 0
    outcomes: dict[str, str] = {}
    needed = 0
    for name in ("enough", "nothing", "half", "all but the index", "again enough"):
        steps(trainer, uneven_part(trainer), 1)
        if is_first:
            folder.mkdir(parents=True)
            free = shutil.disk_usage(disk).free
            room = {"nothing": 0, "half": needed // 2, "all but the index": needed - 8192}
            with (disk / "filler").open("wb") as file:
                file.write(bytes(free - room[name] if name in room else 0))
        dist.barrier()
        try:
            trainer.save(folder, number=1)
            trainer.finish_save(number=2)
            outcomes[name] = "saved"
        except Exception as error:
            outcomes[name] = str(error)
        dist.barrier()
        if is_first:
            needed = needed or free - shutil.disk_usage(disk).free
            (disk / "filler").unlink()
            shutil.rmtree(folder)
    return outcomes, steps(trainer, uneven_part(trainer), 1)[0]["loss"]


def test_a_disk_without_room_is_told_in_a_line_wherever_the_room_ends_and_ranks_go_on(
    path: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "32m") as disk:
        first, second = run_world(recipe(path, TrainLayout(2, 1, 1, 2)), save_with_room, disk)
    hint = "make room there, or name a folder on another disk"
    message = f"run.dir: no space left in {disk}/checkpoints while writing a checkpoint; {hint}"
    assert first[0] == {
        "enough": "saved",
        "nothing": message,
        "half": message,
        "all but the index": message,
        "again enough": "saved",
    }
    assert second[0]["all but the index"] == second[0]["again enough"] == "saved", "its own part"
    assert math.isfinite(first[1]) and first[1] == second[1]


def save_on_stopped(trainer: Any, folder: Path, server: int) -> tuple[str, int]:
    """What is said of a disk that does not answer while a checkpoint is waited for; its files, once it answers."""
    run = trainer._recipe.run.model_copy(update={"timeout_s": 2.0})
    trainer._recipe = trainer._recipe.model_copy(update={"run": run})
    folder.mkdir(parents=True)
    trainer.save(folder, number=7)  # of a rank that was started anew
    os.kill(server, signal.SIGSTOP)
    finishing = begin(partial(trainer.finish_save, number=8))
    with pytest.raises(Silence) as caught:
        asyncio.run(trainer.attend_disk(8, folder))
    assert not finishing.done()
    os.kill(server, signal.SIGCONT)
    num_files = len(finishing.result())
    asyncio.run(trainer.attend_disk(8, folder))  # both calls have ended
    return str(caught.value), num_files


def test_a_disk_that_does_not_answer_is_named_while_its_checkpoint_is_waited_for(
    path: Path, tmp_path: Path
) -> None:
    with stalling_disk(tmp_path / "disk") as disk:
        folder = disk.path / "checkpoints" / ".step-000001.partial-abcd"
        one = recipe(path, TrainLayout(1, 1, 1, 1))
        ((said, num_files),) = run_world(one, save_on_stopped, folder, disk.server.pid)
    where = re.escape(f"the disk of {disk.path}/checkpoints has not answered")
    assert re.fullmatch(rf"{where} for \d+ s while a checkpoint was written", said)
    assert num_files > 1
