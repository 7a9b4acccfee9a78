"""A run's checkpoints on disk: whole or not there, proven by checksums before one is gone on from.

`checkpoints/step-000020` has the training ranks' files, `run.json` (what the controller goes on from) and
`manifest.json`, the size and SHA-256 of every other file. A folder is written under a hidden name and renamed when all
of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST, RUN = "manifest.json", "run.json"
_CHUNK_BYTES = 8 * 2**20
_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial-"
_FORMAT = 1


@dataclass(frozen=True)
class Digest:
    """A file's bytes, in two numbers."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that verified; run: what the controller stored."""

    folder: Path
    step: int
    run: Mapping[str, Any]


def digest(file: Path) -> Digest:
    """Read a file whole. Raises OSError."""
    sha, num_bytes = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            sha.update(chunk)
            num_bytes += len(chunk)
    return Digest(num_bytes, sha.hexdigest())


def digests(folder: Path, names: Iterable[str]) -> dict[str, Digest]:
    """Of files in a folder; as many are read side by side as the disk has patience for."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(names, pool.map(lambda name: digest(folder / name), names), strict=True))


class Snapshots:
    """The checkpoints of one run. say: tells the user in a line what was passed over and why."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self._say = folder, say

    def begin(self, step: int) -> Path:
        """A new hidden folder for the files of a checkpoint; what an earlier process left half-written is removed."""
        self.folder.mkdir(exist_ok=True)  # in the run's folder, which is not made anew where somebody removed it
        for left in self._partials():
            self._say(f"checkpoint {left} was never completed and is removed")
        self._remove_partials()
        partial = self.folder / f".step-{step:06d}{_PARTIAL}{secrets.token_hex(4)}"
        partial.mkdir()
        return partial

    def commit(self, partial: Path, run: Mapping[str, Any], known: Mapping[str, Digest], keep: int) -> Path:
        """Complete a folder that `begin` made and every rank has filled; it and at most `keep` - 1 earlier ones stay.

        known: digests that the ranks took of files of theirs. One of the same step that is there is replaced.
        """
        _write(partial / RUN, json.dumps(run))
        names = [name for name in _files(partial) if name not in known]
        found = {**known, **digests(partial, names)}
        manifest = {"format": _FORMAT, "files": {name: asdict(found[name]) for name in sorted(found)}}
        _write(partial / MANIFEST, json.dumps(manifest, indent=1))
        for path in {partial / name for name in found} | {(partial / name).parent for name in found} | {partial}:
            _sync(path)
        final = self.folder / partial.name[1:].partition(_PARTIAL)[0]
        if final.exists():  # under a hidden name until the new one has its place
            final.rename(self.folder / f".{final.name}{_PARTIAL}{secrets.token_hex(4)}")
        partial.rename(final)
        _sync(self.folder)
        self._remove_partials()
        folders = self._complete()
        later = folders[: folders.index(final)]  # of a future that the run did not go on from
        for old in [*later, *folders[len(later) + keep :]]:
            shutil.rmtree(old)
        return final

    def abandon(self, partial: Path) -> None:
        """Give the room of a folder that will not be completed back to the disk."""
        shutil.rmtree(partial, ignore_errors=True)

    def newest(self, step: int | None = None) -> Snapshot | None:
        """The last checkpoint whose every byte is what was written, or that of `step`; None where there is none."""
        for folder in self._complete():
            if step not in (None, _step(folder)):
                continue
            try:
                fault = _fault(folder)
            except OSError as error:
                fault = f"it cannot be read ({error})"
            if fault is None:
                run = json.loads((folder / RUN).read_text(encoding="utf-8"))
                return Snapshot(folder, _step(folder), run)
            self._say(f"checkpoint {folder} is damaged and passed over: {fault}")
        return None

    def _complete(self) -> list[Path]:
        """Renamed folders, the newest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((one for one in found if one.is_dir() and _NAME.fullmatch(one.name)), key=_step, reverse=True)

    def _partials(self) -> list[Path]:
        return [one for one in self.folder.iterdir() if _PARTIAL in one.name]

    def _remove_partials(self) -> None:
        for one in self._partials():
            shutil.rmtree(one)


def home(folder: Path) -> Path:
    """Where the checkpoint will be that is written in a hidden folder, or in a folder of that."""
    hidden = [one for one in (folder, *folder.parents) if _PARTIAL in one.name]
    return hidden[0].parent if hidden else folder


def _step(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def _files(folder: Path) -> list[str]:
    return [str(one.relative_to(folder)) for one in sorted(folder.rglob("*")) if one.is_file() and one.name != MANIFEST]


def _fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        wanted = {name: Digest(**one) for name, one in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if manifest.get("format") != _FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')}, this version reads {_FORMAT}"
    there = set(_files(folder))
    if RUN not in wanted or there != set(wanted):
        odd = sorted(there ^ set(wanted)) or [RUN]
        return f"its files are not those of {MANIFEST}: {', '.join(odd[:3])}"
    for name, one in wanted.items():
        size = (folder / name).stat().st_size
        if size != one.num_bytes:
            return f"{name} has {size} bytes, {one.num_bytes} were written"
    wrong = [name for name, one in digests(folder, wanted).items() if one != wanted[name]]
    return f"{wrong[0]} has other bytes than were written" if wrong else None


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """What is in a file, or in a folder under which names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
