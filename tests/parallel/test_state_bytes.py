"""A rank that takes the copy of another's state goes on as that one, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.device import Address
from megarl.parallel.state_bytes import StateBytes
from megarl.placement.train_layout import TrainLayout
from tests.parallel.adapters import LORA, lora_recipe
from tests.parallel.checkpoints import write
from tests.parallel.gradients import LR, VOCAB_SIZE, steps, uneven_part
from tests.parallel.test_dist_checkpoint import draws
from tests.parallel.worlds import numbers, recipe, role_of, run_ranks, run_world

CHUNK_BYTES = 99_999  # cuts tensors and numbers
LAYOUT = TrainLayout(2, 2, 1, 2)
TRAIN = {"mtp_loss": 0.1, "router_bias_rate": 1e-3, "dtype": "bfloat16"}
Copy = tuple[int, bytes, list[np.ndarray]]


def copied(rank: Any) -> Copy:
    """As a keeper asks for it."""
    num_bytes, small = rank.begin_copy()
    starts = range(0, num_bytes, CHUNK_BYTES)
    parts = [rank.copied_bytes(start, min(start + CHUNK_BYTES, num_bytes)) for start in starts]
    rank.end_copy()
    return num_bytes, small, parts


def restore(rank: Any, copy: Copy) -> None:
    num_bytes, small, parts = copy
    rank.begin_restore(num_bytes)
    for number, part in reversed([*enumerate(parts)]):
        part.setflags(write=False)  # as Ray brings it
        rank.restore_bytes(number * CHUNK_BYTES, part)
    rank.finish_restore(small)


def end(rank: Any) -> dict[str, Any]:
    """What is computed from here on, and the whole state after it."""
    return {"metrics": steps(rank, uneven_part(rank), 2), "draws": draws(), "state": state(rank)}


def state(rank: Any) -> list[bytes]:
    """All weights, also those that nothing trains, and all that the copy has."""
    weights = rank.params() | rank.factors()
    views = [weight.contiguous().view(torch.uint8).cpu().numpy() for weight in weights.values()]
    return [view.tobytes() for view in views] + [part.tobytes() for part in copied(rank)[2]]


def check_same(ends: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, other in zip(ends, expected, strict=True):
        assert rank["metrics"] == other["metrics"]
        assert rank["draws"] == other["draws"]
        assert rank["state"] == other["state"]


def give(trainer: Any) -> tuple[Copy, dict[str, Any]]:
    """The copy that a rank gives while an engine has its memory, and what it then does."""
    steps(trainer, uneven_part(trainer), 2)
    draws()
    trainer.offload()
    copy = copied(trainer)
    trainer.onload()
    return copy, end(trainer)


def take(trainer: Any, copies: list[Copy], steps_before: int) -> dict[str, Any]:
    steps(trainer, uneven_part(trainer), steps_before)
    restore(trainer, copies[trainer.rank])
    return end(trainer)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write(folder, "deepseek-v3", mtp_layers=1, vocab_size=VOCAB_SIZE, pad_token_id=None)


@pytest.mark.slow
def test_new_ranks_and_those_that_have_gone_on_do_what_the_first_ones_did(path: Path) -> None:
    made = recipe(path, LAYOUT, **TRAIN)
    given = run_world(made, give)
    copies = [copy for copy, _ in given]
    for steps_before in (0, 1):
        check_same(run_world(made, take, copies, steps_before), [ended for _, ended in given])


@pytest.mark.slow
def test_adapters_in_the_weights_are_copied_alone_and_summed_anew(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    model = write(folder, "deepseek-v3", vocab_size=VOCAB_SIZE, pad_token_id=None)
    made = lora_recipe(model, LAYOUT, LORA, dtype="bfloat16")
    given = run_world(made, give)
    copies = [copy for copy, _ in given]
    check_same(run_world(made, take, copies, 0), [ended for _, ended in given])
    whole = run_world(recipe(model, LAYOUT, dtype="bfloat16"), give)
    assert max(copy[0] for copy in copies) < min(copy[0] for copy, _ in whole) / 3


def critic(rank: int, meet: Address, made: Any, copies: list[Copy] | None) -> Any:
    """A model that leaves the GPU with its weights gives, or takes, the copy while it is away."""
    from megarl.training.auxiliary import AuxiliaryRank

    ranks: Any = AuxiliaryRank(rank, role_of(made, "critic", has_scores=True), meet, "values")
    part = uneven_part(ranks)

    def learn() -> list[dict[str, float]]:
        (values,) = ranks.values_of([part.micro_batches])
        return [numbers(ranks.train_step(part.micro_batches, values, part.norms, LR))]

    copy = None
    if copies is None:
        learn()
        ranks.offload()
        ranks.offload()  # as after a failure
        copy = copied(ranks)
    else:
        ranks.offload()
        restore(ranks, copies[rank])
    ranks.onload()
    return copy, {"metrics": learn(), "draws": draws(), "state": state(ranks)}


@pytest.mark.slow
def test_a_model_whose_weights_are_on_the_host_gives_and_takes_copies(path: Path) -> None:
    made = recipe(path, LAYOUT, dtype="bfloat16")
    given = run_ranks(LAYOUT.world_size, critic, made, None)
    copies = [copy for copy, _ in given]
    taken = run_ranks(LAYOUT.world_size, critic, made, copies)
    check_same([ended for _, ended in taken], [ended for _, ended in given])


@pytest.mark.parametrize("chunk_bytes", [1, 3, 7, 100])
def test_every_byte_is_read_and_written_once(chunk_bytes: int) -> None:
    tensors = [
        torch.arange(5, dtype=torch.float32),
        torch.zeros(0),
        torch.tensor(7.0, dtype=torch.float64),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    ]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    source, target = StateBytes(tensors), StateBytes(copies)
    assert source.num_bytes == 5 * 4 + 8 + 6 * 2
    for start in range(0, source.num_bytes, chunk_bytes):
        end_ = min(start + chunk_bytes, source.num_bytes)
        target.write(start, source.read(start, end_))
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_nothing_has_no_bytes() -> None:
    assert StateBytes([]).num_bytes == 0
