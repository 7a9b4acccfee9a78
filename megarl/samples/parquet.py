"""Files of scored samples, which `megarl rollout --out` writes and `megarl train --from-samples` reads.

A parquet file with one row a sample and one row group a step, which any parquet reader shows. A checkpoint has one of
the run's rollout buffer, with one row group a group.

- step, group, sample: from 1, from 0 in the step, from 0 in the group; rows are in this order
- prompt_id, prompt, prompt_ids, answer, row: the group's prompt (`row`: the data row in JSON, as the processes of
  rewards and environments get it), the same in each of its samples
- response: the text; finished, open, baseline, verifications, prefills: as of `Sample`
- reward, correct. Of a group with open samples, where reward results are not applied yet, reward is NaN without a
  result, given_answer is that of the result (null: the whole response), and failure the reason why there is none
- rows: the sample's rows, one of a plain response. Of each row: prompt_ids (null: those of the group's prompt);
  response_ids, and for each of them a float32 engine_logp and trained (whether the model sampled it); versions and
  part_tokens, of the weights that sampled each part of the response, and the part's tokens; token_rewards, or null;
  experts, experts_type, experts_shape: the bytes of Row.routed_experts, or nulls
- of an episode, else null: facts, with the fields of `EpisodeFacts`; transcript and open_episode, in JSON

The schema's metadata has the format's version, the size of the model's vocabulary, and the temperature of sampling
and of engine_logp. Pages carry checksums. Files of format 9 are read, too (`format_9`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from megarl import disk
from megarl.disk import visible_folder
from megarl.printable import first_line
from megarl.samples import columns, format_9
from megarl.samples.buffer import PartialGroup
from megarl.types import SampleGroup, UserError
from megarl.types.json_objects import Columns, JsonObject

_KEY = b"megarl"
_HINT = "make it again with `megarl rollout --out`"


class SampleWriter:
    """Writes one step after another; see `writing`."""

    def __init__(self, path: Path, vocab_size: int, temperature: float) -> None:
        import pyarrow.parquet  # half a second

        ours = {"format": columns.FORMAT, "vocab_size": vocab_size, "temperature": temperature}
        metadata = {_KEY: json.dumps(ours).encode()}
        self._schema = columns.schema().with_metadata(metadata)
        self._file = pyarrow.parquet.ParquetWriter(path, self._schema, write_page_checksum=True)
        self._step = 0

    def write(self, groups: Sequence[SampleGroup | PartialGroup]) -> None:
        """All groups of the next step. Raises OSError where the disk is full."""
        import pyarrow

        self._step += 1
        rows = [
            columns.row_of(self._step, number, group, index)
            for number, group in enumerate(groups)
            for index in range(len(group.samples))
        ]
        table = pyarrow.Table.from_pylist(rows, schema=self._schema)
        self._file.write_table(table, row_group_size=len(rows))

    def close(self) -> None:
        self._file.close()


@contextmanager
def writing(
    path: Path, vocab_size: int, temperature: float, where: str = "run.dir"
) -> Iterator[SampleWriter]:
    """A writer to a hidden file, which is renamed to `path` when the block succeeds and removed when it raises.

    where: the recipe key or option that names the disk. Raises UserError when the disk is full, or another process
    writes to the path.
    """
    partial = path.with_name(f".{path.name}.partial")
    with ExitStack() as lock, disk.writing(visible_folder(path.parent), path.name, where):
        _lock(lock.enter_context(partial.open("ab")), path, where)
        writer = SampleWriter(partial, vocab_size, temperature)
        unlock = lock.pop_all()  # the lock is that of the open file, whatever its name becomes
    try:
        yield writer
        with disk.writing(visible_folder(path.parent), path.name, where):
            writer.close()
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            writer.close()
        partial.unlink(missing_ok=True)
        raise
    finally:
        unlock.close()


def _lock(file: IO[bytes], path: Path, where: str) -> None:
    """Hold a file that nobody else writes. Raises UserError where another process, or another block, does."""
    if not disk.take_lock(file, visible_folder(path.parent), where):
        hint = "wait until it has ended, or name another file"
        raise UserError(where, f"another process writes {path}", hint)


@dataclass(frozen=True)
class SampleFile:
    """A file that `open_samples` has checked; the groups of a step are read on demand.

    num_samples[i]: how many samples step i + 1 has. file_format: its number.
    """

    path: Path
    vocab_size: int
    temperature: float
    num_samples: tuple[int, ...]
    file_format: int

    @property
    def num_steps(self) -> int:
        return len(self.num_samples)

    def groups(self, step: int) -> list[SampleGroup]:
        """The groups of a step, from 1, as they were written. Raises UserError for a damaged file."""
        groups = self.any_groups(step)
        whole = [group for group in groups if isinstance(group, SampleGroup)]
        if len(whole) < len(groups):
            problem = f"step {step} has samples that have not ended, as in a checkpoint's file"
            raise UserError(str(self.path), problem, _HINT)
        for number, group in enumerate(whole):
            if not np.isfinite(group.rewards_G).all():
                problem = f"group {number} of step {step} has a reward that is not a finite number"
                raise UserError(str(self.path), problem, _HINT)
        return whole

    def any_groups(self, step: int) -> list[SampleGroup | PartialGroup]:
        """The same for any file of samples: also the groups with open samples."""
        rows = _read(self.path, step, self.file_format)
        by_group = groupby(rows, key=lambda row: row["group"])
        return [columns.group_of(list(rows_of_group)) for _, rows_of_group in by_group]

    def buffered_groups(self) -> Iterator[SampleGroup | PartialGroup]:
        """The groups of a rollout buffer's file, one after another. Raises UserError for a damaged file."""
        for step in range(1, self.num_steps + 1):
            yield from self.any_groups(step)


def open_samples(path: Path) -> SampleFile:
    """Read a file's footer. Raises UserError when it is not a file of samples, or truncated."""
    import pyarrow
    import pyarrow.parquet

    if path.exists() and not path.is_file():  # a pipe would never end
        raise _unreadable(path, ValueError("it is a folder, a pipe or a device"))
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            footer = file.metadata
        ours = _described((schema.metadata or {}).get(_KEY, b"{}"))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from None
    file_format = ours.get("format", "not ours")
    # a forged file may have anything there
    number = file_format if isinstance(file_format, int) else -1
    if _readable_formats().get(number) != _types_by_name(schema):
        problem = f"its format is {file_format}, this version reads {format_9.FORMAT} and {columns.FORMAT}"
        raise UserError(str(path), problem, _HINT)
    counts = tuple(footer.row_group(index).num_rows for index in range(footer.num_row_groups))
    return SampleFile(path, ours["vocab_size"], ours["temperature"], counts, number)


def _readable_formats() -> dict[int, dict[str, Any]]:
    """The number of each format that this version reads -> its columns' types by name."""
    return {
        columns.FORMAT: _types_by_name(columns.schema()),
        format_9.FORMAT: _types_by_name(format_9.schema()),
    }


def _types_by_name(schema: Any) -> dict[str, Any]:
    return {field.name: field.type for field in schema}


def _described(text: bytes) -> JsonObject:
    """What the schema's metadata says of a file. Raises ValueError where this is none that megarl writes."""
    try:
        description = json.loads(text)
    except RecursionError:
        raise ValueError("its description is nested too deep") from None
    if not isinstance(description, dict):
        raise ValueError(f"its description is a {type(description).__name__}")
    ours = {"vocab_size": 0, "temperature": 1.0, **description}
    if type(ours["vocab_size"]) is not int or type(ours["temperature"]) not in (int, float):
        raise ValueError("its vocab_size or its temperature is no number")
    return ours


def _read(path: Path, step: int, file_format: int) -> list[Columns]:
    """The rows of a step."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read_row_group(step - 1)
    except (OSError, ValueError, pyarrow.ArrowException) as raised:
        raise _unreadable(path, raised) from None
    rows = columns.table_rows(table)
    if file_format == format_9.FORMAT:
        rows = [format_9.upgraded(row) for row in rows]
    before = (-1, -1)
    for number, row in enumerate(rows):
        place = row["group"], row["sample"]
        error = columns.row_error(row, step)
        if not error and place not in ((before[0], before[1] + 1), (before[0] + 1, 0)):
            error = f"is sample {place[1]} of group {place[0]} and follows sample {before[1]} of group {before[0]}"
        before = place
        if error:
            raise UserError(str(path), f"sample {number} of step {step} {error}", _HINT)
    return rows


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(str(path), f"not a complete file of samples ({first_line(error)})", _HINT)
