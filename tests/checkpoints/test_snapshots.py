"""Checkpoint folders: complete or absent, and any damage is seen."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from megarl.checkpoints.snapshots import MANIFEST, RUN, Digest, Snapshots, digest
from tests.small_disk import mount_over, read_only, small_disk


def write(snapshots: Snapshots, step: int, keep: int = 3) -> Path:
    """A checkpoint of three files, one of whose digests its rank has taken."""
    partial = snapshots.begin(step)
    (partial / "deep").mkdir()
    rng = random.Random(step)
    for name in ("rank-0.pt", "rank-1.pt", "deep/shard.distcp"):
        (partial / name).write_bytes(rng.randbytes(1000))
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
    newest = snapshots.newest()
    assert newest is not None
    assert (newest.step, newest.run, newest.folder.name) == (
        10,
        {"step": 10, "taken": 70},
        "step-000010",
    )
    assert said == []


def test_the_last_ones_are_kept(snapshots: Snapshots) -> None:
    for step in (1, 2, 3, 4):
        write(snapshots, step, keep=2)
    assert sorted(path.name for path in snapshots.folder.iterdir()) == [
        "step-000003",
        "step-000004",
    ]


def test_later_ones_that_were_passed_over_give_way(snapshots: Snapshots, said: list[str]) -> None:
    """The run went back to step 20: what it writes next is its newest, whatever the numbers of the damaged are."""
    write(snapshots, 20)
    for step in (30, 40):
        truncate(write(snapshots, step))
    newest = snapshots.newest()
    assert newest is not None and newest.step == 20 and len(said) == 2
    written = write(snapshots, 25, keep=1)
    assert [path.name for path in snapshots.folder.iterdir()] == [written.name] == ["step-000025"]


def test_a_step_that_is_done_again_replaces_the_old(snapshots: Snapshots) -> None:
    write(snapshots, 5)
    again = write(snapshots, 5)
    newest = snapshots.newest()
    assert newest is not None and newest.folder == again


def test_a_half_written_one_is_removed_and_told(snapshots: Snapshots, said: list[str]) -> None:
    write(snapshots, 1)
    left = snapshots.begin(2)
    (left / "rank-0.pt").write_bytes(b"half")
    newest = snapshots.newest()
    assert newest is not None and newest.step == 1, (
        "a folder under its hidden name is no checkpoint"
    )
    snapshots.begin(3)
    assert not left.exists()
    assert len(said) == 1 and "is not complete and is removed" in said[0]


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


def cut_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-9])


def forge_the_manifest(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / MANIFEST).write_text(content)


def change_the_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


def replace_the_manifest_by_a_pipe(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def forge_the_run(content: bytes) -> Callable[[Path], None]:
    """Its checksum in the manifest is right."""

    def forge(folder: Path) -> None:
        (folder / RUN).write_bytes(content)
        files = json.loads((folder / MANIFEST).read_text())["files"]
        change_the_manifest(folder, files={**files, RUN: asdict(digest(folder / RUN))})

    return forge


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"no folder")


def replace_by_a_dangling_link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


DAMAGES: list[Callable[[Path], object]] = [
    truncate,
    flip_a_bit,
    flip_a_bit_of_the_run,
    add_a_file,
    lambda folder: (folder / "rank-0.pt").unlink(),
    lambda folder: (folder / RUN).unlink(),
    lambda folder: (folder / MANIFEST).unlink(),
    cut_the_manifest,
    forge_the_manifest(""),
    forge_the_manifest("[1, 2]"),
    forge_the_manifest("[" * 200_000),
    partial(change_the_manifest, format=99),
    lambda folder: shutil.rmtree(folder / "deep"),
    replace_the_manifest_by_a_pipe,
    forge_the_run(b"{'step': 2}"),
    forge_the_run(b"[" * 200_000),
    forge_the_run(b'{"step": "\xff"}'),
    forge_the_run(b"[2]"),
    replace_by_a_file,
    replace_by_a_dangling_link,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_seen_and_the_one_before_used(
    snapshots: Snapshots, said: list[str], damage: Callable[[Path], object]
) -> None:
    write(snapshots, 1)
    damage(write(snapshots, 2))
    newest = snapshots.newest()
    assert newest is not None and newest.step == 1
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
    newest = snapshots.newest()
    assert newest is not None and newest.step == 1
    assert "cannot be read ([Errno 5] Input/output error)" in said[0]


@pytest.mark.parametrize("replace", [replace_by_a_file, replace_by_a_dangling_link])
def test_what_lies_in_the_place_of_a_checkpoint_gives_way_to_it(
    snapshots: Snapshots, said: list[str], replace: Callable[[Path], None]
) -> None:
    """Also in the place of one that is old enough to go."""
    for step in (1, 2):
        replace(write(snapshots, step))
    again = write(snapshots, 2, keep=1)
    assert [path.name for path in snapshots.folder.iterdir()] == [again.name]
    newest = snapshots.newest()
    assert newest is not None and newest.folder == again and not said


def test_a_disk_that_turns_read_only_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, said: list[str]
) -> None:
    """Neither of the new one nor of an old one of the same step; an old one that must stay costs no new one."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        snapshots = Snapshots(disk / "checkpoints", said.append)
        first = write(snapshots, 1)
        partial = snapshots.begin(1)
        (partial / "rank-0.pt").write_bytes(b"new")
        with read_only(disk), pytest.raises(OSError, match="Read-only file system"):
            snapshots.commit(partial, {"step": 1}, {}, keep=1)
        newest = snapshots.newest()
        assert newest is not None and newest.folder == first and newest.run["taken"] == 7
        assert said == []


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one(
    tmp_path: Path, said: list[str]
) -> None:
    """What is left of it has no name of a complete one."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        snapshots = Snapshots(disk / "checkpoints", said.append)
        mount_over(write(snapshots, 1) / "deep", "ro")
        write(snapshots, 2, keep=1)
        newest = snapshots.newest()
        assert newest is not None and newest.step == 2
        assert said == [
            f"an old checkpoint in {snapshots.folder} is not removed (Read-only file system)"
        ]
        names = [path.name.partition(".partial")[0] for path in snapshots.folder.iterdir()]
        assert sorted(names) == [".step-000001", "step-000002"]
        write(snapshots, 3, keep=1)
        assert "is not complete and cannot be removed (Read-only file system)" in said[1]
        newest = snapshots.newest()
        assert newest is not None and newest.step == 3


@pytest.mark.parametrize("name", [".step-000001.partial-abcd1234", "step-000001"])
def test_a_link_is_removed_without_what_it_leads_to(
    snapshots: Snapshots, tmp_path: Path, name: str
) -> None:
    """A hidden name is that of a checkpoint that was never completed; of the others the last ones are kept."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"precious")
    snapshots.folder.mkdir()
    (snapshots.folder / name).symlink_to(elsewhere)
    write(snapshots, 2, keep=1)
    assert [path.name for path in snapshots.folder.iterdir()] == ["step-000002"]
    assert (elsewhere / "precious").read_bytes() == b"precious"


def test_a_file_of_a_hidden_name_is_removed_and_told_and_another_file_stays(
    snapshots: Snapshots, said: list[str]
) -> None:
    snapshots.folder.mkdir()
    left, of_user = (
        snapshots.folder / ".step-000001.partial-abcd1234",
        snapshots.folder / "notes.partial-1.txt",
    )
    for file in (left, of_user):
        file.write_bytes(b"")
    write(snapshots, 2)
    assert said == [f"checkpoint {left} is not complete and is removed"]
    assert of_user.exists()


def test_a_checkpoint_that_was_moved_behind_a_link_is_used(
    snapshots: Snapshots, tmp_path: Path
) -> None:
    folder = write(snapshots, 2)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    newest = snapshots.newest()
    assert newest is not None and (newest.step, newest.folder) == (2, folder)


@pytest.mark.parametrize("name", ["step-000007", "step-" + 30 * "9"])
@pytest.mark.parametrize("version", ["this", "older"])
def test_a_renamed_checkpoint_is_of_the_step_that_its_manifest_names(
    snapshots: Snapshots, said: list[str], name: str, version: str
) -> None:
    """An older version's manifest has no step, and the controller's state has it."""
    renamed = write(snapshots, 6)
    if version == "older":
        manifest = json.loads((renamed / MANIFEST).read_text())
        del manifest["step"]
        (renamed / MANIFEST).write_text(json.dumps(manifest))
    renamed = renamed.rename(snapshots.folder / name)
    newest = snapshots.newest()
    assert newest is not None and (newest.step, newest.folder) == (6, renamed)
    assert said == [f"checkpoint {renamed} is of step 6, as its {MANIFEST} says"]
    assert snapshots.newest(7) is None
    sixth = snapshots.newest(6)
    assert sixth is not None and sixth.folder == renamed


def test_a_newer_name_does_not_make_a_checkpoint_newer(snapshots: Snapshots) -> None:
    second, sixth = write(snapshots, 2), write(snapshots, 6)
    second.rename(snapshots.folder / "step-000099")
    newest = snapshots.newest()
    assert newest is not None and newest.folder == sixth
    write(snapshots, 8, keep=2)
    assert sorted(path.name for path in snapshots.folder.iterdir()) == [
        "step-000006",
        "step-000008",
    ]


def test_other_digits_are_no_name_of_a_checkpoint(snapshots: Snapshots) -> None:
    write(snapshots, 6).rename(snapshots.folder / "step-\u0660\u0660\u0660\u0660\u0660\u0667")
    assert snapshots.newest() is None


@pytest.mark.parametrize("step", ["6", 6.0, True, -6, None, [6]])
def test_a_step_that_is_none_is_passed_over(snapshots: Snapshots, step: object) -> None:
    change_the_manifest(write(snapshots, 6), step=step)
    newest = snapshots.newest()
    assert newest is not None and newest.step == 6
