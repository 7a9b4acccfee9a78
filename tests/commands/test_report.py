"""`megarl report`: which pages it writes, and what it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megarl import cli
from megarl.commands.report import write_reports
from megarl.types import UserError, UserErrors
from tests.report.runs import a_run


def test_a_page_lies_in_each_runs_folder(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, f"run.name={name}") for name in ("a", "b")]
    lines: list[str] = []
    write_reports(runs, None, lines.append, compares=False, plans=False)
    assert [line.split(": ")[0] for line in lines] == [str(run / "report.html") for run in runs]
    for run in runs:
        html = (run / "report.html").read_text(encoding="utf-8")
        assert html.startswith("<!doctype html>")
        assert html.count(f'"name":"{run.name}"') == 1
        assert not list(run.glob(".*.partial"))


def test_runs_that_are_compared_have_one_page(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, f"run.name={name}") for name in ("a", "b")]
    write_reports(runs, tmp_path / "x.html", lambda _: None, compares=True, plans=False)
    html = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert '"name":"a"' in html
    assert '"name":"b"' in html
    write_reports(runs, None, lambda _: None, compares=True, plans=False)
    assert (runs[0] / "comparison.html").is_file()


def test_a_page_is_written_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "report.html").write_text("old")
    write_reports([run], None, lambda _: None, compares=False, plans=False)
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("runs", "out", "says"),
    [
        (["no"], None, "has no metrics.jsonl"),
        (["try", "no"], None, "has no metrics.jsonl"),
        (["try"], "no/x.html", "is not a folder"),
        (["try"], "try", "it is a folder"),
        (["try", "try"], "x.html", "is one page, and these are 2 runs; add --compare"),
    ],
)
def test_what_cannot_be_written_is_told(
    tmp_path: Path, runs: list[str], out: str | None, says: str
) -> None:
    a_run(tmp_path)
    folders = [tmp_path / run for run in runs]
    target = tmp_path / out if out else None
    with pytest.raises((UserError, UserErrors), match=says):
        write_reports(folders, target, lambda _: None, compares=False, plans=False)
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--out", "x.html"], "--out: --watch serves the page and writes no file"),
        (["--samples", "x.parquet"], "--samples: --watch follows samples.jsonl"),
        (["--compare"], "--compare: --watch lays several runs over each other by itself"),
    ],
)
def test_options_that_contradict_watching_are_refused(
    tmp_path: Path, options: list[str], says: str
) -> None:
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "no"), "--watch", *options])
    assert result.exit_code == 2
    assert result.stderr == f"{says}; leave one of them out\n"
