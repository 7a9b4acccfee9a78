"""Writing files, with errors that a user can act on.

`writing` turns an error of the file system into a UserError that names the folder, the file and the reason;
`output_error` finds out before long work whether its result could be written; `take_lock` locks a folder's file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megarl.types import FolderGone, UserError

PARTIAL = ".partial-"  # in the hidden name of a folder that is not complete yet
_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "the disk quota is used up"}
_GONE = (errno.ENOENT, errno.ESTALE)
_OTHERS = (
    errno.EACCES,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
# with less free space, an error without an errno from a library is taken for a full disk
_FULL_BYTES = 2**16


@contextmanager
def writing(folder: Path, what: str, where: str = "run.dir") -> Iterator[None]:
    """Turn an error of the file system inside the block into a UserError that names the folder and the file.

    what: the file or the kind of file that is written. where: the recipe key or option that names the disk. Raises
    UserError; FolderGone when the folder does not exist.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as raised:
        error = _error(raised, folder, what, where)
        if error is None:
            raise
        raise error from raised


def take_lock(file: IO[Any], folder: Path, where: str) -> bool:
    """Lock an open file of the folder until it is closed; False: another process, or another open file, has locked it.

    where: as of `writing`. Raises UserError where the file system has no locks, as Lustre has none without an option;
    then the file is removed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        Path(file.name).unlink(missing_ok=True)
        raise UserError(
            where,
            f"files in {folder} cannot be locked ({error.strerror})",
            "mount it with locks (Lustre: -o flock), or name a folder on another disk",
        ) from None
    return True


def existing_folder(path: Path) -> Path:
    """The path, or the innermost folder around it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder: /proc and full file systems refuse what the folder's mode allows."""
    try:
        with tempfile.TemporaryFile(dir=folder):  # without a name where the file system can
            return True
    except OSError:
        return False


def output_error(
    path: Path, where: str, *, kind: str = "file", replaces: bool = False
) -> UserError | None:
    """Why a command that works for a while could not write its result to `path` at the end, or None.

    where: the option that names the path. kind: file or folder. replaces: a regular file that is there is overwritten.
    """
    folder = path.absolute().parent
    hint = f"name another {kind}"
    where = f"{where} {path}".strip()
    try:
        os.lstat(path)  # also of a symbolic link that leads nowhere
        is_there = True
    except (FileNotFoundError, NotADirectoryError):
        is_there = False
    except (OSError, ValueError) as error:  # a name that is too long; a NUL character
        return UserError(
            where,
            f"no {kind} can have this name ({getattr(error, 'strerror', None) or error})",
            hint,
        )
    if is_there and not replaces:
        return UserError(where, "it is there already", hint)
    if is_there and not path.is_file():
        return UserError(
            where, "it is a folder" if path.is_dir() else "it is not a regular file", hint
        )
    if is_there and not os.access(path, os.W_OK):
        return UserError(where, "it cannot be overwritten", hint)
    if not folder.is_dir():
        return UserError(where, f"{folder} is not a folder", f"make it, or {hint}")
    if not is_writable(folder):
        return UserError(where, f"{folder} is not a folder to write to", hint)
    return None


def folder_gone(folder: Path, what: str) -> FolderGone:
    """The error of a folder that was removed, or replaced by another."""
    return FolderGone(
        str(folder),
        f"the folder was removed or replaced while the run wrote {what}",
        "what it held is lost, so start the run again",
    )


def visible_folder(folder: Path) -> Path:
    """The nearest folder that is not part of a hidden checkpoint folder: `checkpoints`, or the folder itself."""
    hidden = [path for path in (folder, *folder.parents) if PARTIAL in path.name]
    return hidden[0].parent if hidden else folder


def _error(error: BaseException, folder: Path, what: str, where: str) -> UserError | None:
    """The UserError that replaces an error; None for an error that has nothing to do with the file system."""
    cause = _system_error(error)
    if not folder.is_dir() and (cause is None or cause.errno in _GONE):
        return folder_gone(folder, what)
    if cause is None and shutil.disk_usage(folder).free >= _FULL_BYTES:
        return None
    number = errno.ENOSPC if cause is None else cause.errno
    if number in _FULL:
        return UserError(
            where,
            f"{_FULL[number]} in {folder} while writing {what}",
            "make room there, or name a folder on another disk",
        )
    reason = cause.strerror if cause else ""
    return UserError(
        where,
        f"{what} cannot be written in {folder} ({reason})",
        "correct that, or name another folder",
    )


def _system_error(error: BaseException | None) -> OSError | None:
    """The first error of the file system in a chain of exceptions, without contexts that `from None` suppresses."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in (*_FULL, *_GONE, *_OTHERS):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
