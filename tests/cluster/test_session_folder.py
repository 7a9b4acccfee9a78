"""Folders of sessions: closed to others, told apart from dead ones, and never somebody else's to remove."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarl.cluster.session_folder import SessionFolder, remove_dead

_KILLED = """
import os, signal, sys
from megarl.cluster.session_folder import SessionFolder
folder = SessionFolder("s-", sys.argv[1])
(folder.path / "ray").mkdir()
print(folder.path)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""

# by its last action before the lock file's
_KILLED_WHILE_REMOVING = """
import os, shutil, signal, sys
from megarl.cluster.session_folder import SessionFolder
folder = SessionFolder("s-", sys.argv[1])
(folder.path / "a file").touch()
(folder.path / "ray").mkdir()
print(folder.path)
sys.stdout.flush()
removed = os.unlink
def unlink(path, *args, **kwargs):
    if not str(path).endswith("megarl.lock"):
        return removed(path, *args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
os.unlink = unlink
folder.remove()
"""


@pytest.fixture(autouse=True)
def generous_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def killed(parent: Path) -> Path:
    """The folder of a process that was killed."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(parent)], capture_output=True, text=True, timeout=60
    )
    return Path(done.stdout.strip())


def test_nobody_else_can_enter_it_and_nothing_is_left(tmp_path: Path) -> None:
    folder = SessionFolder("s-", str(tmp_path))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_dead_are_removed_and_the_living_stay(tmp_path: Path) -> None:
    living, dead = SessionFolder("s-", str(tmp_path)), [killed(tmp_path) for _ in range(2)]
    assert all(path.is_dir() for path in dead)
    assert remove_dead("s-", str(tmp_path)) == 2
    assert list(tmp_path.iterdir()) == [living.path]
    living.remove()


@pytest.mark.skipif(os.geteuid() == 0, reason="root removes from a folder that nobody may write to")
def test_what_cannot_be_removed_now_is_removed_by_a_later_start(tmp_path: Path) -> None:
    folder = SessionFolder("s-", str(tmp_path))
    kept = folder.path / "ray"
    kept.mkdir()
    (kept / "file").touch()
    kept.chmod(0o500)
    folder.remove()
    assert kept.is_dir()
    kept.chmod(0o700)
    assert remove_dead("s-", str(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_killed_while_it_removes_its_folder_leaves_a_dead_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_WHILE_REMOVING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    path = Path(done.stdout.strip())
    assert path.is_dir() and not (path / "a file").exists()
    assert remove_dead("s-", str(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "how", ["no lock", "a link", "another mode", "another name", "a lock that is a link"]
)
def test_what_is_not_a_dead_session_of_this_user_stays(tmp_path: Path, how: str) -> None:
    room, elsewhere = tmp_path / "room", tmp_path / "elsewhere"
    room.mkdir()
    elsewhere.mkdir()
    path = killed(room)
    if how == "no lock":
        (path / "megarl.lock").unlink()
    elif how == "a link":
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    elif how == "another mode":
        path.chmod(0o777)
    elif how == "another name":
        path = path.rename(room / "s-mine")
    else:
        (path / "megarl.lock").unlink()
        (path / "megarl.lock").symlink_to(elsewhere / "megarl.lock")
        (elsewhere / "megarl.lock").touch()
    assert remove_dead("s-", str(room)) == 0
    assert (path / "ray").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_session_stays(tmp_path: Path) -> None:
    path = killed(tmp_path)
    os.chown(path, 4711, 4711)
    assert remove_dead("s-", str(tmp_path)) == 0
    assert path.is_dir()


def test_starts_at_once_do_not_take_each_other_for_dead(tmp_path: Path) -> None:
    def start(_: int) -> SessionFolder:
        remove_dead("s-", str(tmp_path))
        return SessionFolder("s-", str(tmp_path))

    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(start, range(200)))
    assert {folder.path for folder in folders} == {*tmp_path.iterdir()}
    for folder in folders:
        folder.remove()
