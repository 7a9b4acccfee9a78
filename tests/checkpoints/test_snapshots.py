"""Checkpoint folders: complete or absent, and any damage is seen."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.checkpoints.snapshots import MANIFEST, RUN, Digest, Snapshots, digest


def write(snapshots: Snapshots, step: int, keep: int = 3) -> Path:
    """A checkpoint of three files, one of whose digests its rank has taken."""
    partial = snapshots.begin(step)
    (partial / "deep").mkdir()
    made = random.Random(step)
    for name in ("rank-0.pt", "rank-1.pt", "deep/shard.distcp"):
        (partial / name).write_bytes(made.randbytes(1000))
    known = {"rank-0.pt": digest(partial / "rank-0.pt")}
    return snapshots.commit(partial, {"step": step, "taken": 7 * step}, known, keep)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def snapshots(tmp_path: Path, said: list[str]) -> Snapshots:
    return Snapshots(tmp_path / "checkpoints", said.append)


def test_the_newest_is_found_with_what_was_stored(snapshots: Snapshots, said: list[str]) -> None:
    assert snapshots.newest() is None
    for step in (2, 9, 10):
        write(snapshots, step)
    found = snapshots.newest()
    assert found is not None
    assert (found.step, found.run, found.folder.name) == (10, {"step": 10, "taken": 70}, "step-000010")
    assert said == []


def test_the_last_ones_are_kept(snapshots: Snapshots) -> None:
    for step in (1, 2, 3, 4):
        write(snapshots, step, keep=2)
    assert sorted(one.name for one in snapshots.folder.iterdir()) == ["step-000003", "step-000004"]


def test_later_ones_that_were_passed_over_give_way(snapshots: Snapshots, said: list[str]) -> None:
    """The run went back to step 20: what it writes next is its newest, whatever the numbers of the damaged are."""
    write(snapshots, 20)
    for step in (30, 40):
        truncate(write(snapshots, step))
    found = snapshots.newest()
    assert found is not None and found.step == 20 and len(said) == 2
    written = write(snapshots, 25, keep=1)
    assert [one.name for one in snapshots.folder.iterdir()] == [written.name] == ["step-000025"]


def test_a_step_that_is_done_again_replaces_the_old(snapshots: Snapshots) -> None:
    write(snapshots, 5)
    again = write(snapshots, 5)
    found = snapshots.newest()
    assert found is not None and found.folder == again


def test_a_half_written_one_is_removed_and_told(snapshots: Snapshots, said: list[str]) -> None:
    write(snapshots, 1)
    left = snapshots.begin(2)
    (left / "rank-0.pt").write_bytes(b"half")
    found = snapshots.newest()
    assert found is not None and found.step == 1, "a folder under its hidden name is no checkpoint"
    snapshots.begin(3)
    assert not left.exists()
    assert len(said) == 1 and "never completed" in said[0]


def truncate(folder: Path) -> None:
    file = folder / "deep/shard.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    file = folder / "rank-1.pt"
    content = bytearray(file.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 16
    file.write_bytes(content)


def flip_a_bit_of_the_run(folder: Path) -> None:
    file = folder / RUN
    file.write_text(file.read_text().replace("2", "3", 1))


def add_a_file(folder: Path) -> None:
    (folder / "rank-2.pt").write_bytes(b"")


def empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("")


def cut_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-9])


def forge_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1, 2]")


def write_a_later_format(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))


DAMAGES: list[Callable[[Path], None]] = [
    truncate,
    flip_a_bit,
    flip_a_bit_of_the_run,
    add_a_file,
    lambda folder: (folder / "rank-0.pt").unlink(),
    lambda folder: (folder / RUN).unlink(),
    lambda folder: (folder / MANIFEST).unlink(),
    empty_the_manifest,
    cut_the_manifest,
    forge_the_manifest,
    write_a_later_format,
    lambda folder: shutil.rmtree(folder / "deep"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_seen_and_the_one_before_used(
    snapshots: Snapshots, said: list[str], damage: Callable[[Path], None]
) -> None:
    write(snapshots, 1)
    damage(write(snapshots, 2))
    found = snapshots.newest()
    assert found is not None and found.step == 1
    assert len(said) == 1 and "step-000002 is damaged and skipped: " in said[0]


def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    snapshots: Snapshots, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(snapshots, 1)
    write(snapshots, 2)

    def read(file: Path) -> Digest:
        if "step-000002" in str(file):
            raise OSError(5, "Input/output error")
        return digest(file)

    monkeypatch.setattr("megarl.checkpoints.snapshots.digest", read)
    found = snapshots.newest()
    assert found is not None and found.step == 1
    assert "cannot be read ([Errno 5] Input/output error)" in said[0]


def test_every_byte_of_a_file_counts(snapshots: Snapshots) -> None:
    folder = write(snapshots, 1)
    file = folder / "rank-0.pt"
    content = file.read_bytes()
    for at in range(0, len(content), 37):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert snapshots.newest() is None, at
    file.write_bytes(content)
    assert snapshots.newest() is not None
