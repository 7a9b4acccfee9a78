"""Search finds the documents that match, by an index that processes make once and share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.runtime.tool_loading import load_tools
from megarl.environments.search import _index, search
from megarl.types import UserError

SEARCH = "megarl.environments.search:search"
DOCUMENTS = [
    {"id": "1", "contents": "Paris\nParis is the capital of France."},
    {"id": "2", "title": "Berlin", "text": "Berlin is the capital of Germany."},
    {"id": "3", "contents": "The Danube flows through Vienna. Größe: ä"},
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "corpus.jsonl", DOCUMENTS)


def write(path: Path, documents: list[dict[str, Any]]) -> str:
    path.write_text(
        "\n\n".join(json.dumps(document, ensure_ascii=False) for document in documents),
        encoding="utf-8",
    )
    return str(path)


def test_the_best_documents_come_first(corpus: str) -> None:
    assert search("capital germany", corpus=corpus) == (
        "[1] Berlin\nBerlin is the capital of Germany.\n\n[2] Paris\nParis is the capital of France."
    )
    assert search("Danube", corpus=corpus) == "[1] The Danube flows through Vienna. Größe: ä"
    assert search("capital", corpus=corpus, num_results=1).count("[") == 1


def test_of_equal_documents_the_first_come_first(tmp_path: Path) -> None:
    """Words that no document has do not count."""
    colours = [
        {"contents": f"{colour} no{number}"} for number in range(9) for colour in ("red", "blue")
    ]
    path = write(tmp_path / "corpus.jsonl", colours)
    assert search("zebra blue", corpus=path) == "[1] blue no0\n\n[2] blue no1\n\n[3] blue no2"
    assert search("red no7", corpus=path).startswith("[1] red no7")
    assert search("red", corpus=path, num_results=99).count("[") == 9


@pytest.mark.parametrize("query", ["", "zebra", "the of", "\x00", "a" * 100_000])
def test_a_query_without_matches_is_told(corpus: str, query: str) -> None:
    assert search(query, corpus=corpus) == "No document matches."


@pytest.mark.slow
def test_processes_make_the_index_once(corpus: str) -> None:
    script = (
        f"from megarl.environments.search import search; print(search('danube', corpus={corpus!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert all(process.communicate()[0].startswith("[1] The Danube") for process in started)
    written_ns = Path(f"{corpus}.bm25", "made_from.json").stat().st_mtime_ns
    subprocess.run(command, check=True, env=environment)
    assert Path(f"{corpus}.bm25", "made_from.json").stat().st_mtime_ns == written_ns


def test_another_corpus_gets_another_index(tmp_path: Path) -> None:
    for word in ("alpha", "beta"):
        path = write(tmp_path / "corpus.jsonl", [{"contents": f"{word} one"}, {"contents": "two"}])
        _index.cache_clear()  # as in another process
        assert search(word, corpus=path) == f"[1] {word} one"


def test_it_is_prepared_with_the_recipes_corpus(corpus: str) -> None:
    (tool,) = load_tools([SEARCH], {"corpus": corpus, "num_results": 1}).tools.values()
    assert Path(f"{corpus}.bm25").is_dir()
    assert [*tool.schema["function"]["parameters"]["properties"]] == ["query"]
    assert tool.function(**tool.values({"query": "france"})).startswith("[1] Paris")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"body": "x"}', "neither `contents` nor `text`"),
        ("{", "JSONDecodeError"),
        ("", "the corpus is empty"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_an_error(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match=problem):
        load_tools([SEARCH], {"corpus": str(path)})
    with pytest.raises(UserError, match="^episode.arguments: corpus: there is no file"):
        load_tools([SEARCH], {"corpus": str(tmp_path / "none.jsonl")})
    with pytest.raises(UserError, match="needs 'corpus'"):
        load_tools([SEARCH], {})
