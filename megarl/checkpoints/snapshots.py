"""A run's checkpoints on disk: complete or absent, and verified by checksums before a run resumes from one.

`checkpoints/step-000020` has the training ranks' files, `run.json` (the controller's state) and `manifest.json`: the
step, and the size and SHA-256 of every other file. A folder is written under a hidden name and renamed when all of it
is on the disk. The manifest says of which step a checkpoint is, also where somebody has renamed its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.disk import PARTIAL
from megarl.printable import Say

MANIFEST = "manifest.json"
RUN = "run.json"
_NAME = re.compile(r"step-([0-9]{6,})")
_FORMAT = 1


@dataclass(frozen=True)
class Digest:
    """The size and the checksum of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """A verified checkpoint; run: the controller's state, as `commit` stored it."""

    folder: Path
    step: int
    run: Mapping[str, Any]


class _Damaged(Exception):
    """A checkpoint is not complete, or a checksum does not hold; the text is a description of what is wrong."""


def digest(file: Path) -> Digest:
    """The digest of a whole file. Raises OSError."""
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return Digest(stream.tell(), sha256)


def digests(folder: Path, names: Iterable[str]) -> dict[str, Digest]:
    """Name -> digest of files in a folder, eight of which are read at a time."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(names, pool.map(lambda name: digest(folder / name), names), strict=True))


class Snapshots:
    """The checkpoints of one run. say: prints a line for the user when a checkpoint is skipped or removed."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder = folder
        self._say = say

    def begin(self, step: int) -> Path:
        """A new hidden folder for the files of a checkpoint; incomplete ones of earlier processes are removed."""
        # without parents: the run's folder is not made again if somebody removed it
        self.folder.mkdir(exist_ok=True)
        for left in self._partials():
            try:
                _remove(left)
            except OSError as error:
                self._say(
                    f"checkpoint {left} is not complete and cannot be removed ({error.strerror})"
                )
            else:
                self._say(f"checkpoint {left} is not complete and is removed")
        partial = self._hidden(self.folder / _name(step))
        partial.mkdir()
        return partial

    def commit(
        self, partial: Path, run: Mapping[str, Any], known: Mapping[str, Digest], keep: int
    ) -> Path:
        """Complete a folder that `begin` made and every rank has filled, and keep at most `keep` - 1 earlier ones.

        run: the controller's state. known: digests that the ranks computed of their own files. An existing checkpoint
        of the same step is replaced.
        """
        (partial / RUN).write_text(json.dumps(run), encoding="utf-8")
        names = [name for name in _files(partial) if name not in known]
        digests_by_name = {**known, **digests(partial, names)}
        final = self.folder / partial.name[1:].partition(PARTIAL)[0]
        named = {name: asdict(digests_by_name[name]) for name in sorted(digests_by_name)}
        manifest = {"format": _FORMAT, "step": _named_step(final), "files": named}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        files = {partial / name for name in (*digests_by_name, MANIFEST)}
        for path in files | {file.parent for file in files}:
            _sync(path)
        self._put_in_place(partial, final)
        try:
            self._remove_old(final, keep)
        except OSError as error:
            self._say(f"an old checkpoint in {self.folder} is not removed ({error.strerror})")
        return final

    def abandon(self, partial: Path) -> None:
        """Remove a folder that will not be completed."""
        shutil.rmtree(partial, ignore_errors=True)

    def _put_in_place(self, partial: Path, final: Path) -> None:
        """Give a complete folder its name; one that has it is kept under a hidden name until then."""
        hidden = None
        if os.path.lexists(final):
            hidden = final.rename(self._hidden(final))
        try:
            partial.rename(final)
        except OSError:
            if hidden:
                hidden.rename(final)
            raise
        _sync(self.folder)

    def _remove_old(self, final: Path, keep: int) -> None:
        """Remove what is not complete, what is of later steps, and all but the last `keep`. Raises OSError."""
        folders = [folder for _, folder in self._complete()]
        later = folders[: folders.index(final)]  # of steps after the one that the run resumed from
        for old in [*later, *folders[len(later) + keep :]]:
            # a folder that is removed in part has no name of a complete one
            old.rename(self._hidden(old))
        for left in self._partials():
            _remove(left)

    def _hidden(self, folder: Path) -> Path:
        """A hidden name for a folder, as incomplete ones have."""
        return self.folder / f".{folder.name}{PARTIAL}{secrets.token_hex(4)}"

    def newest(self, step: int | None = None) -> Snapshot | None:
        """The newest checkpoint whose checksums hold, or that of `step`; None where there is none."""
        for its_step, folder in self._complete():
            if step not in (None, its_step):
                continue
            try:
                snapshot = _verified(folder)
            except (_Damaged, OSError) as error:
                if isinstance(error, OSError):
                    problem = f"it cannot be read ({error})"
                else:
                    problem = error
                self._say(f"checkpoint {folder} is damaged and skipped: {problem}")
                continue
            if _named_step(folder) != snapshot.step:
                self._say(f"checkpoint {folder} is of step {snapshot.step}, as its {MANIFEST} says")
            return snapshot
        return None

    def _complete(self) -> list[tuple[int, Path]]:
        """(step, path) of everything that has the name of a complete checkpoint, the newest first."""
        if self.folder.is_dir():
            paths = self.folder.iterdir()
        else:
            paths = ()
        named = [(_step(path), path) for path in paths if _NAME.fullmatch(path.name)]
        # Of two folders of one step the one that still has its name is the newer one.
        return sorted(
            named, key=lambda pair: (pair[0], pair[1].name == _name(pair[0])), reverse=True
        )

    def _partials(self) -> list[Path]:
        return [
            path
            for path in self.folder.iterdir()
            if path.name.startswith(".step-") and PARTIAL in path.name
        ]


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _named_step(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def _step(folder: Path) -> int:
    """The step by the manifest; by the state in a checkpoint of an older version, by the name in a damaged one."""
    for name in (MANIFEST, RUN):
        with suppress(OSError, ValueError, AttributeError):
            step = _json(folder / name).get("step")
            if type(step) is int and step >= 0:
                return step
    return _named_step(folder)


def _json(file: Path) -> Any:
    """The content of a JSON file. Raises OSError, or ValueError for anything that is none."""
    if not file.is_file():  # a pipe would never end
        raise OSError(f"{file.name} is no file")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _remove(path: Path) -> None:
    """Remove a folder with its content; of a symbolic link, or a file in a folder's place, only itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _files(folder: Path) -> list[str]:
    paths = sorted(folder.rglob("*"))
    return [
        str(path.relative_to(folder)) for path in paths if path.is_file() and path.name != MANIFEST
    ]


def _verified(folder: Path) -> Snapshot:
    """The checkpoint in a folder. Raises _Damaged where it is not complete or a checksum does not hold; OSError."""
    if not folder.is_dir():
        raise _Damaged("it is not a folder")
    _check_files(folder)
    try:
        run = _json(folder / RUN)
    except ValueError as error:
        raise _Damaged(f"{RUN} is not JSON ({error})") from error
    if not isinstance(run, dict):
        raise _Damaged(f"{RUN} is not an object of JSON")
    return Snapshot(folder, _step(folder), run)


def _check_files(folder: Path) -> None:
    """Raises _Damaged where the files of a checkpoint are not those of its manifest, byte by byte; OSError."""
    try:
        manifest = _json(folder / MANIFEST)
        expected_by_name = {name: Digest(**fields) for name, fields in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _Damaged(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    if manifest.get("format") != _FORMAT:
        raise _Damaged(
            f"{MANIFEST} has format {manifest.get('format')}, this version reads {_FORMAT}"
        )
    present = set(_files(folder))
    if RUN not in expected_by_name or present != set(expected_by_name):
        odd = sorted(present ^ set(expected_by_name)) or [RUN]
        raise _Damaged(f"its files are not those of {MANIFEST}: {', '.join(odd[:3])}")
    for name, expected in expected_by_name.items():
        size = (folder / name).stat().st_size
        if size != expected.num_bytes:
            raise _Damaged(f"{name} has {size} bytes, {expected.num_bytes} were written")
    for name, file_digest in digests(folder, expected_by_name).items():
        if file_digest != expected_by_name[name]:
            raise _Damaged(f"{name} has other bytes than were written")


def _sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
