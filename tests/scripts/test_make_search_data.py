"""The data of the search recipes, from rows in the form that Search-R1 publishes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl.rollout.rewards.short_answer import score
from scripts import make_search_data

ROWS = [
    {
        "question": "who got the first nobel prize in physics",
        "golden_answers": ["Röntgen ", ""],
        "data_source": "nq",
    },
    {"question": "Which is larger?", "golden_answers": ["yes", "Yes"], "data_source": "hotpotqa"},
    {"question": "Who?", "golden_answers": [""], "data_source": "hotpotqa"},
]


def write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[dict[str, object]]:
    source, out = folder / "test.parquet", folder / "made" / "out.jsonl"
    published = [
        row | {"id": "test_0", "reward_model": {"ground_truth": {"target": []}}} for row in ROWS
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(published), source)
    monkeypatch.setattr(
        sys, "argv", ["make_search_data", str(source), "--out", str(out), *arguments]
    )
    make_search_data.main()
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_questions_get_an_instruction_and_keep_all_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write(tmp_path, monkeypatch)
    assert str(first["prompt"]).endswith("Question: who got the first nobel prize in physics?")
    assert (first["answer"], first["golden_answers"]) == ("Röntgen", ["Röntgen"])
    assert str(second["prompt"]).endswith("Question: Which is larger?")
    assert "2 questions" in capsys.readouterr().out
    asked = str(first["prompt"])
    assert score(asked + "<answer>the Röntgen</answer>", "", first).correct
    assert not score(asked, "", first).correct, "the instruction's example is no answer"


def test_one_source_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = write(tmp_path, monkeypatch, "--source", "hotpotqa")
    assert row["data_source"] == "hotpotqa"
    with pytest.raises(SystemExit):
        write(tmp_path, monkeypatch, "--source", "musique")


def test_a_broken_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "test.jsonl"
    source.write_text(json.dumps(ROWS[0]) + "\n{\n")
    monkeypatch.setattr(
        sys, "argv", ["make_search_data", str(source), "--out", str(tmp_path / "out.jsonl")]
    )
    with pytest.raises(SystemExit):
        make_search_data.main()
    assert "test.jsonl:2" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
