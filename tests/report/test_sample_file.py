"""The samples of a file of `megarl rollout` on a page: their tokens, and the experts that these chose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.commands.report import write_reports
from megarl.config import Recipe
from megarl.report import sample_file
from megarl.report.run_data import run_data
from megarl.report.run_files import read_run
from megarl.report.sample_file import file_samples
from megarl.samples.parquet import writing
from megarl.types import Prompt, SampleGroup, SamplePart, UserError
from tests.report.browser import needs_chromium, opened
from tests.report.runs import a_run
from tests.samples.responses import response, with_row
from tests.tracking.test_run_log import recipe_in

PROMPT = Prompt("a", "1+1=", (3, 4), "2", {"data_source": "sums"})


def a_group(prompt: str) -> SampleGroup:
    """Two samples of three tokens; the first is of versions 4 and 5, and has the choices of two layers of 4 experts."""
    experts = np.array([[[0], [3]], [[0], [3]], [[1], [3]], [[0], [3]]], np.uint8)  # [T - 1, M, K]
    logp = np.array([-0.5, -1.25, -2.0], np.float32)
    parts = (SamplePart(4, 1), SamplePart(5, 2))
    first = response(
        PROMPT.token_ids, np.arange(5, 8), logp, "ab", parts=parts, routed_experts=experts
    )
    trained = np.array([True, False, True])
    plain = response(PROMPT.token_ids, np.arange(5, 8), np.where(trained, logp, 0), "cd")
    second = with_row(plain, trained_T=trained)
    rewards = np.array([1.0, 0.25], np.float32)
    return SampleGroup(replace(PROMPT, text=prompt), (first, second), rewards, rewards > 0.5)


def a_file(folder: Path) -> Path:
    """The samples of one group."""
    with writing(folder / "samples.parquet", 112, 1.0) as file:
        file.write([a_group(PROMPT.text)])
    return folder / "samples.parquet"


def recipe_of(folder: Path, model: Path) -> Recipe:
    return recipe_in(folder, f"model.path={model}")


def test_each_sample_has_its_tokens_and_its_source(tmp_path: Path, tiny_model: Path) -> None:
    first, second = file_samples(a_file(tmp_path), recipe_of(tmp_path, tiny_model)).samples
    assert (first["step"], first["group"], first["sample"]) == (1, 0, 0)
    assert (first["reward"], first["correct"], first["source"], first["version"]) == (
        *(1.0, True, "sums", 5),
    )
    assert (second["reward"], second["correct"], second["length"]) == (0.25, False, 2)
    (row,) = first["rows"]
    assert row["logp"] == [-0.5, -1.25, -2.0]
    assert row["parts"] == [[4, 1], [5, 2]]
    assert len(row["tokens"]) == 3 and all(row["tokens"])
    assert second["rows"][0]["trained"] == [1, 0, 1]


def test_the_load_of_an_expert_is_its_tokens_over_its_layers_mean(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Of four tokens three chose expert 0 of the first layer and one expert 1; all chose expert 3 of the second."""
    result = file_samples(a_file(tmp_path), recipe_of(tmp_path, tiny_model))
    assert result.expert_load == [[3.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]


def test_without_the_tokenizer_tokens_are_numbers(tmp_path: Path) -> None:
    result = file_samples(a_file(tmp_path), recipe_of(tmp_path, tmp_path / "gone"))
    assert result.samples[0]["rows"][0]["tokens"] == ["[5]", "[6]", "[7]"]
    assert result.notes[0].startswith("tokens are shown by their numbers: model.path: ")


def test_of_many_tokens_the_first_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_file, "_MOST_TOKENS", 4)
    result = file_samples(a_file(tmp_path), recipe_of(tmp_path, tmp_path / "gone"))
    assert ["rows" in sample for sample in result.samples] == [True, False]
    assert result.notes[-1].endswith("has 6 tokens: the first 4 are shown")


def test_of_a_file_with_much_text_evenly_chosen_samples_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "samples.parquet"
    with writing(file, 112, 1.0) as writer:
        writer.write([a_group(f"{number} " + "long " * 100) for number in range(10)])
    recipe = recipe_of(tmp_path, tmp_path / "gone")
    whole = file_samples(file, recipe).samples
    assert len(whole) == 20
    num_bytes = sum(len(json.dumps(sample | {"rows": []})) for sample in whole)
    monkeypatch.setattr(sample_file, "MOST_SAMPLE_BYTES", num_bytes // 2)
    result = file_samples(file, recipe)
    assert result.samples == whole[::3]
    assert result.notes[-1] == f"{file} is large: one of 3 samples is shown"
    monkeypatch.setattr(sample_file, "MOST_SAMPLE_BYTES", 1)
    assert file_samples(file, recipe).samples == whole[:1]


def test_a_file_is_of_one_run(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, f"run.name={name}") for name in ("a", "b")]
    file = a_file(tmp_path)
    with pytest.raises(UserError, match="--samples"):
        write_reports(runs, None, print, compares=True, plans=False, samples=file)
    (runs[0] / "recipe.yaml").unlink()
    with pytest.raises(UserError, match="--samples"):
        write_reports(runs[:1], None, print, compares=False, plans=False, samples=file)


@pytest.mark.slow
@needs_chromium
def test_tokens_are_coloured_by_log_probability_or_version(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = a_run(tmp_path, f"model.path={tiny_model}")
    target = tmp_path / "page.html"
    file = a_file(tmp_path)
    write_reports([run], target, print, compares=False, plans=False, samples=file)
    colours = (
        "return [...document.querySelectorAll('.tokens span')].map(span => span.style.background)"
    )
    with opened(target, tmp_path) as page:
        page.draw_all()
        by_logp = page.run(colours)
        assert len(set(by_logp)) == 3
        page.run(
            "const choice = document.querySelector('.detail select');"
            "choice.selectedIndex = 1; choice.dispatchEvent(new Event('change'))"
        )
        old, new, newest = page.run(colours)
        assert new == newest != old
        assert page.run("return document.querySelectorAll('#experts .plot .main-svg').length") > 0
        assert page.errors() == []


def test_the_page_without_a_file_has_no_load_of_experts(tmp_path: Path) -> None:
    assert run_data(read_run(a_run(tmp_path)))["expert_load"] is None
