"""What a model, as its config.json says, refuses of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.placement.roles import resolve
from megarl.preflight.model_checks import loss_errors, policy_errors
from tests.plan import plans


@pytest.mark.parametrize(("family", "is_known"), [("minimax-m2", False), ("qwen3-235b", True)])
def test_experts_that_an_engine_does_not_record_are_not_replayed(
    tmp_path: Path, family: str, is_known: bool
) -> None:
    recipe = plans.recipe(tmp_path, family, 8, ep=8, replay="r3")
    shape = resolve(recipe).policy.shape
    told = [error.where for error in loss_errors(recipe, shape)]
    assert told == ([] if is_known else ["train.replay"])


def test_engines_make_norms_of_linear_attention_in_the_type_of_the_file(tmp_path: Path) -> None:
    recipe = plans.recipe(tmp_path, "qwen3-next", 8, ep=8)
    of_file = recipe.model.model_copy(update={"dtype": "float32"})
    other = recipe.model_copy(update={"model": of_file})
    where = [
        [error.where for error in policy_errors(resolve(each), has_weights=False)]
        for each in (recipe, other)
    ]
    assert "model.dtype" not in where[0]
    assert "model.dtype" in where[1]
