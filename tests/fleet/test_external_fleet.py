"""How a version of the weights gets to external engines; ranks, servers and Ray are stood in for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.fleet.external_fleet import ExternalFleet
from megarl.recovery.external_engines import ExternalEngineProcesses
from tests.plan import plans


class Servers(ExternalEngineProcesses):
    """Notes what it is told; `folders`: those that were there when the servers loaded weights."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.told: list[str] = []
        self.folders: list[list[str]] = []

    def restore(self) -> None:
        self.told.append("restore")

    def fill(self) -> None:
        self.told.append("fill")
        self.folders.append(sorted(path.name for path in self.fleet._folder.iterdir()))


class Ranks:
    processes: Any = SimpleNamespace(loss=None)

    def export(self, folder: Path, *, where: str) -> None:
        assert where == "rollout.engine.external_dir"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"12345")


def made(folder: Path, checksums: tuple[str, ...] = (), **more: Any) -> Any:
    engine = {"external": ["a:1", "b:2"], "external_dir": str(folder)}
    recipe = plans.recipe(folder, "tiny", 2, engine=engine, **more)
    fleet: Any = ExternalFleet.__new__(ExternalFleet)
    fleet.lines = []
    fleet.__dict__.update(
        _recipe=recipe, _run_id="run", attempts=4, say=fleet.lines.append, trainers=Ranks(),
        _folder=folder / "plan" / "weights", _weights=None, _publish_s=0.0, _has_said_unchecked=False,
    )  # fmt: skip
    fleet.engines = SimpleNamespace(processes=Servers(fleet), checksums=lambda: [*checksums])
    return fleet


def test_each_version_is_a_folder_and_the_one_before_is_removed(tmp_path: Path) -> None:
    fleet = made(tmp_path)
    (fleet._folder / "left-by-a-run-that-died").mkdir(parents=True)
    assert fleet._publish(0) == []
    fleet._publish(1)
    servers = fleet.engines.processes
    assert servers.told == ["restore", "fill"] * 2
    assert servers.folders == [["left-by-a-run-that-died", "run-0-5"], ["run-0-5", "run-1-6"]]
    assert [path.name for path in fleet._folder.iterdir()] == ["run-1-6"]
    weights = fleet._weights
    assert (weights.label, weights.version) == ("run-1-6", 1)
    assert Path(weights.folder) == fleet._folder / "run-1-6"
    stats = fleet._stats([])
    assert stats.wire_bytes == 5 and stats.seconds > 0


def test_a_version_that_is_published_again_has_another_label(tmp_path: Path) -> None:
    """A run that goes back to a checkpoint counts versions from there; servers must not take one for the other."""
    fleet = made(tmp_path)
    labels = set()
    for _ in range(2):
        fleet._publish(1)
        labels.add(fleet._weights.label)
    assert labels == {"run-1-5", "run-1-6"}


def test_the_weights_before_stay_while_a_rank_is_lost(tmp_path: Path) -> None:
    fleet = made(tmp_path)
    fleet._publish(0)
    fleet.trainers.processes = SimpleNamespace(
        loss=SimpleNamespace(cause=WorkerFailed("rank 1: died", ""))
    )
    with pytest.raises(WorkerFailed, match="rank 1"):
        fleet._publish(1)
    assert fleet._weights.label == "run-0-5" and Path(fleet._weights.folder).is_dir()


@pytest.mark.parametrize(
    ("checksums", "differ", "lines"),
    [
        (("[1] a", "[1] a"), False, 0),
        (("[1] a", "[1] b"), True, 0),
        (("[1] a", "[2] b"), False, 0),  # of other layouts
        (("", "[1] a"), False, 1),
    ],
)
def test_servers_of_one_layout_must_have_equal_weights(
    tmp_path: Path, checksums: tuple[str, ...], differ: bool, lines: int
) -> None:
    fleet = made(tmp_path, checksums, reshard={"verify": "checksum"})
    if differ:
        with pytest.raises(RuntimeError, match="their weights differ"):
            fleet._publish(0)
        return
    fleet._publish(0)
    fleet._publish(1)
    assert len(fleet.lines) == lines, "it is said once"
