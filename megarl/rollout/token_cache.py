"""A cache of token ids on disk, in a folder of this user; damaged entries and those of other users are ignored."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_UNUSED_S = 30 * 24 * 3600.0  # after which an entry is removed
_KEY = b"megarl.tokens"


class TokenCache:
    """Entries by key: N texts, ids [tokens] int32, ends [N] int64. Parquet with checksums, no pickle; mode 0700.

    Errors of the disk are ignored, because everything can be tokenised again.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self._folder, self._writes = folder, writes

    @classmethod
    def of_user(cls, *, writes: bool = True) -> TokenCache | None:
        """The cache in $XDG_CACHE_HOME/megarl, or ~/.cache/megarl; None where the user has no home."""
        given = os.environ.get("XDG_CACHE_HOME", "")
        try:
            root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        except RuntimeError:
            return None
        return cls(root / "megarl" / "tokens", writes=writes)

    def read(self, key: str, count: int) -> tuple[list[str], npt.NDArray[Any], npt.NDArray[Any]] | None:
        """The entry of `count` texts as (texts, ids, ends); None where there is none."""
        import pyarrow

        try:
            with _opened(self._folder) as folder:
                table = _read(folder, _name(key))
                if (table.schema.metadata or {}).get(_KEY) != key.encode() or table.num_rows != count:
                    return None
                ids, ends = _flat(table.column("token_ids").combine_chunks())
                if len(ids) and ids.min() < 0:
                    return None
                with suppress(OSError):
                    os.utime(_name(key), dir_fd=folder)  # it is in use
                return table.column("text").to_pylist(), ids, ends
        except (OSError, ValueError, KeyError, AttributeError, pyarrow.ArrowException):
            return None

    def write(self, key: str, texts: Sequence[str], ids: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Store an entry atomically, and remove entries that have not been used for long."""
        import pyarrow as pa

        if not self._writes:
            return
        starts = np.concatenate([[0], ends]).astype(np.int64)
        token_ids = pa.LargeListArray.from_arrays(pa.array(starts), pa.array(ids, pa.int32()))
        try:
            columns = {"text": pa.array(texts, pa.large_string()), "token_ids": token_ids}
            table = pa.table(columns).replace_schema_metadata({_KEY: key.encode()})
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(self._folder) as folder:
                _write(folder, _name(key), table)
                _remove_unused(folder)
        except (OSError, ValueError, pa.ArrowException):
            return


def _name(key: str) -> str:
    return f"{key}.parquet"


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The folder's descriptor. Raises OSError unless the folder belongs to this user and no other user may write."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _refuse_foreign(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_foreign(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("it is not this user's alone")


def _read(folder: int, name: str) -> Any:
    import pyarrow.parquet

    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        _refuse_foreign(file.fileno())
        return pyarrow.parquet.ParquetFile(file, page_checksum_verification=True).read()


def _flat(lists: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(ids, ends) of an arrow array of lists. Raises ValueError for an unexpected type."""
    import pyarrow

    if lists.type != pyarrow.large_list(pyarrow.int32()) or lists.null_count:
        raise ValueError(lists.type)
    offsets = lists.offsets.to_numpy()
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    return lists.values.to_numpy()[first:last], offsets[1:] - first


def _write(folder: int, name: str, table: Any) -> None:
    import pyarrow.parquet

    partial = f".{name}.{os.getpid()}.partial"
    with suppress(FileNotFoundError):
        os.unlink(partial, dir_fd=folder)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(partial, flags, 0o600, dir_fd=folder), "wb") as file:
            pyarrow.parquet.write_table(table, file, compression="zstd", write_page_checksum=True)
        os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # also Ctrl-C
        with suppress(OSError):
            os.unlink(partial, dir_fd=folder)
        raise


def _remove_unused(folder: int) -> None:
    for name in os.listdir(folder):
        with suppress(OSError):
            if name.endswith((".parquet", ".partial")):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if time.time() - found.st_mtime > _UNUSED_S:
                    os.unlink(name, dir_fd=folder)
