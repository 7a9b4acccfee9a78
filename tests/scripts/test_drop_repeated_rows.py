from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "drop_repeated_rows.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_first_row_of_each_prompt_is_kept_as_it_is(tmp_path: Path) -> None:
    """Prompts are lists of messages, as DAPO-Math-17k has them, in more rows than are read at once."""
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    rows = [
        {
            "prompt": _messages(f"p{number % 50}"),
            "reward_model": {"ground_truth": str(number % 50)},
            "number": number,
        }
        for number in range(20_000)
    ]
    pq.write_table(pa.Table.from_pylist(rows), source)
    done = _run(source, target)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{target}: 50 of 20000 rows, one for each prompt\n"
    kept = pq.read_table(target)
    assert kept.to_pylist() == rows[:50]
    assert kept.schema == pq.read_schema(source)
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_a_wrong_file_or_column_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"question": ["a"]}), source)
    done = _run(source, tmp_path / "out.parquet")
    assert done.returncode == 1
    assert done.stderr == f"{source}: there is no column 'prompt' (columns: question)\n"
    source.write_bytes(b"no parquet")
    done = _run(source, tmp_path / "out.parquet")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.parquet").exists()
