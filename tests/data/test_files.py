"""Rows of files that are broken, odd or hostile: each is a line with file and place, and none is a traceback."""

from __future__ import annotations

import codecs
import datetime
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from megarl.data.files import RowErrors, answered_rows, read_rows
from megarl.types import UserErrors

GOOD = b'{"prompt": "1+2=", "answer": "3"}\n'


def rows_of(path: Path) -> tuple[list[Any], list[str]]:
    """(the rows, what is told of the others)"""
    bad = RowErrors("data.train")
    rows = [row for _, row in read_rows(str(path), "data.train", bad)]
    return rows, [str(error) for error in bad.errors()]


@pytest.mark.parametrize("line", [1, 3])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (rb'{"prompt": "1\ud800"}', r"'prompt' has half of a surrogate pair (\ud800)"),
        (
            rb'{"prompt": "1", "more": {"a": ["\uDFFF"]}}',
            r"'more' has half of a surrogate pair (\udfff)",
        ),
        (rb'{"\ud83d": "1"}', r"'\ud83d' has half of a surrogate pair (\ud83d)"),
        (b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", "nested more than 100 deep"),
        (b'{"prompt": ' + b"[" * 3_000 + b"]" * 3_000 + b"}", "nested more than 100 deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 100 deep"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b'{"prompt": "\xff"}', "byte 13 of the line is not UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "byte 13 of the line is not UTF-8"),
        (b"\x00\x00", "the line is not JSON"),
        (b'{"prompt": 1' + b"0" * 5000 + b"}", "whole number of more than 4300 digits"),
        (b'{"prompt": "1"', "the line is not JSON (Expecting ',' delimiter, column 15)"),
        (b'["a"]', "the line is not a JSON object; write one JSON object on each line"),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, str) else "",
)
def test_a_bad_line_is_told_with_its_place_and_the_others_are_read(
    tmp_path: Path, line: int, text: bytes, says: str
) -> None:
    lines = [GOOD, GOOD, GOOD]
    lines[line - 1] = text + b"\n"
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(lines))
    rows, (error,) = rows_of(path)
    assert rows == [json.loads(GOOD)] * 2
    assert error.startswith(f"data.train: {path}:{line}: ") and says in error
    error.encode("utf-8")  # it can be printed
    with pytest.raises(UserErrors, match=f"rows.jsonl:{line}: "):
        answered_rows(str(path), "--data", "answer", 10, "")


def test_a_whole_pair_and_an_escaped_backslash_are_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rb'{"prompt": "\ud83d\ude00", "answer": "\\ud800 \\\\"}')
    ((row,), errors) = rows_of(path)
    assert row == {"prompt": "\N{GRINNING FACE}", "answer": r"\ud800 \\"} and not errors


def test_braces_in_text_are_no_nesting(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "{[" * 500, "answer": "3", "deep": json.loads("[" * 98 + "]" * 98)}
    path.write_text(json.dumps(row))
    assert rows_of(path) == ([row], [])


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    """As Windows writes it; also where two such files were joined."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        (codecs.BOM_UTF8 + GOOD.replace(b"\n", b"\r\n")) * 2 + codecs.BOM_UTF8 + b"\r\n"
    )
    assert rows_of(path) == ([json.loads(GOOD)] * 2, [])


def test_rows_with_the_same_hint_are_one_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{\n" + GOOD + b"[]\n}\n" + b'{"a": "\\udc00"}\n')
    rows, errors = rows_of(path)
    assert len(rows) == 1 and len(errors) == 2
    assert f"{path}:1: " in errors[0] and "(and 2 more such rows)" in errors[0]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    for name in ("folder.jsonl", "loop.jsonl", "none.parquet"):
        with pytest.raises(UserErrors, match="is not a file") as caught:
            rows_of(tmp_path / name)
        assert len(caught.value.errors) == 1


def parquet(tmp_path: Path, columns: dict[str, Any] | None = None, table: Any = None) -> Path:
    pyarrow.parquet.write_table(table or pa.table(columns), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_odd_types_of_parquet_are_read(tmp_path: Path) -> None:
    """Times of nanoseconds are what pandas writes."""
    second = 1_000_000_000
    columns = {
        "dictionary": pa.array(["a", "a"]).dictionary_encode(),
        "large": pa.array(["a", "b"], pa.large_string()),
        "view": pa.array(["a", "b"], pa.string_view()),
        "bytes": pa.array([b"\xff", None], pa.binary()),
        "null": pa.nulls(2),
        "time": pa.array([second + 1, None], pa.timestamp("ns")),
        "took": pa.array([second + 1, None], pa.duration("ns")),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        "messages": pa.array(
            [[{"role": "user", "content": "1", "tool": None}], [{"role": "user", "content": "2"}]]
        ),
    }
    (first, second_row), errors = rows_of(parquet(tmp_path, columns))
    assert not errors
    assert (
        first["time"] == datetime.datetime(1970, 1, 1, 0, 0, 1)
        and first["took"].total_seconds() == 1
    )
    assert (first["dictionary"], first["large"], first["view"], first["bytes"]) == (
        "a",
        "a",
        "a",
        b"\xff",
    )
    assert second_row["messages"] == [{"role": "user", "content": "2", "tool": None}]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            pa.array([b"a", b"\xff"]).view(pa.string()),
            "the value of 'odd' (type string) cannot be read ('utf-8' codec",
        ),
        (
            pa.array([0, 2**62], pa.timestamp("us")),
            "the value of 'odd' (type timestamp[us]) cannot be read (date",
        ),
        (pa.array([[0], [1]], pa.list_(pa.timestamp("ns"))), "cannot be read (Nanosecond"),
    ],
    ids=["not UTF-8", "the year 148000", "nanoseconds inside"],
)
def test_a_value_without_a_python_object_is_told_with_row_and_column(
    tmp_path: Path, values: Any, says: str
) -> None:
    path = parquet(tmp_path, {"prompt": ["1", "2"], "odd": values})
    rows, (error,) = rows_of(path)
    assert (
        rows == [{"prompt": "1", "odd": rows[0]["odd"]}]
        and f"{path} row 1: " in error
        and says in error
    )


def test_parquet_that_is_none_of_ours(tmp_path: Path) -> None:
    twice = parquet(tmp_path, table=pa.table([["1"], ["2"]], names=["prompt", "prompt"]))
    with pytest.raises(UserErrors, match="has several columns named 'prompt'"):
        rows_of(twice)
    deep = pa.string()
    for _ in range(3000):
        deep = pa.list_(deep)
    with pytest.raises(
        UserErrors, match="is not a parquet file that can be read .*too deeply nested"
    ):
        rows_of(parquet(tmp_path, {"prompt": pa.nulls(1, deep)}))
    whole = parquet(tmp_path, {"prompt": [str(number) for number in range(1000)]}).read_bytes()
    (tmp_path / "rows.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserErrors, match="is not a parquet file that can be read"):
        rows_of(tmp_path / "rows.parquet")


@pytest.mark.parametrize("answer", [math.nan, b"3"])
def test_answers_of_parquet_that_are_none(tmp_path: Path, answer: Any) -> None:
    """A missing number is NaN where pandas wrote it; bytes would become the text b'3'."""
    path = parquet(tmp_path, {"answer": pa.array([answer])})
    with pytest.raises(
        UserErrors, match="row 0: 'answer' is .*; write a text or a number into 'answer'"
    ):
        answered_rows(str(path), "--data", "answer", 10, "")
