"""What the documents show is true: their examples are executed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.config import AlgorithmConfig
from megarl.config.loading import load_recipe
from megarl.parallel.roles import resolve
from megarl.preflight.layout import node_faults, slot_faults
from megarl.types import Hyperparameters

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def table() -> Iterator[dict[str, Any]]:
    """The table of algorithms, which is as it was afterwards."""
    before = dict(ALGORITHMS)
    yield ALGORITHMS
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def blocks(name: str, language: str = "python") -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_example_of_a_new_algorithm(table: dict[str, Any]) -> None:
    """Its blocks run in order, its test passes, and a recipe that names it gets its loss."""
    room: dict[str, Any] = {}
    for block in blocks("algorithms.md"):
        exec(compile(block, "docs/algorithms.md", "exec"), room)
    tests = [name for name in room if name.startswith("test_")]
    assert tests
    for name in tests:
        room[name]()
    rules = hyperparameters_of("topr", AlgorithmConfig(name="topr", entropy_coefficient=0.5))
    assert rules == Hyperparameters(aggregation="sequence_sum", entropy_coefficient=0.5)
    ones_T = torch.ones(2)
    row = room["SimpleNamespace"](
        loss_mask_T=ones_T > 0, loss_weight_T=ones_T, advantage_T=ones_T, engine_logp_T=ones_T, nll_weight_T=ones_T,
        sequence_T=ones_T.long(), reference_logp_T=None,
    )  # fmt: skip
    loss, _ = table["topr"].loss(rules)(-ones_T, 4 * ones_T, -ones_T, row)
    assert float(loss) == 2 * (1 - 0.5 * 4)


def test_every_algorithm_and_rule_is_described() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    missing = [name for name in (*ALGORITHMS, *AlgorithmConfig.model_fields) if f"`{name}`" not in text]
    assert missing == ["name"], "algorithm.name itself is the first sentence"


def test_the_placements_that_are_shown_share_what_is_said(tmp_path: Path) -> None:
    (page,) = blocks("placement.md", "yaml")
    found = {}
    for example in re.split(r"^# ", page, flags=re.MULTILINE)[1:]:
        title, _, keys = example.partition("\n")
        overlay = tmp_path / "overlay.yaml"
        overlay.write_text(keys)
        given = ["train.tp=4", "train.pp=1", "algorithm.name=ppo", "critic.lr=1e-5", "placement.network=nodes"]
        recipe = load_recipe(DOCS.parent / "recipes" / "quickstart.yaml", [str(overlay), *given])
        roles = resolve(recipe, learns=title[0] == "m")
        assert slot_faults(roles) + node_faults(roles) == [], title
        found[title.partition(":")[0]] = len(roles.shared_slots)
    assert found == {"shared": 16, "split": 0, "mixed": 12}


def test_the_examples_of_data_are_recipes(tmp_path: Path) -> None:
    found = []
    for number, example in enumerate(blocks("data.md", "yaml")):
        overlay = tmp_path / f"{number}.yaml"
        overlay.write_text(example)
        found.append(load_recipe(DOCS.parent / "recipes" / "quickstart.yaml", [str(overlay)]).data)
    columns, weights = found
    assert columns.eval["math500"].prompt == "problem" and columns.eval["aime2024"].prompt is None
    assert [file.weight for file in weights.train] == [3.0, 1.0]


def test_the_example_of_trackers_is_a_recipe(tmp_path: Path) -> None:
    (page,) = blocks("tracking.md", "yaml")
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(page)
    run = load_recipe(DOCS.parent / "recipes" / "quickstart.yaml", [str(overlay)]).run
    assert (run.trackers, run.project) == (("tensorboard", "wandb", "mlflow"), "math")
