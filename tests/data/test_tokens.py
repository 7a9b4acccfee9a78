"""Tokens that are kept: the same as fresh ones, and never taken from a file that is broken or another user's."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data import tokens
from megarl.data.prompts import PromptFile, PromptSource, load_prompts
from megarl.data.tokens import TokenCache
from megarl.types import UserErrors


class Counting:
    """A tokenizer that counts the texts it gets."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.num_texts = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: Any, **keys: Any) -> Any:
        self.num_texts += len(texts)
        return self._tokenizer(texts, **keys)


@pytest.fixture
def counting(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(tokens, "_WORTH_KEEPING", 1)
    return Counting(tokenizer)


@pytest.fixture
def load(tmp_path: Path, counting: Counting) -> Callable[..., PromptFile]:
    """Loads 600 rows, more than a batch, with a cache."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(600)))

    def once(
        folder: Path = tmp_path / "cache", tokenizer: Any = counting, **changes: Any
    ) -> PromptFile:
        keys = {"max_prompt_tokens": 32, "cache": TokenCache(folder)} | changes
        return load_prompts(PromptSource("data.train", str(path)), tokenizer, **keys)

    return once


def entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_second_start_tokenises_nothing_and_has_the_same_prompts(
    load: Callable[..., PromptFile], counting: Counting, tmp_path: Path
) -> None:
    fresh = load()
    assert counting.num_texts == 600
    again = load()
    assert counting.num_texts == 600 and again == fresh == load(cache=None)
    folder = tmp_path / "cache"
    assert (
        stat.S_IMODE(folder.stat().st_mode) == 0o700
        and stat.S_IMODE(entry(folder).stat().st_mode) == 0o600
    )
    assert (
        load(max_prompt_tokens=8, overlong="drop").num_dropped == 0 and counting.num_texts == 1200
    )
    with pytest.raises(UserErrors, match="max_prompt_tokens"):
        load(max_prompt_tokens=3)
    assert counting.num_texts == 1200, "lengths are judged after the cache"


def test_other_rows_or_another_template_are_tokenised_anew(
    load: Callable[..., PromptFile],
    counting: Counting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load()
    monkeypatch.setattr(counting._tokenizer, "chat_template", "{{ messages[0].content }}=")
    assert load().prompts[0].text == "0+1==" and counting.num_texts == 1200
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"599+1="', '"599+2="'))
    assert load().prompts[-1].text == "599+2==" and counting.num_texts == 1800
    rows.write_text(rows.read_text().replace('"answer": "600"', '"answer": "601"'))
    assert load().prompts[-1].answer == "601" and counting.num_texts == 1800, (
        "answers are not tokenised here"
    )


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "bits":
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif how == "pickle":
        path.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    elif how == "writable":
        path.chmod(0o666)
    elif how == "link":
        path.rename(path.with_suffix(".other"))
        path.symlink_to(path.with_suffix(".other"))
    elif how == "folder":
        path.parent.chmod(0o777)


@pytest.mark.parametrize("how", ["cut", "empty", "bits", "pickle", "writable", "link", "folder"])
def test_what_is_not_as_it_was_written_counts_for_nothing(
    load: Callable[..., PromptFile], counting: Counting, tmp_path: Path, how: str
) -> None:
    fresh = load()
    spoil(entry(tmp_path / "cache"), how)
    assert load() == fresh and counting.num_texts == 1200
    if how not in ("folder", "link"):
        assert load() == fresh and counting.num_texts == 1200, "a good entry took its place"


def test_another_entrys_tokens_under_this_name_count_for_nothing(
    load: Callable[..., PromptFile],
    counting: Counting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load()
    first = entry(tmp_path / "cache").rename(tmp_path / "kept")
    monkeypatch.setattr(counting._tokenizer, "chat_template", "{{ messages[0].content }}=")
    load()
    first.replace(entry(tmp_path / "cache"))
    assert load().prompts[0].text == "0+1=="


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_another_users_cache_is_not_read(
    load: Callable[..., PromptFile], counting: Counting, tmp_path: Path, what: str
) -> None:
    load()
    folder = tmp_path / "cache"
    os.chown(folder if what == "folder" else entry(folder), 65534, 65534)
    load()
    assert counting.num_texts == 1200


def test_a_disk_that_takes_nothing_costs_the_cache_alone(
    load: Callable[..., PromptFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert len(load(tmp_path / "file" / "cache").prompts) == 600

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    assert len(load().prompts) == 600
    assert list((tmp_path / "cache").iterdir()) == [], "no part of an entry is left"


def test_unused_entries_go_and_used_ones_stay(
    load: Callable[..., PromptFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counting: Counting,
) -> None:
    load()
    folder = tmp_path / "cache"
    old = time.time() - 40 * 24 * 3600
    used, unused, foreign = entry(folder), folder / "unused.parquet", folder / "notes.txt"
    for path in (unused, foreign):
        path.write_text("")
    for path in (used, unused, foreign):
        os.utime(path, (old, old))
    load()
    monkeypatch.setattr(counting._tokenizer, "chat_template", "{{ messages[0].content }}=")
    load()
    left = set(folder.iterdir())
    assert {used, foreign} < left and unused not in left and len(left) == 3


def test_small_data_and_a_checker_keep_nothing(
    load: Callable[..., PromptFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(cache=TokenCache(tmp_path / "cache", writes=False))
    assert not (tmp_path / "cache").exists()
    monkeypatch.undo()
    load()
    assert not (tmp_path / "cache").exists(), "600 rows are tokenised faster than they are read"


def test_where_a_users_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def folder() -> str:
        cache = TokenCache.of_user()
        assert cache is not None
        return str(cache._folder)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == f"{tmp_path}/megarl/tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the XDG specification says to ignore
    monkeypatch.setenv("HOME", "/home/somebody")
    assert folder() == "/home/somebody/.cache/megarl/tokens"


def test_texts_are_tokenised_in_batches_as_one_by_one(tokenizer: Any) -> None:
    texts = [f"{number}+1=" * (1 + number % 7) for number in range(1100)]
    steps: list[int] = []
    tokenised = tokens.tokenise(tokenizer, texts, special=False, done=steps.append)
    assert [list(tokenised.of(number)) for number in range(len(texts))] == [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
    ]
    assert steps == [512, 512, 76]
    assert tokenised.ids.dtype == np.int32 and tokenised.lengths.tolist() == [
        len(tokenised.of(n)) for n in range(len(texts))
    ]


def test_the_bar_counts_every_prompt(load: Callable[..., PromptFile]) -> None:
    seen: list[Any] = []

    @contextmanager
    def bar(title: str, total: int) -> Any:
        seen.append((title, total))
        yield seen.append

    load(bar=bar)
    assert seen == [("data.train: tokenising 600 prompts", 600), 512, 88]
    load(bar=bar)
    assert len(seen) == 3, "nothing is tokenised, so there is no bar"


def test_chat_messages_are_kept_too(tmp_path: Path, counting: Counting) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": [{"role": "user", "content": str(n)}], "answer": "1"} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {"max_prompt_tokens": 32, "cache": TokenCache(tmp_path / "cache")}
    fresh = load_prompts(PromptSource("data.train", str(path)), counting, **keys)
    assert load_prompts(PromptSource("data.train", str(path)), counting, **keys) == fresh
    assert counting.num_texts == 9
