"""Writing files, with errors that a user can act on, on disks that may be full or broken, or do not answer.

`writing` turns an error of the file system into a UserError that names the folder, the file and the reason;
`output_error` finds out before long work whether its result could be written; `take_lock` locks a folder's file.
`begin` and `while_answering` work on a disk in a thread of their own: a disk that does not answer (a network file
system whose server is gone) holds whoever has asked it, for ever, and `DiskPulse` notices.
"""

from __future__ import annotations

import concurrent.futures
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any, TypeVar

from megarl.types import DiskFault, FolderGone, Silence, UserError

_Result = TypeVar("_Result")

PARTIAL = ".partial-"  # in the hidden name of a folder that is not complete yet
_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "the disk quota is used up"}
_GONE = (errno.ENOENT, errno.ESTALE)
_OTHERS = (
    errno.EACCES,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ENODEV,
    errno.ENOTCONN,  # a file system whose program has died
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EPERM,
    errno.EREMOTEIO,
    errno.EROFS,
    errno.ETIMEDOUT,
)
# with less free space, an error without an errno from a library is taken for a full disk
_FULL_BYTES = 2**16
# between two looks at most so much time counts as silence: the process itself may have been stopped
_LONGEST_LOOK_S = 2.0
_open_calls: set[Future[Any]] = set()


@contextmanager
def writing(folder: Path, what: str, where: str = "run.dir") -> Iterator[None]:
    """Turn an error of the file system inside the block into a UserError that names the folder and the file.

    what: the file or the kind of file that is written. where: the recipe key or option that names the disk. Raises
    DiskFault; FolderGone when the folder does not exist.
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


def is_locked(file: Path) -> bool:
    """Whether a process has locked the file with `take_lock`, as far as this machine knows. Raises OSError."""
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def begin(function: Callable[[], _Result]) -> Future[_Result]:
    """Call a function in a thread of its own, which does not keep the process from ending as those of a pool do."""
    call: Future[_Result] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            call.set_exception(error)
        else:
            call.set_result(result)

    _open_calls.add(call)
    call.add_done_callback(_open_calls.discard)
    Thread(target=run, name="disk", daemon=True).start()
    return call


def has_ended(call: Future[Any], patience_s: float) -> bool:
    """Whether a function of `begin` has returned or raised, after at most patience_s."""
    return bool(concurrent.futures.wait([call], timeout=patience_s).done)


def has_open_calls() -> bool:
    """Whether a function of `begin` has not returned: it may wait for a disk that does not answer."""
    return bool(_open_calls)


def while_answering(
    function: Callable[[], _Result], folder: Path, what: str, timeout_s: float
) -> _Result:
    """The result of a function that writes `what` in a folder, for as long as it takes while the disk answers.

    Raises what the function raises, and Silence where the disk has not answered for timeout_s: then the function still
    waits for the disk.
    """
    call = begin(function)
    pulse = DiskPulse(folder, timeout_s)
    while not has_ended(call, pulse.period_s):
        pulse.check(what)
    return call.result()


class DiskPulse:
    """Asks the disk of a folder for a sign of life, and counts for how long it has not answered.

    The question is a file of one byte that is written through to the disk, in a thread of its own. An error is an
    answer. What counts is the time in which this process was running.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        """timeout_s: the silence to detect. `check` is to be called every period_s, in seconds."""
        self._folder = folder
        self._timeout_s = timeout_s
        self.period_s = max(0.05, min(1.0, timeout_s / 10))
        self._between_s = min(5.0, timeout_s / 10)
        self._asked_at = self._looked_at = time.monotonic()
        self._silent_s = 0.0
        self._answer = begin(self._ask)

    def check(self, what: str) -> None:
        """Raises Silence where the disk has not answered for timeout_s; what: is waited for meanwhile."""
        now = time.monotonic()
        if not self._answer.done():
            self._silent_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        else:
            self._silent_s = 0.0
            if now - self._asked_at >= self._between_s:
                self._asked_at = now
                self._answer = begin(self._ask)
        self._looked_at = now
        if self._silent_s >= self._timeout_s:
            raise Silence(
                f"the disk of {self._folder} has not answered for {self._silent_s:.0f} s while {what} was written"
            )

    def _ask(self) -> None:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())


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
    """The UserError that replaces an error; None for an error that has nothing to do with the file system.

    The disk is asked about an error of the system and of a library that hides it, which is a RuntimeError, and about no
    other: it may not answer.
    """
    cause = _system_error(error)
    if cause is None and not isinstance(error, RuntimeError):
        return None
    if (cause is None or cause.errno in _GONE) and _is_gone(folder):
        return folder_gone(folder, what)
    if cause is None and shutil.disk_usage(folder).free >= _FULL_BYTES:
        return None
    number = errno.ENOSPC if cause is None else cause.errno
    if number in _FULL:
        return DiskFault(
            where,
            f"{_FULL[number]} in {folder} while writing {what}",
            "make room there, or name a folder on another disk",
        )
    reason = cause.strerror if cause else ""
    return DiskFault(
        where,
        f"{what} cannot be written in {folder} ({reason})",
        "correct that, or name another folder",
    )


def _is_gone(folder: Path) -> bool:
    """Whether there is no such folder; False where its disk cannot tell."""
    try:
        return not folder.is_dir()
    except OSError:
        return False


def _system_error(error: BaseException | None) -> OSError | None:
    """The first error of the file system in a chain of exceptions, without contexts that `from None` suppresses."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in (*_FULL, *_GONE, *_OTHERS):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
