"""JSONL and parquet files of data: reading their rows, and reporting unusable rows by file and line."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.printable import first_line, short
from megarl.types import UserError, UserErrors
from megarl.types.json_objects import Columns, depth

# (`file:line`, or `file row N` from 0 of a parquet file; the columns)
DataRow = tuple[str, Mapping[str, Any]]
# of lists and objects inside each other: Python's own JSON and pickle fail near 1000
_MAX_DEPTH = 100
# a surrogate, which JSON can escape and UTF-8 cannot encode
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_ONE_OBJECT = "write one JSON object on each line"
_PARQUET_ROWS = 1024  # converted to Python objects at once


class BadRow(Exception):
    """A row that cannot be used: the problem and the mend."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem, hint)
        self.problem = problem
        self.hint = hint


class RowErrors:
    """Collects the unusable rows of one file; rows with the same mend become one fault, which names the first row."""

    def __init__(self, where: str) -> None:
        """where: the recipe key that names the file."""
        self._where = where
        self._first: dict[str, str] = {}  # by mend
        self._count: dict[str, int] = {}

    def add(self, place: str, row: BadRow) -> None:
        self._first.setdefault(row.hint, f"{place}: {row.problem}")
        self._count[row.hint] = self._count.get(row.hint, 0) + 1

    def errors(self) -> list[UserError]:
        """A fault for each mend."""
        errors = []
        for hint, problem in self._first.items():
            others = self._count[hint] - 1
            if others:
                more = f" (and {others} more such {'row' if others == 1 else 'rows'})"
            else:
                more = ""
            errors.append(UserError(self._where, problem + more, hint))
        return errors


def read_rows(path: str, where: str, bad: RowErrors) -> Iterator[DataRow]:
    """Every row that can be read; the others are added to `bad`.

    where: the recipe key that names the file. Raises UserErrors when the file as a whole cannot be read.
    """
    source = Path(path)
    if not source.is_file():
        if source.exists():
            problem = f"{path} is not a file"
        else:
            problem = f"{path} is not a file: it does not exist"
        hint = "write the path of a .jsonl or .parquet file, relative to the folder that you start megarl in"
        raise UserErrors([UserError(where, problem, hint)])
    if source.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserErrors(
            [
                UserError(
                    where, f"{path} is neither .jsonl nor .parquet", "convert it to one of them"
                )
            ]
        )
    try:
        yield from (
            _read_parquet(source, where, bad)
            if source.suffix == ".parquet"
            else _read_jsonl(source, bad)
        )
    except OSError as error:
        hint = "write it again, or name a file that this user may read"
        raise UserErrors([UserError(where, f"{path} cannot be read ({error})", hint)]) from error


def column(row: Columns, name: str, hint: str) -> Any:
    """The value of a column, or of a key inside one by its dotted name. Raises BadRow where the row has none.

    mend: the text of the error, in which {columns} stands for the row's columns.
    """
    outer, _, inner = name.partition(".")
    if name not in row and inner and isinstance(row.get(outer), dict):
        return column(row[outer], inner, hint)
    if name not in row:
        present = ", ".join(sorted(row)) or "the columns that the file has"
        raise BadRow(f"there is no column {name!r}", hint.replace("{columns}", present))
    return row[name]


def answer_of(value: Any, name: str) -> str:
    """The value of the answer's column `name` as text. Raises BadRow where it is empty or no text or number."""
    # NaN differs from itself
    is_missing = value is None or value != value or isinstance(value, list | dict | bytes)
    if is_missing or str(value) == "":
        raise BadRow(
            f"{name!r} is {short(value, 60)}",
            f"write a text or a number into {name!r} of every row",
        )
    return str(value)


def answered_rows(
    path: str, where: str, answer_column: str, most: int, hint: str
) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(place, answer, row) of the first `most` rows of a file that needs no prompts. Raises UserErrors.

    hint: as of `column`.
    """
    rows = []
    bad = RowErrors(where)
    for place, row in islice(read_rows(path, where, bad), most):
        try:
            rows.append((place, answer_of(column(row, answer_column, hint), answer_column), row))
        except BadRow as error:
            bad.add(place, error)
    errors = bad.errors()
    if errors or not rows:
        raise UserErrors(errors or [no_rows_error(path, where)])
    return rows


def no_rows_error(path: str, where: str) -> UserError:
    return UserError(where, f"{path} has no rows", "name a file with at least one")


def _read_jsonl(source: Path, bad: RowErrors) -> Iterator[DataRow]:
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{source}:{number}"
            # also inside: files with one are joined by `cat`
            line = line.removeprefix(codecs.BOM_UTF8).rstrip()
            if not line:
                continue
            try:
                row = _parsed(line)
            except BadRow as error:
                bad.add(place, error)
            else:
                yield place, row


def _parsed(line: bytes) -> Mapping[str, Any]:
    """One line of JSONL. Raises BadRow."""
    too_deep = BadRow(
        f"the row is nested more than {_MAX_DEPTH} deep", "write it with fewer levels, or as text"
    )
    try:
        text = line.decode("utf-8")
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise BadRow(
            f"byte {error.start + 1} of the line is not UTF-8", "save the file as UTF-8"
        ) from None
    except RecursionError:
        raise too_deep from None
    except json.JSONDecodeError as error:
        raise BadRow(
            f"the line is not JSON ({error.msg}, column {error.colno})", _ONE_OBJECT
        ) from None
    except ValueError:
        raise BadRow(
            "the row has a whole number of more than 4300 digits", "write such numbers in quotes"
        ) from None
    if not isinstance(row, dict):
        raise BadRow("the line is not a JSON object", _ONE_OBJECT)
    if text.count("[") + text.count("{") > _MAX_DEPTH and depth(row) > _MAX_DEPTH:
        raise too_deep
    if _HALF_PAIR.search(text):
        _refuse_half_pairs(row)
    return row


def _refuse_half_pairs(row: Columns) -> None:
    """Raise BadRow for half a surrogate pair: UTF-8 cannot encode it, so neither the tokenizer nor a file takes it."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            problem = f"{ascii(name)} has half of a surrogate pair ({half}), which is no character"
            raise BadRow(problem, "write the whole pair, or remove it") from None


def _read_parquet(source: Path, where: str, bad: RowErrors) -> Iterator[DataRow]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            names = file.schema_arrow.names
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                problem = f"{source} has several columns named {', '.join(map(repr, twice))}"
                raise UserErrors(
                    [UserError(where, problem, "write it again with one of each name")]
                )
            values = (
                row
                for batch in file.iter_batches(_PARQUET_ROWS)
                for row in _row_values(_in_microseconds(batch))
            )
            for number, row in enumerate(values):
                if isinstance(row, BadRow):
                    bad.add(f"{source} row {number}", row)
                else:
                    yield f"{source} row {number}", row
    except (OSError, pyarrow.lib.ArrowException) as error:
        problem = f"{source} is not a parquet file that can be read ({first_line(error)})"
        raise UserErrors([UserError(where, problem, "write it again")]) from error


def _in_microseconds(batch: Any) -> Any:
    """Round times in nanoseconds, as pandas writes them, down to microseconds: Python has no finer type."""
    import pyarrow as pa

    columns = []
    for values in batch.columns:
        kind = values.type
        if getattr(kind, "unit", None) == "ns":
            if pa.types.is_timestamp(kind):
                rounded = pa.timestamp("us", kind.tz)
            elif pa.types.is_duration(kind):
                rounded = pa.duration("us")
            else:
                rounded = pa.time64("us")
            values = values.cast(rounded, safe=False)
        columns.append(values)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _row_values(batch: Any) -> Sequence[Mapping[str, Any] | BadRow]:
    """The rows as Python objects; a BadRow in place of a row with a value that cannot be converted."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):  # now value by value, to name its row and column
        return [_row_value(batch.slice(number, 1)) for number in range(batch.num_rows)]


def _row_value(one_row: Any) -> Mapping[str, Any] | BadRow:
    row = {}
    for name in one_row.schema.names:
        try:
            (row[name],) = one_row.column(name).to_pylist()
        except (ValueError, OverflowError) as error:
            kind = one_row.schema.field(name).type
            reason = str(error).partition(". ")[0]
            problem = f"the value of {name!r} (type {kind}) cannot be read ({reason})"
            return BadRow(problem, f"write the column {name!r} as text, or leave it out")
    return row
