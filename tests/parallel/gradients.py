"""What a training world learns, compared with another world's where it is well defined: in the gradients.

Adam moves a weight by about the learning rate however small its gradient is. Where a gradient is zero but for rounding
(a token's embedding that no loss depends on, a key's bias that cancels in the softmax), the CPU's instructions decide
in which direction. So the gradients of two worlds are compared, before the optimizer sees them, and each world's
weights with those that torch's AdamW makes of its own gradients. The weights of two worlds are compared where gradients
are large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel.precision import ROUNDING_OF_BFLOAT16, dtype, within
from tests.parallel.worlds import (
    Rectangle,
    assemble,
    assigned,
    numbers,
    ragged,
    rectangles,
    trained,
    weighted_loss,
    world_part,
)

VOCAB_SIZE, DENOMINATOR, LR = 200, 97.0, 1e-3
Tensors = dict[str, np.ndarray]
Held = TypeVar("Held")

# An element of the first step's gradient may differ by this part of itself and of its tensor's root mean square. The
# layouts differ by 1e-5 at most, and an error of 1e-3 on one rank is to be found.
FIRST = within(1e-4)
# A tensor's gradient at a later step may differ by this part of its norm: Adam has turned some rounding into weights.
LATER = within(1e-3)
# With linear attention so many times as much: the norm behind it divides by what is almost 0 in some heads. Layouts
# differ by 1e-4 at most in the first step, and by 2e-3 later.
LINEAR = 3.0
# A weight may differ after the steps by this part of the sum of their learning rates, where each step's gradient is
# larger than LARGE of its tensor's root mean square. There the layouts differ by 1e-3 at most.
MOVED, LARGE = within(1e-2), 0.03
# Of all elements, how many have gradients as large as that in every one of three steps.
MOST = 0.75


@dataclass
class Learning(Generic[Held]):
    """Optimizer steps, as one rank's rectangles or as the world's whole tensors; gradients are not clipped yet."""

    grad_clip: float
    weight_decay: float
    before: Held
    gradients: list[Held] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    after: Held | None = None


@contextmanager
def recorded(trainer: Any) -> Iterator[Learning[list[Rectangle]]]:
    """This rank's part of every step that the trainer (or the critic) takes inside; called on all ranks together."""
    rank_model = trainer._model
    learning = Learning(
        rank_model._train.grad_clip, rank_model._train.weight_decay, rectangles(trainer)
    )
    take_step = rank_model.step

    def record(lr: float) -> float:
        learning.gradients.append(rectangles(trainer, _whole_gradients(trainer)))
        learning.rates.append(lr)
        learning.norms.append(take_step(lr))
        return learning.norms[-1]

    with patch.object(rank_model, "step", record):
        yield learning
    learning.after = rectangles(trainer)


def uneven_part(trainer: Any, num_micro_batches: int = 4, **more: Any) -> Any:
    """This rank's uneven micro-batches of the same random sequences in every layout, as its part of an update."""
    sequences = ragged(14, VOCAB_SIZE, seed=3)
    at = trainer.layout.coords(trainer.rank)
    micro_batches = assigned(sequences, trainer.layout, at.dp, num_micro_batches)
    return world_part(micro_batches, sequences, DENOMINATOR, **more)


def steps(trainer: Any, part: Any, count: int) -> list[dict[str, float]]:
    """The statistics of so many steps on the same part."""
    return [numbers(trainer.train_step(part, LR, weighted_loss)) for _ in range(count)]


def uneven_steps(trainer: Any, count: int) -> dict[str, Any]:
    """Logprobs, then so many steps on this rank's uneven part."""
    part = uneven_part(trainer)
    logprobs = trainer.token_outputs(part.micro_batches)
    with recorded(trainer) as learning:
        metrics = steps(trainer, part, count)
    return {"logprobs": logprobs, "metrics": metrics, "learning": learning}


def check_same_end(ranks: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Assert that two worlds of one layout have the same metrics, weights and moments, to the last bit."""
    for rank, other in zip(ranks, expected, strict=True):
        assert rank["metrics"] == other["metrics"]
        for rectangle, other_rectangle in zip(
            rank["learning"].after, other["learning"].after, strict=True
        ):
            assert rectangle[:3] == other_rectangle[:3] and np.array_equal(
                rectangle[3], other_rectangle[3]
            ), rectangle[0]
        moments = zip(rank["moments"], other["moments"], strict=True)
        assert all(np.array_equal(moment, other_moment) for moment, other_moment in moments)


def _whole_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Gradients by the weight map's names. Each data-parallel rank holds a shard of the sums, so gather the others."""
    by_place = {}
    for chunk in trainer._model.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, share, group=group)
        by_place |= {
            param.data_ptr(): param.main_grad
            for param in chunk.parameters()
            if hasattr(param, "main_grad")
        }
    return {
        name: by_place[param.data_ptr()]
        for name, param in trained(trainer).items()
        if param.data_ptr() in by_place
    }


def whole(ranks: Sequence[Learning[list[Rectangle]]]) -> Learning[Tensors]:
    """The world's tensors from all of its ranks' rectangles. Raises AssertionError where replicas differ."""
    first = ranks[0]
    assert all((rank.rates, rank.norms) == (first.rates, first.norms) for rank in ranks)
    gradients = [assemble(step) for step in zip(*(rank.gradients for rank in ranks), strict=True)]
    before, after = (
        assemble([rank.before for rank in ranks]),
        assemble([rank.after or [] for rank in ranks]),
    )
    return Learning(
        first.grad_clip, first.weight_decay, before, gradients, first.rates, first.norms, after
    )


def check_learning(
    ranks: Sequence[Learning[list[Rectangle]]],
    reference: Sequence[Learning[list[Rectangle]]],
    earlier: Sequence[Learning[list[Rectangle]]] = (),
    least: float = MOST,
    rounding: float = 1.0,
) -> None:
    """Assert that two worlds learnt the same.

    earlier: the steps of a world that both of them resumed. least: as of `check_moved`. rounding: of `check_gradients`.
    """
    learning, expected = whole(ranks), whole(reference)
    check_gradients(learning.gradients, expected.gradients, rounding)
    if earlier:
        before = whole(earlier)
        learning = resumed(before, learning)
        expected = resumed(before, expected)
    check_weights(learning)
    # in bfloat16 some tokens go to other experts, which turns some gradients around
    if dtype() == "float32":
        check_moved(learning, expected, least, rounding)
    assert learning.after and expected.after and learning.after.keys() == expected.after.keys()
    # moved by other rules (router biases), or frozen
    for tensor in learning.after.keys() - learning.gradients[0].keys():
        np.testing.assert_allclose(
            learning.after[tensor], expected.after[tensor], rtol=1e-6, atol=1e-7, err_msg=tensor
        )


def resumed(first: Learning[Tensors], then: Learning[Tensors]) -> Learning[Tensors]:
    """Steps, and those that began with the weights that they left."""
    assert first.after and first.after.keys() == then.before.keys()
    for tensor, values in first.after.items():
        np.testing.assert_array_equal(then.before[tensor], values, err_msg=tensor)
    lists = {
        name: [*getattr(first, name), *getattr(then, name)]
        for name in ("gradients", "rates", "norms")
    }
    return replace(then, before=first.before, **lists)


def check_gradients(
    mine: Sequence[Tensors], expected: Sequence[Tensors], rounding: float = 1.0
) -> None:
    """Compare each step's gradient, to so many times FIRST and LATER.

    Raises AssertionError with the step and the tensor.
    """
    for step, (gradients, others) in enumerate(zip(mine, expected, strict=True)):
        assert gradients.keys() == others.keys(), (
            f"step {step}: {sorted(gradients.keys() ^ others.keys())}"
        )
        for tensor, gradient in gradients.items():
            difference, other = np.abs(gradient - others[tensor]), np.abs(others[tensor])
            if step == 0:
                excess = float(
                    np.max(difference / (FIRST * (other + root_mean_square(other)) + 1e-30))
                )
            else:
                excess = root_mean_square(difference) / (LATER * root_mean_square(other) + 1e-30)
            assert excess < rounding, (
                f"step {step}: the gradient of {tensor} differs by {excess:.1f} times what it may"
            )


def check_moved(
    mine: Learning[Tensors],
    expected: Learning[Tensors],
    least: float = MOST,
    rounding: float = 1.0,
) -> None:
    """Compare the weights after the steps where the gradient is large in each of them; there rounding decides nothing.

    To so many times MOVED. Raises AssertionError with the tensor, or where not more than `least` of the elements can be
    compared.
    """
    assert mine.after and expected.after
    compared = 0
    tolerance = rounding * MOVED * sum(expected.rates)
    for name in expected.gradients[0]:
        values = expected.after[name]
        sizes = [np.abs(step[name]) for step in expected.gradients]
        large = np.all([size > LARGE * root_mean_square(size) for size in sizes], axis=0)
        compared += np.count_nonzero(large)
        np.testing.assert_allclose(
            mine.after[name][large], values[large], rtol=1e-6, atol=tolerance, err_msg=name
        )
    assert compared > least * sum(map(np.size, expected.gradients[0].values()))


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def check_weights(learning: Learning[Tensors]) -> None:
    """Compare all weights after the steps with what torch's clipping and AdamW make of the gradients.

    Raises AssertionError with the tensor, or with the step whose gradient norm is another.
    """
    moved = {
        name: torch.tensor(learning.before[name], requires_grad=True)
        for name in learning.gradients[0]
    }
    kept = {
        name for name in moved if "norm" in name or name.endswith((".bias", ".dt_bias", ".A_log"))
    }
    others = [param for name, param in moved.items() if name not in kept]
    groups = [
        {"params": [moved[name] for name in kept], "weight_decay": 0.0},
        {"params": others, "weight_decay": learning.weight_decay},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8)
    for gradients, lr, norm in zip(learning.gradients, learning.rates, learning.norms, strict=True):
        for name, weight in moved.items():
            weight.grad = torch.tensor(gradients[name])
        for group in optimizer.param_groups:
            group["lr"] = lr
        grad_norm = float(torch.nn.utils.clip_grad_norm_(moved.values(), learning.grad_clip))
        assert grad_norm == pytest.approx(norm, rel=1e-5), (
            "the gradient norm is not that of the gradient"
        )
        optimizer.step()
    assert learning.after
    for name, weight in moved.items():
        atol = 1e-4 * sum(learning.rates)
        rtol = within(1e-6, ROUNDING_OF_BFLOAT16)
        np.testing.assert_allclose(
            learning.after[name], weight.detach(), rtol=rtol, atol=atol, err_msg=name
        )
