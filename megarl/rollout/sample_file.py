"""Files of scored samples, which `megarl rollout --out` writes and `megarl train --from-samples` reads.

A parquet file with one row a sample and one row group a step, which any parquet reader shows. A checkpoint has one of
the run's stock, with one row group a group.

- step, group, sample: from 1, from 0 in the step, from 0 in the group; rows are in this order
- prompt_id, prompt, prompt_ids, answer, row: the group's prompt (`row`: the data row in JSON), the same in each of its
  samples
- response, response_ids, engine_logp: the text, its token ids, and a float32 logprob for each of them
- finished, reward, correct; baseline: Sample.is_baseline
- versions, part_tokens: of the weights that sampled each part of the response, and the part's tokens
- verifications, prefills: Sample's
- open: Sample.is_open. Of a group with open samples, where verdicts are not applied yet, given_answer is that of each
  verdict (null: the whole response), and failure the reason why there is none; reward is NaN without a verdict
- experts, experts_type, experts_shape: Sample.routed_experts' bytes, or nulls

The schema's metadata has the format's version, the size of the model's vocabulary, and the temperature of sampling
and of engine_logp. Pages carry checksums.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megarl import disk
from megarl.checkpoints.snapshots import visible_folder
from megarl.printable import first_line, json_line
from megarl.rollout.rewards import Failure, Verdict
from megarl.rollout.stock import PartialGroup
from megarl.types import Prompt, Sample, SampleGroup, SamplePart, UserFault

_FORMAT = 5
_KEY = b"megarl"
_MEND = "make it again with `megarl rollout --out`"
_EXPERTS = ("uint8", "int16")


class SampleWriter:
    """Writes one step after another; see `writing`."""

    def __init__(self, path: Path, vocab_size: int, temperature: float) -> None:
        import pyarrow.parquet  # half a second

        ours = {"format": _FORMAT, "vocab_size": vocab_size, "temperature": temperature}
        metadata = {_KEY: json.dumps(ours).encode()}
        self._schema = _schema().with_metadata(metadata)
        self._file = pyarrow.parquet.ParquetWriter(path, self._schema, write_page_checksum=True)
        self._step = 0

    def write(self, groups: Sequence[SampleGroup | PartialGroup]) -> None:
        """All groups of the next step. Raises OSError where the disk is full."""
        import pyarrow

        self._step += 1
        rows = [
            _row(self._step, number, group, index)
            for number, group in enumerate(groups)
            for index in range(len(group.samples))
        ]
        table = pyarrow.Table.from_pylist(rows, schema=self._schema)
        self._file.write_table(table, row_group_size=len(rows))

    def close(self) -> None:
        self._file.close()


@contextmanager
def writing(path: Path, vocab_size: int, temperature: float, where: str = "run.dir") -> Iterator[SampleWriter]:
    """A writer to a hidden file, which is renamed to `path` when the block succeeds and removed when it raises.

    where: the recipe key or option that names the disk. Raises UserFault when the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    with disk.writing(visible_folder(path.parent), path.name, where):
        writer = SampleWriter(partial, vocab_size, temperature)
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


@dataclass(frozen=True)
class SampleFile:
    """A file that `open_samples` has checked; the groups of a step are read on demand.

    num_samples[i]: how many samples step i + 1 has.
    """

    path: Path
    vocab_size: int
    temperature: float
    num_samples: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        return len(self.num_samples)

    def groups(self, step: int) -> list[SampleGroup]:
        """The groups of a step, from 1, as they were written. Raises UserFault for a damaged file."""
        rows = _read(self.path, step)
        if any(row["open"] for row in rows):
            problem = f"step {step} has samples that have not ended, as in a checkpoint's file"
            raise UserFault(str(self.path), problem, _MEND)
        return [_group(list(of_group)) for _, of_group in groupby(rows, key=lambda row: row["group"])]

    def stocked_groups(self) -> Iterator[SampleGroup | PartialGroup]:
        """The groups of a stock's file, one after another. Raises UserFault for a damaged file."""
        for step in range(1, self.num_steps + 1):
            rows = _read(self.path, step)
            yield _partial_group(rows) if any(row["open"] for row in rows) else _group(rows)


def open_samples(path: Path) -> SampleFile:
    """Read a file's footer. Raises UserFault when it is not a file of samples, or truncated."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, footer = file.schema_arrow, file.metadata
        ours = {"vocab_size": 0, "temperature": 1.0, **json.loads((schema.metadata or {}).get(_KEY, b"{}"))}
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from None
    if ours.get("format") != _FORMAT or not schema.equals(_schema()):
        problem = f"its format is {ours.get('format', 'not ours')}, this version reads {_FORMAT}"
        raise UserFault(str(path), problem, _MEND)
    counts = tuple(footer.row_group(index).num_rows for index in range(footer.num_row_groups))
    return SampleFile(path, ours["vocab_size"], ours["temperature"], counts)


def _schema() -> Any:
    import pyarrow as pa

    ids, text = pa.list_(pa.int64()), pa.string()
    columns = {
        "step": pa.int64(),
        "group": pa.int64(),
        "sample": pa.int64(),
        "prompt_id": text,
        "prompt": text,
        "prompt_ids": ids,
        "answer": text,
        "row": text,
        "response": text,
        "response_ids": ids,
        "engine_logp": pa.list_(pa.float32()),
        "finished": pa.bool_(),
        "versions": ids,
        "part_tokens": ids,
        "verifications": pa.int64(),
        "prefills": pa.int64(),
        "open": pa.bool_(),
        "given_answer": text,
        "failure": text,
        "reward": pa.float32(),
        "correct": pa.bool_(),
        "baseline": pa.bool_(),
        "experts": pa.binary(),
        "experts_type": text,
        "experts_shape": ids,
    }
    return pa.schema(list(columns.items()))


def _row(step: int, number: int, group: SampleGroup | PartialGroup, index: int) -> dict[str, Any]:
    prompt, sample = group.prompt, group.samples[index]
    if isinstance(group, PartialGroup):
        verdict = group.verdicts[index]
    else:
        verdict = Verdict(float(group.rewards_G[index]), bool(group.correct_G[index]))
    judged = verdict if isinstance(verdict, Verdict) else Verdict(math.nan, False)
    experts = sample.routed_experts
    return {
        "step": step,
        "group": number,
        "sample": index,
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "prompt_ids": prompt.token_ids,
        "answer": prompt.answer,
        "row": json_line(prompt.row, default=str),  # dates and the like: for the reader only
        "response": sample.text,
        "response_ids": sample.response_ids_T,
        "engine_logp": sample.engine_logp_T,
        "finished": sample.finished,
        "versions": [part.version for part in sample.parts],
        "part_tokens": [part.num_tokens for part in sample.parts],
        "verifications": sample.verifications,
        "prefills": sample.prefills,
        "open": sample.is_open,
        "given_answer": judged.answer,
        "failure": verdict.words if isinstance(verdict, Failure) else None,
        "reward": judged.reward,
        "correct": judged.correct,
        "baseline": sample.is_baseline,
        "experts": None if experts is None else np.ascontiguousarray(experts).tobytes(),
        "experts_type": None if experts is None else experts.dtype.name,
        "experts_shape": None if experts is None else experts.shape,
    }


def _read(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a step; lists of numbers are NumPy arrays, so that a float32 keeps every bit."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read_row_group(step - 1)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from None
    arrays = {"prompt_ids", "response_ids", "engine_logp", "experts_shape", "versions", "part_tokens"}
    rows = table.drop_columns(list(arrays)).to_pylist()
    for name in arrays:
        for row, scalar in zip(rows, table[name], strict=True):
            row[name] = None if scalar.values is None else scalar.values.to_numpy(zero_copy_only=False).copy()
    for number, row in enumerate(rows):
        fault = _row_fault(row, step)
        if fault:
            raise UserFault(str(path), f"sample {number} of step {step} {fault}", _MEND)
    return rows


def _row_fault(row: dict[str, Any], step: int) -> str | None:
    """A description of what is wrong with a row, as a file that another program wrote may have it; else None."""
    if row["step"] != step:
        return f"has the step number {row['step']}"
    optional = {"experts", "experts_type", "experts_shape", "given_answer", "failure"}
    empty = [name for name, value in row.items() if value is None and name not in optional]
    if empty:
        return f"has no {empty[0]}"
    ids, logps = row["response_ids"], row["engine_logp"]
    if not len(row["prompt_ids"]) or not len(ids) or len(ids) != len(logps):
        return f"has {len(row['prompt_ids'])} prompt tokens, {len(ids)} response tokens and {len(logps)} logprobs"
    if min(row["prompt_ids"].min(), ids.min()) < 0:
        return "has a negative token id"
    versions, part_tokens = row["versions"], row["part_tokens"]
    is_ascending = len(versions) == len(part_tokens) and (np.diff(versions) > 0).all()
    if not is_ascending or (part_tokens < 1).any() or part_tokens.sum() != len(ids):
        return f"has parts of {part_tokens.tolist()} tokens and of versions {versions.tolist()}"
    if row["experts"] is None:
        return None
    if row["experts_type"] not in _EXPERTS or row["experts_shape"] is None:
        return f"has experts of type {row['experts_type']}"
    if len(row["experts_shape"]) != 3 or row["experts_shape"].min() < 0:
        return f"has experts of shape {row['experts_shape'].tolist()}"
    num_tokens = len(row["prompt_ids"]) + len(ids)
    if row["experts_shape"][0] != num_tokens - 1:
        return f"has the experts of {row['experts_shape'][0]} tokens, and {num_tokens} tokens"
    wanted = int(np.prod(row["experts_shape"])) * np.dtype(row["experts_type"]).itemsize
    return None if wanted == len(row["experts"]) else f"has {len(row['experts'])} bytes of experts, not {wanted}"


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(
        id=row["prompt_id"],
        text=row["prompt"],
        token_ids=tuple(row["prompt_ids"].tolist()),
        answer=row["answer"],
        row=json.loads(row["row"]),
    )


def _partial_group(rows: Sequence[dict[str, Any]]) -> PartialGroup:
    verdicts = tuple(None if row["open"] else _verdict(row) for row in rows)
    return PartialGroup(_prompt(rows[0]), tuple(_sample(row) for row in rows), verdicts)


def _verdict(row: dict[str, Any]) -> Verdict | Failure:
    if row["failure"] is not None:
        return Failure(row["failure"])
    return Verdict(row["reward"], row["correct"], row["given_answer"])


def _group(rows: Sequence[dict[str, Any]]) -> SampleGroup:
    return SampleGroup(
        prompt=_prompt(rows[0]),
        samples=tuple(_sample(row) for row in rows),
        rewards_G=np.asarray([row["reward"] for row in rows], dtype=np.float32),
        correct_G=np.asarray([row["correct"] for row in rows], dtype=np.bool_),
    )


def _sample(row: dict[str, Any]) -> Sample:
    experts = None
    if row["experts"] is not None:
        flat = np.frombuffer(row["experts"], dtype=row["experts_type"])
        experts = flat.reshape(row["experts_shape"]).copy()  # writable, as the engine's own
    return Sample(
        response_ids_T=row["response_ids"],
        engine_logp_T=row["engine_logp"],
        text=row["response"],
        finished=row["finished"],
        parts=tuple(map(SamplePart, row["versions"].tolist(), row["part_tokens"].tolist())),
        routed_experts=experts,
        is_baseline=row["baseline"],
        verifications=row["verifications"],
        prefills=row["prefills"],
        is_open=row["open"],
    )


def _unreadable(path: Path, error: Exception) -> UserFault:
    return UserFault(str(path), f"not a complete file of samples ({first_line(error)})", _MEND)
