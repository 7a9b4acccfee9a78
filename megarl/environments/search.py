"""Search in a collection of documents by BM25 (Robertson and Zaragoza, 2009), with the library bm25s."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from megarl.types import UserError

_MOST_CHARACTERS = 2000  # of a document that is shown
_NO_MATCH = "No document matches."


def search(query: str, *, corpus: str, num_results: int = 3) -> str:
    """Search a collection of documents and return those that match best.

    Args:
        query: a few words that the documents contain
    """
    retriever, offsets = _index(corpus)
    # lists of words, one a query
    tokens: Any = bm25s.tokenize([query], show_progress=False, return_ids=False)
    if not tokens[0]:
        return _NO_MATCH
    best = _best(retriever.get_scores(tokens[0]), num_results)
    with open(corpus, "rb") as file:
        texts = [_document(file, int(offsets[place])) for place in best]
    shown = [f"[{rank}] {text[:_MOST_CHARACTERS]}" for rank, text in enumerate(texts, 1)]
    return "\n\n".join(shown) or _NO_MATCH


def _best(scores: Any, count: int) -> list[int]:
    """The places of the highest scores above 0, the best first, of equal ones the first first.

    Few documents of a large collection have a word of the query: sorting all of them takes a hundred times as long.
    """
    above = np.flatnonzero(scores > 0)
    if len(above) > count:
        least = np.partition(scores[above], -count)[-count]
        above = above[scores[above] >= least]
    return above[np.argsort(-scores[above], kind="stable")][:count].tolist()


def _prepare(*, corpus: str, **_: object) -> None:
    """Make the index if it is not there, and map it."""
    if not Path(corpus).is_file():
        raise UserError(
            "episode.arguments",
            f"corpus: there is no file {corpus}",
            "name a JSONL file of documents",
        )
    _index(corpus)


search.prepare = _prepare  # type: ignore[attr-defined]


@lru_cache(maxsize=4)
def _index(corpus: str) -> tuple[Any, Any]:
    """The index and the offset of each document's line, mapped from files that all processes share.

    The first process makes them, in a folder beside the corpus; the others wait for it.
    """
    folder = Path(f"{corpus}.bm25")
    corpus_stat = os.stat(corpus)
    stamp = {
        "bytes": corpus_stat.st_size,
        "modified_ns": corpus_stat.st_mtime_ns,
        "bm25s": bm25s.__version__,
    }
    with open(f"{corpus}.bm25.lock", "a") as lock:  # truncates nothing, where it is a link
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp_path = folder / "made_from.json"
        if not stamp_path.is_file() or json.loads(stamp_path.read_text()) != stamp:
            shutil.rmtree(folder, ignore_errors=True)
            _make(corpus, folder)
            stamp_path.write_text(json.dumps(stamp))
    return bm25s.BM25.load(folder, mmap=True), np.load(folder / "offsets.npy", mmap_mode="r")


def _make(corpus: str, folder: Path) -> None:
    texts = []
    offsets = []
    offset = 0
    with open(corpus, "rb") as file:
        for line in file:
            if line.strip():
                texts.append(_text(json.loads(line)))
                offsets.append(offset)
            offset += len(line)
    if not texts:
        raise ValueError("the corpus is empty")
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    retriever.save(folder, show_progress=False)
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))


def _text(document: Any) -> str:
    """A document's text: its `contents`, or its `title` and `text`."""
    if not isinstance(document, dict) or not ("contents" in document or "text" in document):
        raise ValueError(
            f"a line of the corpus has neither `contents` nor `text`: {str(document)[:80]}"
        )
    return str(
        document.get("contents") or f"{document.get('title', '')}\n{document['text']}".strip()
    )


def _document(file: Any, offset: int) -> str:
    file.seek(offset)
    return _text(json.loads(file.readline()))
