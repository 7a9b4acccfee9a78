"""A run on two Ray nodes of this machine, of which one dies, and a third that takes its place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import soak_resume as soak
from tests.ray_nodes import ROOT, RayNodes

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

FIRST, SECOND, SPARE = (f"127.0.0.{number}" for number in (2, 3, 4))
STEPS = 4
_LIMIT_S = 300.0
# two ranks and an engine on each node
KEYS = [
    "algorithm.name=grpo",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=24",
    "rollout.seeded=true",
    "rollout.engine.tp=2",
    "rollout.engine.count=2",
    "warm_start.steps=0",
    "train.tp=2",
    "train.pp=2",
    "train.ep=2",
    "placement.gpus=4",
    "placement.gpus_per_node=2",
    "placement.network=nodes",
    "placement.spare_nodes=1",
    "evaluation.max_prompts=4",
    "evaluation.every=3",
    "reward.function=odd_reward:score",
    "run.trackers=[]",
    f"run.steps={STEPS}",
    "checkpoint.every=4",
    "checkpoint.memory_copies=true",
]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    folder = tmp_path / "nodes"
    folder.mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="n-", dir="/tmp") as disk,
        RayNodes(folder, Path(disk), gpus=2) as three,
    ):
        three.start(FIRST, SECOND, SPARE)
        yield three


def begin(folder: Path, nodes: RayNodes, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megarl.cli", "train", str(ROOT / "recipes/quickstart.yaml")]
    path = os.pathsep.join([str(ROOT), str(folder)])
    settings = nodes.environment() | {"RAY_ADDRESS": nodes.address, "PYTHONPATH": path}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *KEYS, f"run.name={name}"], cwd=folder, env=settings, stdout=log, stderr=log
        )


def test_a_spare_node_takes_over_within_a_run(nodes: RayNodes, tmp_path: Path) -> None:
    """Ranks, engine and copies of the node that dies come back on the spare one; nothing else is another."""
    soak.prepare(tmp_path, KEYS, episodes=False)
    undisturbed = begin(tmp_path, nodes, "undisturbed")
    log = tmp_path / "undisturbed.log"
    assert undisturbed.wait(_LIMIT_S) == 0, log.read_text()

    disturbed = begin(tmp_path, nodes, "disturbed")
    log = tmp_path / "disturbed.log"
    deadline = time.monotonic() + _LIMIT_S
    while b"step 2/" not in log.read_bytes():
        assert disturbed.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    nodes.kill(SECOND)
    assert disturbed.wait(_LIMIT_S) == 0, log.read_text()

    assert f"node {SECOND} has died: its slots are on node {SPARE} from now on" in log.read_text()
    soak.STEPS = STEPS
    measured = (*soak.OF_ENGINES, "recovery/")
    assert soak.differences(tmp_path, "undisturbed", "disturbed", measured, episodes=False) == [], (
        log.read_text()
    )
