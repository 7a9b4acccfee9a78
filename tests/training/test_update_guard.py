"""What is wrong on one rank is found before the optimizer's step, and this rank is named. Every fault is a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl import device
from megarl.placement.train_layout import TrainLayout
from megarl.training.update_guard import UpdateGuard
from megarl.types import SilentFault
from tests.parallel.checkpoints import write
from tests.parallel.conftest import VOCAB_SIZE, write_checkpoint
from tests.parallel.worlds import (
    assign,
    need_gpus,
    ragged,
    recipe,
    run_world,
    weighted_loss,
    world_part,
)

pytestmark = pytest.mark.slow

LR = 1e-3
NORM = "decoder.layers.1.pre_mlp_layernorm.weight"
ATTENTION = "decoder.layers.2.self_attention.linear_proj.weight"
EXPERT = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
if device.DEVICE == "cuda":  # with TransformerEngine
    EXPERT = "decoder.layers.1.mlp.experts.linear_fc1.weight0"
EMBEDDING = "embedding.word_embeddings.weight"
Faults = dict[str, tuple[str, tuple[int, ...], str, bool] | None]


def update(trainer: Any, loss: Callable[..., Any] = weighted_loss) -> None:
    """One optimizer update on this rank's part of the same sequences."""
    sequences = ragged(12, VOCAB_SIZE, seed=3)
    at = trainer.layout.coords(trainer.rank)
    batches = assign(sequences, at.dp, trainer.layout.dp, micro_batches=2)
    trainer.train_step(world_part(batches, sequences, 50.0), LR, loss)


def fault(trainer: Any, **how: Any) -> tuple[str, tuple[int, ...], str, bool] | None:
    """Kind, ranks, text and is_local of the fault that an update raises; the weights must not move then."""
    before = {name: tensor.clone() for name, tensor in trainer.params().items()}
    try:
        update(trainer, **how)
    except SilentFault as raised:
        assert all(
            torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
            for name, tensor in trainer.params().items()
        ), "no rank takes the step"
        ranks = tuple(member.number for member in raised.members)
        return raised.kind, ranks, raised.what, raised.is_local
    return None


@contextmanager
def flipped(trainer: Any, rank: int, name: str, bit: int = 0) -> Iterator[None]:
    """One bit of one weight of one rank is another inside the block."""
    if trainer.rank != rank:
        yield
        return
    words = trainer.params()[name].view(torch.int32)
    words.view(-1)[7] ^= 1 << bit
    yield
    words.view(-1)[7] ^= 1 << bit


@contextmanager
def with_nan(trainer: Any, ranks: set[int], name: str) -> Iterator[None]:
    """The gradient of one weight has a NaN on these ranks, where the backward pass has computed it."""
    (param,) = [
        param for path, param in trainer._model._unwrapped[0].named_parameters() if path == name
    ]
    handle = None
    if trainer.rank in ranks:
        handle = param.register_hook(lambda gradient: _poisoned(gradient))
    yield
    if handle:
        handle.remove()


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


@contextmanager
def poisoned_output(trainer: Any, rank: int, path: str) -> Iterator[None]:
    """The output of one module has a NaN on one rank."""
    handle = None
    if trainer.rank == rank:
        module = trainer._model._unwrapped[0].get_submodule(path)
        handle = module.register_forward_hook(_poison, prepend=True)
    yield
    if handle:
        handle.remove()


def _poison(_: Any, __: Any, outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return _poisoned(outputs[0]), *outputs[1:]
    return _poisoned(outputs)


def infinite_loss(
    logp_T: torch.Tensor, entropy_T: torch.Tensor, old_logp_T: torch.Tensor, targets: Any
) -> Any:
    loss_sum, stats = weighted_loss(logp_T, entropy_T, old_logp_T, targets)
    return loss_sum * float("inf"), stats


@contextmanager
def changed_gradient(trainer: Any, rank: int, name: str) -> Iterator[None]:
    """The gradient of one weight is another on one rank, after all sums over ranks."""
    check = trainer._guard.check

    def change_and_check() -> None:
        if trainer.rank == rank:
            params = dict(trainer._model._unwrapped[0].named_parameters())
            params[name].main_grad.view(torch.int32).view(-1)[3] ^= 1
        check()

    with patch.object(trainer._guard, "check", change_and_check):
        yield


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("guarded"))


def data_parallel(trainer: Any) -> Faults:
    """Four replicas of dense weights, two of each expert."""
    faults: Faults = {"healthy": fault(trainer)}
    with flipped(trainer, 2, ATTENTION):
        faults["weight"] = fault(trainer)
    with flipped(trainer, 1, EXPERT, bit=30):
        faults["expert"] = fault(trainer)
    with with_nan(trainer, {3}, ATTENTION):
        faults["gradient"] = fault(trainer)
    with with_nan(trainer, {0, 1, 2, 3}, ATTENTION):
        faults["all gradients"] = fault(trainer)
    with poisoned_output(trainer, 1, "decoder.layers.1.mlp.experts"):
        faults["experts' output"] = fault(trainer)
    with poisoned_output(trainer, 2, "decoder.layers.1.self_attention.core_attention"):
        faults["attention"] = fault(trainer)
    loss = infinite_loss if trainer.rank == 0 else weighted_loss
    faults["loss"] = fault(trainer, loss=loss)
    trainer._guard._every = None
    with flipped(trainer, 2, ATTENTION):
        faults["off"] = fault(trainer)
    faults["healed"] = fault(trainer)
    trainer._guard._every = 1
    trainer.params()[NORM][0] = float("nan")
    faults["all weights"] = fault(trainer)
    return faults


@pytest.fixture(scope="module")
def of_data_parallel(checkpoint_path: Path) -> list[Faults]:
    need_gpus(4)
    return run_world(recipe(checkpoint_path, TrainLayout(4, 1, 1, 2)), data_parallel)


def test_every_rank_raises_the_same(of_data_parallel: list[Faults]) -> None:
    assert all(faults == of_data_parallel[0] for faults in of_data_parallel)


DIFFER = "differed in weights from the replicas on"
EACH_OTHER = "from each other"
EVERYWHERE = "; all data-parallel ranks did, as where a rate (train.lr) is too high"
OUTPUT = "that is not finite in pipeline stage 0"


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "what"),
    [
        ("weight", "replicas", (2,), f"{DIFFER} ranks 0, 1, 3 ({ATTENTION})"),
        (
            "expert",
            "replicas",
            (1, 3),
            f"differed in weights of experts {EACH_OTHER} ({EXPERT})",
        ),
        ("gradient", "not_finite", (3,), f"computed a gradient that is not finite ({ATTENTION})"),
        ("experts' output", "not_finite", (1,), f"computed an output of experts {OUTPUT}"),
        ("attention", "not_finite", (2,), f"computed an input of experts {OUTPUT}"),
        ("loss", "not_finite", (0,), "computed a loss that is not finite"),
        (
            "all gradients",
            "not_finite",
            (0, 1, 2, 3),
            f"computed a gradient that is not finite ({ATTENTION}){EVERYWHERE}",
        ),
        (
            "all weights",
            "not_finite",
            (0, 1, 2, 3),
            f"held weights that are not finite ({NORM}){EVERYWHERE}",
        ),
    ],
)
def test_the_rank_is_named(
    of_data_parallel: list[Faults], name: str, kind: str, ranks: tuple[int, ...], what: str
) -> None:
    assert of_data_parallel[0][name] == (kind, ranks, what, len(ranks) < 4)


def test_a_healthy_update_goes_through(of_data_parallel: list[Faults]) -> None:
    """Also where a replica that is off is not compared: the next update has overwritten it."""
    faults = of_data_parallel[0]
    assert (faults["healthy"], faults["off"], faults["healed"]) == (None, None, None)


def tensor_parallel(trainer: Any) -> Faults:
    """Norms have four replicas, over TP as well, and their gradients two."""
    faults: Faults = {"healthy": fault(trainer)}
    with flipped(trainer, 1, NORM):
        faults["norm"] = fault(trainer)
    with flipped(trainer, 1, EMBEDDING):
        faults["split over TP"] = fault(trainer)
    with changed_gradient(trainer, 2, NORM):
        faults["gradient"] = fault(trainer)
    return faults


def test_replicas_over_tensor_parallel_ranks(checkpoint_path: Path) -> None:
    need_gpus(4)
    made = recipe(checkpoint_path, TrainLayout(4, 2, 1, 2))
    for faults in run_world(made, tensor_parallel):
        found = {name: one and one[:3] for name, one in faults.items()}
        assert found == {
            "healthy": None,
            "norm": ("replicas", (1,), f"{DIFFER} ranks 0, 2, 3 ({NORM})"),
            "split over TP": (
                "replicas",
                (1, 3),
                f"differed in weights {EACH_OTHER} ({EMBEDDING})",
            ),
            "gradient": ("replicas", (2, 3), f"differed in gradients {EACH_OTHER} ({NORM})"),
        }


def overlapped(trainer: Any) -> Faults:
    """Gradients are on their way before the backward pass ends, from the second update on."""
    faults: Faults = {"healthy": fault(trainer)}
    for number in range(2):
        with with_nan(trainer, {1}, ATTENTION):
            faults[f"gradient {number}"] = fault(trainer)
    faults["healed"] = fault(trainer)
    return faults


def test_gradients_that_are_summed_while_others_are_computed(checkpoint_path: Path) -> None:
    """Unverified on a GPU.

    parallel/finiteness.py: norms of a bucket's gradients between their computation and their message, and sums of
    bfloat16 outputs. training/tensor_sums.py: 64-bit sums that wrap. placement/replicas.py: that
    NCCL's all-reduce gives all of its ranks the same bits, whatever algorithm it chooses. To check first: ten healthy
    updates of the parity test's TP layouts; the seconds of `scripts/bench/train.py --guard`.
    """
    need_gpus(2)
    ddp = {"overlap_grad_reduce": True, "bucket_size": 5_000}
    made = recipe(checkpoint_path, TrainLayout(2, 1, 1, 2), ddp=ddp)
    named = ("not_finite", (1,), f"computed a gradient that is not finite ({ATTENTION})", True)
    for faults in run_world(made, overlapped):
        assert faults == {
            "healthy": None,
            "gradient 0": named,
            "gradient 1": named,
            "healed": None,
        }


def pipeline(trainer: Any) -> Faults:
    faults: Faults = {}
    with poisoned_output(trainer, 1, "decoder.layers.1.self_attention.core_attention"):
        faults["first stage"] = fault(trainer)
    with poisoned_output(trainer, 2, "decoder.layers.1"):
        faults["last stage"] = fault(trainer)
    trainer._guard._every = 2
    faults["healthy"] = fault(trainer)
    return faults


def test_the_first_stage_with_a_fault_is_named(tmp_path: Path) -> None:
    """Of a model without experts, whose stages are looked at as wholes; PP 2 and DP 2."""
    need_gpus(4)
    path = write(tmp_path, "qwen3", vocab_size=VOCAB_SIZE, pad_token_id=None)
    what = "computed an output that is not finite in pipeline stage"
    for faults in run_world(recipe(path, TrainLayout(4, 1, 2, 1)), pipeline):
        assert faults == {
            "first stage": ("not_finite", (1,), f"{what} 0", True),
            "last stage": ("not_finite", (2,), f"{what} 1", True),
            "healthy": None,
        }


@pytest.mark.parametrize(
    ("layout", "faulty", "is_local", "says"),
    [
        (TrainLayout(4, 1, 1, 1, max_cp=2), {0, 1, 2, 3}, False, EVERYWHERE),
        (TrainLayout(4, 1, 1, 1, max_cp=2), {0, 1}, True, "; they share these numbers"),
        (TrainLayout(4, 1, 1, 1, max_cp=4), {0, 1, 2, 3}, False, "in a row that train.cp: auto"),
        (TrainLayout(4, 1, 1, 1, max_cp=4), {2, 3}, True, "; they share these numbers"),
        (TrainLayout(4, 1, 1, 1, cp=4), {0, 1, 2, 3}, True, "; they share these numbers"),
    ],
)
def test_what_all_data_parallel_ranks_have_is_no_ranks_fault(
    monkeypatch: pytest.MonkeyPatch,
    layout: TrainLayout,
    faulty: set[int],
    is_local: bool,
    says: str,
) -> None:
    """Also where a row may be on all of them: the step is not repeated, and the line says that it cannot be told."""
    places = [[1 if rank in faulty else 2] for rank in range(layout.world_size)]
    monkeypatch.setattr("megarl.parallel.groups.gathered", lambda place: torch.tensor(places))
    monkeypatch.setattr("megarl.parallel.groups.told", lambda text, rank: text)
    finiteness = SimpleNamespace(first=lambda: (1, "computed a loss that is not finite"))
    model: Any = SimpleNamespace(finiteness=finiteness)
    fault = UpdateGuard(model, layout, None)._not_finite()
    assert fault.is_local == is_local and says in fault.what
    assert [member.number for member in fault.members] == sorted(faulty)
