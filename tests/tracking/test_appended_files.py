"""Pieces that are appended to a file are in it whole and in order, whatever room its disk has meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megarl.tracking.appended_files import AppendedFile
from tests.small_disk import small_disk

PAGE = 4096


def appended(folder: Path, most_bytes: int = 2**20) -> AppendedFile:
    (folder / "file").touch()
    return AppendedFile(folder / "file", most_bytes)


def leave_room(disk: Path, num_bytes: int) -> None:
    """Take all room of a disk but for so many bytes, in whole pages."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    free = shutil.disk_usage(disk).free
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - num_bytes)


def test_no_piece_is_ever_half_in_the_file(tmp_path: Path) -> None:
    pieces = [f"{step}:".encode() * 900 + b"\n" for step in range(9)]
    with small_disk(tmp_path / "disk", "1m") as disk:
        file = appended(disk)
        num_refused = 0
        for step, piece in enumerate(pieces):
            leave_room(disk, num_bytes=(step * 7 % 3) * PAGE)
            file.put(step, piece)
            try:
                file.write()
            except OSError:
                num_refused += 1
            num_written = len(pieces[: step + 1]) - len(file.waiting)
            assert file.path.read_bytes() == b"".join(pieces[:num_written])
        assert 0 < num_refused < len(pieces)
        (disk / "filler").unlink()
        file.write()
        assert file.waiting == []
        assert file.path.read_bytes() == b"".join(pieces)


def test_of_too_many_pieces_the_oldest_are_lost(tmp_path: Path) -> None:
    file = appended(tmp_path, most_bytes=10)
    for step in (1, 1, 2, 3, 4):
        file.put(step, str(step).encode() * 4)
    assert file.waiting == [3, 4]
    assert (file.take_lost(), file.take_lost()) == ([1, 1, 2], [])
    file.put(5, b"more than all that may wait")
    assert file.waiting == [5], "the newest stays"
    file.write()
    assert file.path.read_bytes() == b"more than all that may wait"


def test_a_file_that_somebody_emptied_gets_no_hole(tmp_path: Path) -> None:
    """As the samples of a run are, to make room."""
    file = appended(tmp_path)
    file.put(1, b"first\n")
    file.write()
    os.truncate(file.path, 0)
    file.put(2, b"second\n")
    file.write()
    assert file.path.read_bytes() == b"second\n"
    file.path.unlink()
    file.put(3, b"third\n")
    file.write()
    assert file.path.read_bytes() == b"third\n"


def test_what_another_process_left_of_a_piece_is_kept(tmp_path: Path) -> None:
    """A run that resumes cuts its files itself, by their lines."""
    (tmp_path / "file").write_bytes(b"earlier\n")
    file = AppendedFile(tmp_path / "file")
    file.put(1, b"new\n")
    file.write()
    assert file.path.read_bytes() == b"earlier\nnew\n"


def test_an_empty_piece_is_none(tmp_path: Path) -> None:
    file = appended(tmp_path)
    file.put(1, b"")
    assert file.waiting == []
    (tmp_path / "file").unlink()
    file.write()
    assert not (tmp_path / "file").exists()


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = appended(folder)
    shutil.rmtree(folder)
    file.put(1, b"x")
    with pytest.raises(FileNotFoundError):
        file.write()
    assert file.waiting == [1]
