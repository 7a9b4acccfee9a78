from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.loading import load_recipe
from megarl.placement.roles import resolve
from megarl.preflight.checks_by_command import plan_errors
from megarl.preflight.optimizer_checks import muon_errors

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("train.optimizer_offload=true", "true, but with train.optimizer_name: muon a step is"),
        (
            "train.optimizer.use_precision_aware_optimizer=true",
            "with train.optimizer_name: muon masters and momentum are float32; remove it, or set",
        ),
        ("train.optimizer.decoupled_weight_decay=false", "with the gradient's size"),
    ],
)
def test_what_muon_does_not_have_is_named(key: str, says: str) -> None:
    path = str(ROOT / "recipes" / "quickstart.yaml")
    assert muon_errors(load_recipe(path, [key])) == []
    assert muon_errors(load_recipe(path, ["train.optimizer_name=muon"])) == []
    (error,) = muon_errors(load_recipe(path, [key, "train.optimizer_name=muon"]))
    assert str(error).startswith(f"{key.partition('=')[0]}: ")
    assert says in str(error)


def test_a_plan_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    keys = ["train.optimizer_name=muon", "train.optimizer_offload=true"]
    roles = resolve(load_recipe("recipes/grpo_deepseek671b.yaml", keys))
    assert "train.optimizer_offload" in [error.where for error in plan_errors(roles)]
