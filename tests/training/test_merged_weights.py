"""Adapters in the policy's weights: the numbers that engines get, the sums' gradient, and the frozen reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.placement.train_layout import TrainLayout
from tests.parallel.adapters import LORA, digest, lora_recipe, set_b
from tests.parallel.checkpoints import write
from tests.parallel.gradients import VOCAB_SIZE, uneven_steps
from tests.parallel.worlds import ragged, recipe, run_world

LAYOUT = TrainLayout(2, 2, 1, 2)
DTYPE = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("model"), "deepseek-v3", vocab_size=VOCAB_SIZE, pad_token_id=None
    )


class TwoFactors(torch.nn.Module):
    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.A, self.B = (torch.nn.Parameter(torch.randn(*size)) for size in ((2, cols), (rows, 2)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.A.T @ self.B.T


def test_the_factors_get_the_gradient_of_the_rounded_sums() -> None:
    """The value is the layer's own; A and B get theirs of dL/dW', and the layer's input dL/dy W', computed by hand."""
    from megarl.parallel.lora import Adapters, _adding

    torch.manual_seed(3)
    adapter, sums = TwoFactors(5, 7), torch.randn(5, 7).bfloat16().float()
    linear: Any = torch.nn.Linear(7, 5, bias=False)
    linear.weight = torch.nn.Parameter(sums, requires_grad=False)
    hidden, out_grad = torch.randn(11, 7, requires_grad=True), torch.randn(11, 5)
    add = _adding(adapter, Adapters(are_in_weights=True))
    out, _ = add(linear, (hidden,), (linear(hidden), None))
    assert torch.equal(out, hidden @ sums.T)
    (out * out_grad).sum().backward()
    of_sums = out_grad.T @ hidden.detach()
    torch.testing.assert_close(adapter.B.grad, of_sums @ adapter.A.detach().T)
    torch.testing.assert_close(adapter.A.grad, adapter.B.detach().T @ of_sums)
    torch.testing.assert_close(hidden.grad, out_grad @ sums)
    with torch.no_grad():
        output = linear(hidden), None
        assert add(linear, (hidden,), output) is output, "nothing is computed that has no gradient"


def look(trainer: Any) -> dict[str, Any]:
    """What a rank computes and holds with adapters that are not 0, before and after an update, and as the reference."""
    sequences, frozen = [ragged(6, VOCAB_SIZE, seed=3)], clones(trainer)
    assert all_equal(trainer.params(), frozen), "B is 0: the sums are the frozen weights"
    set_b(trainer)
    results = {"logp": trainer.token_outputs(sequences), "params": bits(trainer)}
    right = [all_equal(trainer.params(), sums_of(trainer, frozen))]
    with trainer._as_reference():
        results["reference"] = trainer.token_outputs(sequences)
        right.append(all_equal(trainer.params(), frozen))
    right.append(bits_equal(trainer, results["params"]))
    uneven_steps(trainer, 1)
    right += [
        all_equal(trainer.params(), sums_of(trainer, frozen)),
        not bits_equal(trainer, results["params"]),
    ]
    return results | {"right": right, "kept": trainer.round_weights(7)}


def clones(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: param.clone() for name, param in trainer.params().items()}


def bits(trainer: Any) -> dict[str, np.ndarray]:
    return {
        name: param.view(torch.uint8).numpy().copy() for name, param in trainer.params().items()
    }


def bits_equal(trainer: Any, wanted: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(values, wanted[name]) for name, values in bits(trainer).items())


def all_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(param, wanted[name]) for name, param in found.items())


def sums_of(
    trainer: Any, frozen: dict[str, torch.Tensor], version: int | None = None
) -> dict[str, torch.Tensor]:
    """What resharding sends of frozen weights where it merges them itself."""
    from megarl.placement.roles import lora_size
    from megarl.resharding.lora_merge import Merge

    size = lora_size(trainer._recipe.lora, trainer.shape)
    assert size
    merge = Merge.of_rank(
        size, trainer.shape, trainer.layout, trainer.rank, False, trainer.factors()
    )
    sums = {name: param.clone() for name, param in frozen.items()}
    merge.begin(version)
    for box, target in zip(merge.all_boxes(frozen), merge.all_boxes(sums), strict=True):
        box.write(target.weight)
    return sums


@torch.no_grad()
def plain(trainer: Any, of_ranks: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Logprobs of a model without adapters: with the checkpoint's weights, and with those that are given."""
    sequences = [ragged(6, VOCAB_SIZE, seed=3)]
    reference = trainer.token_outputs(sequences)
    for name, param in trainer.params().items():
        param.copy_(torch.from_numpy(of_ranks[trainer.rank][name]).view(param.dtype))
    return {"reference": reference, "logp": trainer.token_outputs(sequences)}


@pytest.mark.slow
def test_a_rank_computes_with_what_engines_get(path: Path) -> None:
    """To the bit, and its reference is the frozen model to the bit."""
    ranks = run_world(lora_recipe(path, LAYOUT, **DTYPE), look)
    for of_rank in ranks:
        assert of_rank["right"] == [True] * 5
        assert 0.9 < of_rank["kept"] < 1.1
    bare = run_world(recipe(path, LAYOUT, **DTYPE), plain, [of_rank["params"] for of_rank in ranks])
    for of_rank, expected in zip(ranks, bare, strict=True):
        for name in ("logp", "reference"):
            for logp_T, other in zip(of_rank[name], expected[name], strict=True):
                np.testing.assert_array_equal(logp_T, other)
    assert any(
        np.abs(a - b).max() > 1e-3
        for a, b in zip(ranks[0]["logp"], ranks[0]["reference"], strict=True)
    )


def published(trainer: Any) -> list[str]:
    """Digests of the weights of two versions, the first again, and between them those of an update."""
    set_b(trainer)
    digests, frozen = [], None
    with trainer._merged.frozen():
        frozen = clones(trainer)
    for version in (1, 2, 1):
        trainer.round_weights(version)
        assert all_equal(trainer.params(), sums_of(trainer, frozen, version)), version
        digests.append(digest(trainer.params()))
    return digests


@pytest.mark.slow
def test_stochastic_rounding_is_that_of_the_version(path: Path) -> None:
    lora = LORA | {"rounding": "stochastic"}
    for first, second, again in run_world(
        lora_recipe(path, TrainLayout(1, 1, 1, 1), lora, **DTYPE), published
    ):
        assert first == again != second


def test_only_16_bit_types_are_merged_in_training() -> None:
    from megarl.placement.roles import trains_merged

    def asked(dtype: str, **lora: Any) -> bool:
        adapters = SimpleNamespace(**({"sync": "merged"} | lora))
        run_recipe: Any = SimpleNamespace(lora=adapters, model=SimpleNamespace(dtype=dtype))
        return trains_merged(run_recipe)

    assert asked("bfloat16") and not asked("float32") and not asked("bfloat16", sync="adapters")
    without: Any = SimpleNamespace(lora=None, model=SimpleNamespace(dtype="bfloat16"))
    assert not trains_merged(without)
