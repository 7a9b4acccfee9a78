"""`megarl report`: write the page of a run, or of several that are laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.disk import output_error, writing
from megarl.printable import Say
from megarl.report.page import page
from megarl.report.planned import Planned, planned
from megarl.report.run_data import run_data
from megarl.report.run_files import FolderContents, read_run
from megarl.report.sample_file import FileSamples, file_samples
from megarl.report.watch import FollowedRun, PageServer
from megarl.types import UserError, UserErrors

_PAGE = "report.html"
_COMPARISON = "comparison.html"


def write_reports(
    folders: Sequence[Path],
    out: Path | None,
    say: Say,
    *,
    compares: bool,
    plans: bool,
    samples: Path | None = None,
) -> None:
    """Write a page of each run, or one of all. out: None: into the run's folder.

    plans: with what follows from the recipe alone, for which the model's folder is read. samples: a file of samples of
    the only run, in place of samples.jsonl.

    Raises UserError where a folder is no run's, and UserErrors where a page cannot be written, before any is.
    """
    runs = [read_run(folder) for folder in folders]
    if out and len(runs) > 1 and not compares:
        problem = f"{out} is one page, and these are {len(runs)} runs"
        raise UserError("--out", problem, "add --compare to lay them over each other")
    samples_of_file = _samples_of_file(runs, samples)
    if compares:
        pages = {out or folders[0] / _COMPARISON: runs}
    else:
        pages = {out or run.folder / _PAGE: [run] for run in runs}
    errors = [output_error(target, "--out", replaces=True) for target in pages]
    if any(errors):
        raise UserErrors([error for error in errors if error])
    for target, on_page in pages.items():
        html = page([run_data(run, _planned(run, plans), samples_of_file) for run in on_page])
        _write_page(html, target, say)


def refuse_with_watch(out: Path | None, samples: Path | None, *, compares: bool) -> None:
    """Raises UserError for the first of these options that contradicts --watch. They are as of `write_reports`."""
    problems = (
        (out is not None, "--out", "--watch serves the page and writes no file"),
        (samples is not None, "--samples", "--watch follows samples.jsonl"),
        (compares, "--compare", "--watch lays several runs over each other by itself"),
    )
    for is_given, option, problem in problems:
        if is_given:
            raise UserError(option, problem, "leave one of them out")


def watch_runs(folders: Sequence[Path], port: int, say: Say, *, plans: bool) -> None:
    """Serve a page that follows runs, until Ctrl-C. port: 0: a free one. plans: as of `write_reports`.

    Raises UserError where a folder is no run's, or the port is taken.
    """
    runs = [FollowedRun(folder, plans) for folder in folders]
    for run in runs:
        run.data()
    with PageServer(runs, port) as server:
        say(f"{server.address} follows the runs until Ctrl-C")
        server.serve_forever()


def _planned(run: FolderContents, plans: bool) -> Planned | None:
    return planned(run.recipe) if run.recipe and plans else None


def _samples_of_file(runs: Sequence[FolderContents], path: Path | None) -> FileSamples | None:
    """What a file of samples has; None without one. Raises UserError."""
    if path is None:
        return None
    recipe = runs[0].recipe
    if len(runs) > 1 or recipe is None:
        problem = f"{path} is of one run, whose recipe.yaml this version can read"
        raise UserError("--samples", problem, "name that run's folder alone")
    return file_samples(path, recipe)


def _write_page(html: str, target: Path, say: Say) -> None:
    with writing(target.absolute().parent, target.name, "--out"):
        partial = target.with_name(f".{target.name}.partial")
        partial.write_text(html, encoding="utf-8")
        partial.replace(target)
    say(f"{target}: {len(html) / 2**20:.1f} MiB, to be opened in a browser")
