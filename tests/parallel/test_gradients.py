"""The comparison of worlds finds a gradient or a weight that differs, and forgives rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parallel.gradients import (
    Learning,
    Tensors,
    check_gradients,
    check_moved,
    check_weights,
)

LR = 1e-3


def learnt(gradient: np.ndarray) -> Learning[Tensors]:
    """Two steps of AdamW by hand on weights of 1, along the same gradient."""
    weight = np.ones_like(gradient) - 2 * LR * gradient / (np.abs(gradient) + 1e-8)
    steps = {"w": gradient}
    norm = float(np.linalg.norm(gradient))
    return Learning(
        1e9, 0.0, {"w": np.ones_like(gradient)}, [steps] * 2, [LR] * 2, [norm] * 2, {"w": weight}
    )


def test_what_rounding_decides_is_no_difference() -> None:
    """Two rows of a gradient are zero but for rounding, with another sign in each world."""
    rng = np.random.default_rng(2)
    gradient = rng.normal(size=(200, 32)).astype(np.float32)
    gradient[3:5] = 1e-6
    other = (gradient * (1 + 1e-6 * rng.normal(size=gradient.shape))).astype(np.float32)
    other[3:5] *= -1
    learning, expected = learnt(gradient), learnt(other)
    assert learning.after and expected.after
    assert np.abs(learning.after["w"] - expected.after["w"]).max() > 3 * LR
    check_gradients(learning.gradients, expected.gradients)
    check_weights(learning)
    check_weights(expected)
    check_moved(learning, expected)


def test_a_weight_that_moves_otherwise_along_the_same_gradients_is_found() -> None:
    expected = learnt(np.random.default_rng(2).normal(size=(200, 32)).astype(np.float32))
    assert expected.after
    moved = expected.after["w"].copy()
    moved[np.unravel_index(np.argmax(expected.gradients[0]["w"]), moved.shape)] += 0.05 * LR
    with pytest.raises(AssertionError, match="\nw\n"):
        check_moved(replace(expected, after={"w": moved}), expected)


@pytest.mark.parametrize("step", [0, 1])
def test_a_gradient_that_is_missing_is_found_at_every_step(step: int) -> None:
    gradient = {"w": np.random.default_rng(2).normal(size=(200, 32)).astype(np.float32)}
    partial = {"w": gradient["w"] * np.float32(0.99)}
    with pytest.raises(AssertionError, match=f"step {step}: the gradient of w"):
        check_gradients(
            [partial if index == step else gradient for index in range(2)], [gradient] * 2
        )
