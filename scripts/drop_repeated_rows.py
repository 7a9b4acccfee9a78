"""Keep the first of the rows that have the same prompt: drop_repeated_rows.py IN.parquet OUT.parquet [--by COLUMN].

BytedTsinghua-SIA publishes DAPO-Math-17k with each row 100 times, and AIME-2024 with each row 32 times: megarl repeats
prompts itself, by epochs and by evaluation.samples.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_BATCH_ROWS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="IN.parquet")
    parser.add_argument("target", type=Path, metavar="OUT.parquet")
    parser.add_argument(
        "--by", default="prompt", metavar="COLUMN", help="the column that is compared"
    )
    arguments = parser.parse_args()
    try:
        num_rows, num_kept = drop_repeated_rows(arguments.source, arguments.target, arguments.by)
    except (OSError, ValueError) as error:  # pyarrow's own exceptions are among them
        sys.exit(f"{arguments.source}: {error}")
    print(f"{arguments.target}: {num_kept} of {num_rows} rows, one for each {arguments.by}")


def drop_repeated_rows(source: Path, target: Path, column: str) -> tuple[int, int]:
    """The numbers of rows in `source`, and of those in `target`, which appears under its name when it is whole."""
    file = pq.ParquetFile(source)
    if column not in file.schema_arrow.names:
        raise ValueError(
            f"there is no column {column!r} (columns: {', '.join(file.schema_arrow.names)})"
        )
    seen: set[bytes] = set()
    num_rows = 0
    partial = target.with_name(f".{target.name}.partial")
    with pq.ParquetWriter(partial, file.schema_arrow) as writer:
        for batch in file.iter_batches(_BATCH_ROWS):
            num_rows += batch.num_rows
            writer.write_batch(batch.filter(pa.array(_is_new(batch.column(column), seen))))
    os.replace(partial, target)
    return num_rows, len(seen)


def _is_new(values: pa.Array, seen: set[bytes]) -> list[bool]:
    """For each value whether it is the first of its kind; seen: hashes of those before, to which these are added."""
    is_new = []
    for value in values.to_pylist():
        digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()
        is_new.append(digest not in seen)
        seen.add(digest)
    return is_new


if __name__ == "__main__":
    main()
