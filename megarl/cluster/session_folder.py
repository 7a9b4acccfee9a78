"""A folder in /tmp that only this user can enter, for the files of one session; dead sessions are removed. Linux."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

# of a Ray session's folder; not TMPDIR: a Unix socket's path has at most 107 bytes
SESSION_PREFIX = "megarl-"
SESSION_PARENT = "/tmp"
_LOCK = "megarl.lock"
_ATTEMPTS = 10  # another start can take a folder for a dead one before it is locked
_SUFFIX = "[a-z0-9_]{8}"  # what tempfile appends to a prefix


class SessionFolder:
    """A new folder of mode 0700, locked until this process removes it or ends.

    The kernel releases the lock (flock) however the process ends, so `remove_dead` tells dead sessions from live ones.
    """

    def __init__(self, prefix: str, parent: str) -> None:
        """Raises OSError when no folder can be made in the parent folder, or no file can be locked there."""
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = _locked(self.path, os.O_CREAT)
            if self._lock >= 0:
                return
        raise OSError(f"no file can be locked in {parent}")

    def remove(self) -> None:
        """Remove the folder with everything in it; harmless when repeated."""
        if self._lock >= 0:
            _remove(self.path)
            os.close(self._lock)
            self._lock = -1


def remove_dead(prefix: str, parent: str) -> int:
    """Remove this user's folders whose process has ended; returns how many.

    A folder without our lock file, of another user, or behind a symbolic link stays.
    """
    num_removed = 0
    for path in Path(parent).glob(f"{prefix}*"):
        if not re.fullmatch(re.escape(prefix) + _SUFFIX, path.name) or not _is_private(path):
            continue
        lock = _locked(path, 0)
        if lock >= 0:
            _remove(path)
            os.close(lock)
            num_removed += 1
    return num_removed


def _remove(folder: Path) -> None:
    """Remove the folder, its lock file last: whoever is killed in between leaves a folder that `remove_dead` knows.

    What a process that still lives writes into it meanwhile keeps the folder, with its lock file, for the next start.
    """
    lock = folder / _LOCK
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path != lock:
                path.unlink(missing_ok=True)
    with suppress(OSError):
        if [*folder.iterdir()] == [lock]:
            lock.unlink()
            folder.rmdir()


def _is_private(path: Path) -> bool:
    """Whether the path is a folder, not a link, that belongs to this user and that no other user can enter."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        return (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.geteuid()
            and stat.S_IMODE(status.st_mode) == 0o700
        )
    return False


def _locked(folder: Path, flags: int) -> int:
    """A descriptor that holds the folder's lock, or -1: another process holds it, or the folder is not a session's.

    Another process may take a folder for dead and remove it between its creation and its locking.
    """
    path = folder / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return -1
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.lstat()):
            return lock
    os.close(lock)
    return -1
