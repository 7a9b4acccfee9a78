"""Ranks that compute with the engines' numbers: every layout as one rank, and padding that changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.parallel import fp8_layers
from megarl.placement.train_layout import TrainLayout
from tests.parallel.fp8_models import fp8_recipe, write_wide
from tests.parallel.gradients import VOCAB_SIZE, check_learning, uneven_steps
from tests.parallel.worlds import run_world

pytestmark = pytest.mark.slow

ONE_RANK = TrainLayout(1, 1, 1, 1)
LAYOUTS = {
    "tp2 etp2": ("deepseek-v3", TrainLayout(2, 2, 1, 1)),
    "tp2 pp2 ep2": ("qwen3-moe", TrainLayout(4, 2, 2, 2)),
}
PADDED_ROWS = 16
# of the elements of the gradients, how many are large enough that the weights after a step are compared
COMPARED = 0.5


def train(trainer: Any, rows: int = 1) -> dict[str, Any]:
    """One step: a code that rounding turns, which the weights of a second one may have, is an error of several percent.

    rows: the tokens of a rank are padded to a multiple of so many, as on a GPU.
    """
    trainer._model._rows = rows
    return uneven_steps(trainer, 1)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    results = {}
    for family in ("qwen3-moe", "deepseek-v3"):
        folder = tmp_path_factory.mktemp(family)
        path = write_wide(folder, family, vocab_size=VOCAB_SIZE, pad_token_id=None)
        results[family] = path, run(path, family, ONE_RANK)[0]
    return results


def run(path: Path, family: str, layout: TrainLayout, *work: Any, **keys: Any) -> Any:
    made = fp8_recipe(
        path, family, layout, grad_clip=1.0, weight_decay=0.1, aux_loss=0.02, z_loss=1e-3, **keys
    )
    return run_world(made, train, *work)


def check(ranks: Any, expected: dict[str, Any]) -> None:
    for name, value in expected["metrics"][0].items():
        assert ranks[-1]["metrics"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    learning = [rank["learning"] for rank in ranks]
    check_learning(learning, [expected["learning"]], least=COMPARED)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(one_rank: dict[str, Any], name: str) -> None:
    family, layout = LAYOUTS[name]
    path, expected = one_rank[family]
    check(run(path, family, layout), expected)


def test_padding_changes_no_loss_gradient_or_metric(one_rank: dict[str, Any]) -> None:
    path, expected = one_rank["qwen3-moe"]
    (padded,) = run(path, "qwen3-moe", ONE_RANK, PADDED_ROWS)
    check([padded], expected)
    for logprobs, others in zip(padded["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(logprobs, others, atol=1e-6)


@pytest.mark.parametrize("backward", ["high_precision", "fp8"])
def test_the_backward_pass_changes_gradients_alone(one_rank: dict[str, Any], backward: str) -> None:
    """`dequantised` is what the others of this file compute with."""
    path, expected = one_rank["qwen3-moe"]
    (other,) = run(path, "qwen3-moe", ONE_RANK, fp8_backward=backward)
    for logprobs, others in zip(other["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_array_equal(logprobs, others)
    (norm,) = other["learning"].norms
    (expected_norm,) = expected["learning"].norms
    assert norm != expected_norm
    assert norm == pytest.approx(expected_norm, rel=0.1)


def test_what_the_installed_engine_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_layers, "is_te_min_version", lambda version: False)
    monkeypatch.setattr(fp8_layers, "get_te_version", lambda: "2.14.1")
    monkeypatch.setenv(fp8_layers.FLOAT_SCALES, "1")
    told = [str(error) for error in fp8_layers.engine_errors("dequantised")]
    assert told == [
        "train.fp8_backward: dequantised needs TransformerEngine 2.15.0, and 2.14.1 is installed; "
        "install a later version, or set it to fp8",
        f"{fp8_layers.FLOAT_SCALES}: 1 asks TransformerEngine for scales that are no powers of two; "
        "unset it on all nodes",
    ]
    monkeypatch.delenv(fp8_layers.FLOAT_SCALES)
    assert fp8_layers.engine_errors("fp8") == []
