"""What nodes lack for one recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.hardware import load_hardware
from megarl.config.loading import load_recipe
from megarl.doctor.facts import Folder
from megarl.doctor.findings import Finding
from megarl.doctor.rules_cluster import recipe_findings
from tests.doctor.nodes import sound

ROOT = Path(__file__).parents[2]
H800 = load_hardware(ROOT / "recipes/hardware/h800.yaml")
NODES = ("placement.network=nodes", "placement.gpus=16")


def recipe(*overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/quickstart.yaml", overrides)


def judged(
    judged_recipe: Recipe, *nodes: Any, hardware: Any = None, checkpoint_bytes: int = 0
) -> list[Finding]:
    return recipe_findings(judged_recipe, nodes, hardware, checkpoint_bytes)


def test_nothing_is_said_of_nodes_that_fit() -> None:
    two = [sound(ray_gpus=8), sound(ray_gpus=8)]
    assert judged(recipe(*NODES), *two, hardware=H800, checkpoint_bytes=10**9) == []
    assert judged(recipe(), sound(), hardware=H800) == []


def test_too_few_gpus_and_nodes_are_named() -> None:
    (here,) = judged(recipe("placement.gpus=16"), sound())
    assert here.line(1).startswith("error: placement.gpus: 16 GPUs, and this machine has 8; ")
    (nodes,) = judged(recipe(*NODES), sound(ray_gpus=8), sound(ray_gpus=4))
    assert nodes.line(2).startswith(
        "error: placement.gpus: 16 GPUs are 2 nodes of 8, Ray has 1 with as many GPUs; "
    )
    spare = recipe(*NODES, "placement.spare_nodes=1")
    (nodes,) = judged(spare, sound(ray_gpus=8), sound(ray_gpus=8))
    assert nodes.line(2).startswith(
        "error: placement.spare_nodes: 2 nodes of 8 GPUs and 1 spare, Ray has 2 with as many GPUs; "
    )
    assert judged(spare, *[sound(ray_gpus=8)] * 3) == []
    assert judged(recipe("placement.gpus=16"), sound(gpus=())) == [], "on CPU they are simulated"


def test_checkpoints_must_fit_on_the_disk() -> None:
    folder = Folder("/shared/runs", "run.dir", True, True, 10**13, 10**11)
    saving = recipe("checkpoint.every=20", "checkpoint.keep=3")
    assert judged(saving, sound(folders=(folder,)), checkpoint_bytes=25 * 10**9) == []
    (full,) = judged(saving, sound(folders=(folder,)), checkpoint_bytes=26 * 10**9)
    assert full.severity == "error"
    assert full.problem == "100 GB free; 3 checkpoints and one being written take 104 GB"
    assert judged(recipe(), sound(folders=(folder,)), checkpoint_bytes=10**15) == [], (
        "it writes none"
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"gpus": tuple(replace(gpu, name="NVIDIA H20") for gpu in sound().gpus)},
            "H800, and the GPUs are NVIDIA H20",
        ),
        (
            {"gpus": tuple(replace(gpu, memory_bytes=6 * 10**10) for gpu in sound().gpus)},
            "with 85 GB of a GPU",
        ),
        ({"host_bytes": 10**12}, "with 2000 GB of host memory, and the node has 1000 GB"),
    ],
)
def test_another_card_than_the_plans_is_a_warning(changed: dict[str, Any], words: str) -> None:
    (finding,) = judged(recipe(), sound(**changed), hardware=H800)
    assert (finding.severity, finding.where) == ("warning", "placement.hardware")
    assert words in finding.problem


def test_float8_engines_want_gpus_that_have_it() -> None:
    old = sound(gpus=(replace(sound().gpus[0], name="NVIDIA A100", compute_capability="8.0"),))
    in_float8 = recipe("placement.gpus=1", "rollout.engine.weights=fp8")
    (finding,) = judged(in_float8, old)
    assert (finding.severity, finding.where) == ("error", "rollout.engine.weights")
    assert judged(in_float8, sound()) == []
