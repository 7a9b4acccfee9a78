"""What is read of a run's folder: also of a live run's, and of files that others have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.report import run_files
from megarl.report.page import embedded_json
from megarl.report.run_data import run_data
from megarl.report.run_files import columns, read_run
from megarl.types import UserError
from tests.report.runs import SAMPLE, TOKENS, a_run, add_record


def test_a_run_has_its_records_samples_and_recipe(tmp_path: Path) -> None:
    run = read_run(a_run(tmp_path))
    assert [record["step"] for record in run.records] == [0, 1, 2, 3, 4]
    assert len(run.samples) == 8
    assert run.recipe and run.recipe.run.steps == 4
    assert run.notes == []
    data = run_data(run)
    last = data["samples"][-1]
    assert last["end"] == "answered"
    assert [turn["role"] for turn in last["turns"]] == ["assistant", "user"]
    assert data["metrics"]["reward/mean"] == [None, 0.5, 0.5, 0.5, 0.5]


def test_lines_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    """As a live run leaves them, or another program."""
    folder = a_run(tmp_path)
    with (folder / "samples.jsonl").open("a") as file:
        deep = "[" * 200 + "]" * 200
        file.write('{"step": 1}\nnull\n[]\nnot json\n')
        file.write(json.dumps(SAMPLE)[:-1] + f', "x": {deep}}}\n')
        file.write(json.dumps(SAMPLE)[:20])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    run = read_run(folder)
    assert len(run.samples) == 8
    assert [record["step"] for record in run.records] == [0, 1, 2, 3, 4]
    assert run.notes == ["samples.jsonl has 5 lines that are no samples: they are left out"]


def test_a_broken_record_is_told_and_those_before_it_are_shown(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x": "text"}\n{"step": 6}\n')
    run = read_run(folder)
    assert [record["step"] for record in run.records] == [0, 1, 2, 3, 4]
    assert run.notes[0].startswith(f"{folder / 'metrics.jsonl'}:6: has something other")


def test_lines_that_the_page_could_not_show_are_left_out(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    broken = [
        {"turns": [None]},
        {"episode": {"turns": ["text"]}},
        {"turns": [{"calls": [None]}]},
        {"rows": 5},
        {"rows": [{"tokens": ["x"]}]},
        {"rows": [TOKENS | {"trained": [1]}]},
        {"rows": [TOKENS | {"parts": [["x", 2]]}]},
    ]
    whole = {"episode": {"turns": [{"role": "user", "text": "x", "calls": [{}]}, {}]}}
    with (folder / "samples.jsonl").open("a") as file:
        for more in (*broken, whole):
            file.write(json.dumps(SAMPLE | more) + "\n")
    run = read_run(folder)
    assert len(run.samples) == 9
    assert run.notes == ["samples.jsonl has 7 lines that are no samples: they are left out"]


def test_tokens_without_their_tokenizer_have_numbers_and_the_trainers_logprobs(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path, "model.path=nowhere")
    data = run_data(read_run(folder))
    (row,) = data["samples"][0]["rows"]
    assert row["trainer_logp"] == TOKENS["trainer_logp"] and row["parts"] == TOKENS["parts"]
    assert row["tokens"] == ["[9]", "[1]"]
    assert data["notes"][0].startswith("tokens are shown by their numbers: model.path: nowhere is")


def test_of_very_many_records_some_are_left_out_and_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path)
    for step in range(5, 30):
        more = {"eval/accuracy": 0.5} if step % 10 == 1 else {}
        add_record(folder, {"step": step, "reward/mean": 1.0} | more)
    monkeypatch.setattr(run_files, "_MOST_RECORDS", 10)
    run = read_run(folder)
    assert [record["step"] for record in run.records] == [
        0,
        3,
        6,
        9,
        11,
        12,
        15,
        18,
        21,
        24,
        27,
        29,
    ]
    assert run.notes[0].startswith("metrics.jsonl is long: one of 3 records is shown")


def test_whole_numbers_beyond_the_largest_float_are_null(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    huge = 10**400
    add_record(folder, {"step": 5, "reward/mean": huge, "reward/std": -huge})
    add_record(folder, {"step": -huge, "reward/mean": 1})
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(SAMPLE | {"reward": huge}) + "\n")
    data = json.loads(embedded_json(run_data(read_run(folder))))
    assert data["metrics"]["reward/mean"][-2:] == [None, 1]
    assert data["metrics"]["step"][-2:] == [5, None]
    assert data["samples"][-1]["reward"] is None


def test_losses_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    assert run_data(read_run(folder))["losses"] == []
    (folder / "losses.jsonl").mkdir()
    data = run_data(read_run(folder))
    assert data["losses"] is None
    assert data["notes"][:1] == [
        "losses.jsonl cannot be read (Is a directory): no losses are shown"
    ]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl; name the folder of a run"):
        read_run(tmp_path)


def test_a_run_whose_other_files_are_gone_is_shown_without_them(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder / "samples.jsonl").unlink()
    (folder / "recipe.yaml").unlink()
    run = read_run(folder)
    assert [note.split(" is not there")[0] for note in run.notes] == [
        "samples.jsonl",
        "recipe.yaml",
    ]
    assert run_data(run)["recipe"] == []


def test_a_recipe_of_another_version_is_shown_as_its_text_without_secrets(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder / "recipe.yaml").write_text("run: {title: x, url: 'http://me:secret@host/'}\n")
    data = run_data(read_run(folder))
    assert "this version cannot read it" in data["notes"][0]
    assert data["recipe_text"] == "run: {title: x, url: 'http://(withheld)@host/'}\n"


def test_of_a_large_file_of_samples_every_so_many_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path, steps=9)
    size = (folder / "samples.jsonl").stat().st_size
    monkeypatch.setattr(run_files, "MOST_SAMPLE_BYTES", size // 2)
    run = read_run(folder)
    assert len(run.samples) == 6
    assert run.notes == ["samples.jsonl is large: one of 3 samples is shown"]


def test_columns_have_a_value_for_each_record_and_few_digits() -> None:
    records = [
        {"step": 0, "a": 1 / 3},
        {"step": 1, "b": float("nan")},
        {"step": 2, "a": 123456789.0},
    ]
    assert columns(records) == {
        "step": [0, 1, 2],
        "a": [0.333333, None, 123456789],
        "b": [None, None, None],
    }
