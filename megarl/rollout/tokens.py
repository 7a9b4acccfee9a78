"""Tokenising many texts: in batches, compact in memory, and cached on disk for the next start."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.rollout.token_cache import TokenCache

# (title, total) -> a context whose value is called with the number of texts done since the last call
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
_BATCH = 512  # texts: enough for every core of the tokenizer's own threads
_WORTH_KEEPING = 10_000  # texts; fewer are cached only if they have many tokens, which take about a second
_WORTH_KEEPING_TOKENS = 2_000_000


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
        found = array("i")
        found.frombytes(self.ids[self.ends[number - 1] if number else 0 : self.ends[number]].tobytes())
        return found


def tokenise(tokenizer: Any, texts: Iterable[str], *, special: bool, done: Callable[[int], object]) -> Tokens:
    """Tokenise texts. special: add the tokenizer's special tokens. done: called with the size of each batch."""
    kept: list[str] = []
    ids, ends, batch = array("i"), array("q"), []

    def flush() -> None:
        for found in tokenizer(batch, add_special_tokens=special, return_attention_mask=False)["input_ids"]:
            ids.extend(found)
            ends.append(len(ids))
        kept.extend(batch)
        done(len(batch))
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            flush()
    if batch:
        flush()
    return Tokens(kept, np.frombuffer(ids, dtype=np.int32), np.frombuffer(ends, dtype=np.int64))


def cached_tokens(
    cache: TokenCache | None, tokenizer: Any, kind: str, sources: Sequence[Any], make: Callable[[], Tokens | None]
) -> Tokens | None:
    """The tokens of the sources, from the cache or else from `make`.

    kind: names how sources become texts. make returns None where the sources have faults; that is not cached.
    """
    if cache is None or not getattr(tokenizer, "is_fast", False):
        return make()
    key = _digest(tokenizer, kind, sources)
    found = cache.read(key, len(sources))
    if found is not None:
        return Tokens(*found)
    made = make()
    if made and (len(made.texts) >= _WORTH_KEEPING or len(made.ids) >= _WORTH_KEEPING_TOKENS):
        cache.write(key, made.texts, made.ids, made.ends)
    return made


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
        "day": str(date.today()) if "strftime_now" in template else None,  # such a template writes the date
    }
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    sha.update(tokenizer.backend_tokenizer.to_str().encode())
    for source in sources:
        text = source if isinstance(source, str) else json.dumps(source, default=str)
        data = text.encode("utf-8", "surrogatepass")
        sha.update(f"{len(data)} {type(source).__name__} ".encode())
        sha.update(data)
    return sha.hexdigest()
