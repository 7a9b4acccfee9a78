"""Tokenising many texts: in batches, compact in memory, and cached on disk for the next start."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# (title, total) -> a context whose value is called with the number of texts done since the last call
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
_BATCH = 512  # texts: enough for every core of the tokenizer's own threads
# texts; fewer are cached only if they have many tokens, which take about a second
_WORTH_KEEPING = 10_000
_WORTH_KEEPING_TOKENS = 2_000_000
_UNUSED_S = 30 * 24 * 3600.0  # after which an entry is removed
_KEY = b"megarl.tokens"


def no_bar(_title: str, _total: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda _: None)


@dataclass(frozen=True)
class Tokens:
    """N texts and their concatenated token ids: ids [tokens] int32, ends [N] int64."""

    texts: Sequence[str]
    ids: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def of(self, number: int) -> array[int]:
        """The token ids of text `number`."""
        start = self.ends[number - 1] if number else 0
        return array("i", self.ids[start : self.ends[number]].tobytes())


def tokenise(
    tokenizer: Any, texts: Iterable[str], *, special: bool, done: Callable[[int], object]
) -> Tokens:
    """Tokenise texts. special: add the tokenizer's special tokens. done: called with the size of each batch."""
    kept: list[str] = []
    ids = array("i")
    ends = array("q")
    texts_left = iter(texts)
    while batch := list(islice(texts_left, _BATCH)):
        encoded = tokenizer(batch, add_special_tokens=special, return_attention_mask=False)
        for text_ids in encoded["input_ids"]:
            ids.extend(text_ids)
            ends.append(len(ids))
        kept += batch
        done(len(batch))
    return Tokens(kept, np.frombuffer(ids, dtype=np.int32), np.frombuffer(ends, dtype=np.int64))


def cached_tokens(
    cache: TokenCache | None,
    tokenizer: Any,
    kind: str,
    sources: Sequence[Any],
    make: Callable[[], Tokens | None],
) -> Tokens | None:
    """The tokens of the sources, from the cache or else from `make`.

    kind: names how sources become texts. make returns None where the sources have faults; that is not cached.
    """
    if cache is None or not getattr(tokenizer, "is_fast", False):
        return make()
    key = _digest(tokenizer, kind, sources)
    if cached := cache.read(key, len(sources)):
        return cached
    tokens = make()
    if tokens and (len(tokens.texts) >= _WORTH_KEEPING or len(tokens.ids) >= _WORTH_KEEPING_TOKENS):
        cache.write(key, tokens)
    return tokens


def _digest(tokenizer: Any, kind: str, sources: Sequence[Any]) -> str:
    """A digest of the texts, the tokenizer, the chat template and the versions of the libraries."""
    import tokenizers
    import transformers

    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    settings = {
        "versions": [transformers.__version__, tokenizers.__version__],
        "kind": kind,
        "class": type(tokenizer).__name__,
        "special": tokenizer.special_tokens_map,
        "split_special": tokenizer.split_special_tokens,
        "template": template,
        # such a template writes the date
        "day": str(date.today()) if "strftime_now" in template else None,
    }
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    sha.update(tokenizer.backend_tokenizer.to_str().encode())
    for source in sources:
        if isinstance(source, str):
            text = source
        else:
            text = json.dumps(source, default=str)
        data = text.encode("utf-8", "surrogatepass")
        sha.update(f"{len(data)} {type(source).__name__} ".encode())
        sha.update(data)
    return sha.hexdigest()


class TokenCache:
    """Tokens on disk by key, in a folder of this user; damaged entries and those of other users are ignored.

    The files are parquet with checksums, no pickle, in a folder of mode 0700. Errors of the disk are ignored, because
    everything can be tokenised again.
    """

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        self._folder = folder
        self._writes = writes

    @classmethod
    def of_user(cls, *, writes: bool = True) -> TokenCache | None:
        """The cache in $XDG_CACHE_HOME/megarl, or ~/.cache/megarl; None where the user has no home."""
        cache_home = os.environ.get("XDG_CACHE_HOME", "")
        try:
            if os.path.isabs(cache_home):
                root = Path(cache_home)
            else:
                root = Path.home() / ".cache"
        except RuntimeError:
            return None
        return cls(root / "megarl" / "tokens", writes=writes)

    def read(self, key: str, count: int) -> Tokens | None:
        """The entry of `count` texts; None where there is none."""
        import pyarrow

        name = f"{key}.parquet"
        try:
            with _opened(self._folder) as folder:
                table = _read(folder, name)
                if (table.schema.metadata or {}).get(
                    _KEY
                ) != key.encode() or table.num_rows != count:
                    return None
                ids, ends = _flat(table.column("token_ids").combine_chunks())
                if len(ids) and ids.min() < 0:
                    return None
                with suppress(OSError):
                    os.utime(name, dir_fd=folder)  # it is in use
                return Tokens(table.column("text").to_pylist(), ids, ends)
        except (OSError, ValueError, KeyError, AttributeError, pyarrow.ArrowException):
            return None

    def write(self, key: str, tokens: Tokens) -> None:
        """Store an entry atomically, and remove entries that have not been used for long."""
        import pyarrow as pa

        if not self._writes:
            return
        starts = np.concatenate([[0], tokens.ends]).astype(np.int64)
        token_ids = pa.LargeListArray.from_arrays(
            pa.array(starts), pa.array(tokens.ids, pa.int32())
        )
        try:
            columns = {"text": pa.array(tokens.texts, pa.large_string()), "token_ids": token_ids}
            table = pa.table(columns).replace_schema_metadata({_KEY: key.encode()})
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(self._folder) as folder:
                _write(folder, f"{key}.parquet", table)
                _remove_unused(folder)
        except (OSError, ValueError, pa.ArrowException):
            return


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
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & (
        stat.S_IWGRP | stat.S_IWOTH
    ):
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
    return lists.flatten().to_numpy(), offsets[1:] - offsets[0]


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
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if time.time() - status.st_mtime > _UNUSED_S:
                    os.unlink(name, dir_fd=folder)
