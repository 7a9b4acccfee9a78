"""Ranks write their own parts of a checkpoint as boxes: its tensors are those of one that was gathered.

Each is read in another layout than it was written in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.parallel import dist_checkpoint, stored_boxes
from megarl.placement.train_layout import TrainLayout
from tests.parallel.checkpoints import write
from tests.parallel.gathered import check_same, read_whole, save_gathered
from tests.parallel.gradients import VOCAB_SIZE, steps, uneven_part
from tests.parallel.test_dist_checkpoint import SETTINGS, moments
from tests.parallel.worlds import TIMEOUT_S, recipe, run_world

pytestmark = pytest.mark.slow

# Each reads what the one before it has written.
FIRST = TrainLayout(4, 2, 1, 2)
THEN = [
    TrainLayout(8, 2, 2, 2, vpp=2),
    TrainLayout(4, 1, 2, 1, cp=2),
    TrainLayout(4, 2, 1, 2, expert_tp=2),
]
SMALL_BYTES = 4096


class HeldBytes(TorchDispatchMode):
    """Bytes of the tensors of numbers that were made inside the block, and of these the most that existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        result = func(*args, **kwargs or {})
        for tensor in filter(_counts, tree_leaves(result)):
            storage = _storage(tensor)
            if storage._cdata not in given | self._known:
                self._keep(storage)
        return result

    def _keep(self, storage: Any) -> None:
        num_bytes = storage.nbytes()
        self._known.add(storage._cdata)
        self.now += num_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, num_bytes)

    def _drop(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


def _counts(leaf: Any) -> bool:
    """Not the bytes of messages, and not what has only a shape."""
    is_tensor = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    return is_tensor and leaf.is_floating_point()


@contextmanager
def small_boxes(trainer: Any, asynchronous: bool = False) -> Iterator[None]:
    with (
        patch.object(stored_boxes, "CHUNK_BYTES", SMALL_BYTES),
        patch.object(trainer._model, "_asynchronous", asynchronous),
    ):
        yield


def held_bytes(save: Callable[[], None]) -> int:
    with HeldBytes() as held:
        save()
    return held.most


def save_both(trainer: Any, boxes: Path, gathered: Path) -> dict[str, int]:
    steps(trainer, uneven_part(trainer), 2)
    with small_boxes(trainer):
        of_boxes = held_bytes(lambda: trainer._model.save(boxes).finish())
    of_loading = held_bytes(lambda: trainer._model.load(boxes))
    of_gathering = held_bytes(lambda: save_gathered(trainer, gathered))
    return {"boxes": of_boxes, "loading": of_loading, "gathering": of_gathering}


def load_and_save(trainer: Any, folder: Path, then: Path) -> None:
    trainer._model.load(folder)
    trainer._model.save(then).finish()


def save_through_a_step(trainer: Any, folder: Path) -> list[list[np.ndarray]]:
    """The moments before a save, and those that are loaded, where files are written as late as may be."""
    steps(trainer, uneven_part(trainer), 1)
    before = moments(trainer)
    may_write = threading.Event()
    wait = dist_checkpoint.Pending.wait

    def wait_for_files(pending: dist_checkpoint.Pending) -> None:
        may_write.set()
        wait(pending)

    def alone_late(tensor: torch.Tensor) -> torch.Tensor:
        assert may_write.wait(TIMEOUT_S)
        return tensor.clone()

    with (
        patch.object(dist_checkpoint.Pending, "wait", wait_for_files),
        patch.object(dist_checkpoint, "_alone", alone_late),
    ):
        pending = trainer._model.save(folder)
        steps(trainer, uneven_part(trainer), 1)
        may_write.set()
        pending.finish()
    stepped = moments(trainer)
    trainer._model.load(folder)
    return [before, moments(trainer), stepped]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write(folder, "deepseek-v3", mtp_layers=1, vocab_size=VOCAB_SIZE, pad_token_id=None)


@pytest.fixture(scope="module")
def saved(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A checkpoint of boxes, the same one gathered, and the bytes that each rank needed for either."""
    boxes, gathered = tmp_path_factory.mktemp("boxes"), tmp_path_factory.mktemp("gathered")
    held = run_world(recipe(path, FIRST, **SETTINGS), save_both, boxes, gathered)
    return boxes, gathered, held


def test_the_tensors_are_those_of_a_gathered_checkpoint(saved: Any) -> None:
    boxes, gathered, _ = saved
    check_same(read_whole(boxes), read_whole(gathered))


def test_a_rank_needs_memory_for_two_boxes_and_for_one_to_read_them(saved: Any) -> None:
    _, gathered, held = saved
    state_bytes = sum(tensor.nbytes for tensor in read_whole(gathered).values())
    for rank in held:
        assert SMALL_BYTES < rank["boxes"] <= 2 * SMALL_BYTES
        assert SMALL_BYTES <= rank["loading"] <= 2 * SMALL_BYTES
        # the state of its own TP and EP rank, of both data-parallel ranks
        assert rank["gathering"] > state_bytes / 4


def test_other_layouts_read_and_write_the_same(saved: Any, path: Path, tmp_path: Path) -> None:
    """The first of them reads a checkpoint of the first format."""
    folder = saved[1]
    expected = read_whole(folder)
    for number, layout in enumerate(THEN):
        then = tmp_path / str(number)
        then.mkdir()
        run_world(recipe(path, layout, **SETTINGS), load_and_save, folder, then)
        check_same(read_whole(then), expected)
        folder = then


class Compressed:
    """The state of TransformerEngine's FusedAdam as Megatron asks for it, with the remainders of masters."""

    store_param_remainders = True

    def __init__(self, param: torch.Tensor) -> None:
        self.param_groups = [{"params": [param]}]
        self._types = {"master_param": torch.int16, "exp_avg": torch.float32}
        self.held = {
            name: torch.arange(param.numel()).to(dtype) for name, dtype in self._types.items()
        }

    def get_unscaled_state(self, _: torch.Tensor, name: str) -> torch.Tensor:
        return self.held[name].clone()

    def set_scaled_state(self, _: torch.Tensor, name: str, values: torch.Tensor) -> None:
        assert values.dtype == self._types[name]
        self.held[name].copy_(values)


def test_a_compressed_optimizer_takes_what_was_read() -> None:
    """TransformerEngine is not installed here."""
    param = torch.zeros(9)
    inner = Compressed(torch.ones(4).bfloat16())
    optimizer = SimpleNamespace(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        optimizer=inner,
        model_param_group_index_map={param: (0, 0)},
    )
    part = stored_boxes.OwnPart(optimizer, param, start=3, end=7, is_written=True)
    last_place = 2.0**-23  # of masters near 1
    for name, held_name, unit in (("param", "master_param", last_place), ("exp_avg", "exp_avg", 1)):
        assert part.state(name).dtype == torch.float32
        room = part.room(name)
        room.copy_(part.state(name) + 5 * unit)
        assert inner.held[held_name].tolist() == [0, 1, 2, 3]
        part.take(name, room)
        assert inner.held[held_name].tolist() == [5, 6, 7, 8]


def test_a_step_waits_for_what_is_not_copied(path: Path, tmp_path: Path) -> None:
    run_recipe = recipe(path, TrainLayout(1, 1, 1, 1))
    ((before, loaded, stepped),) = run_world(run_recipe, save_through_a_step, tmp_path)
    assert all(map(np.array_equal, before, loaded))
    assert not all(map(np.array_equal, before, stepped))
