"""`megarl report`: write the page of a run, or of several that are laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.disk import output_error, writing
from megarl.printable import Say
from megarl.report.page import page
from megarl.report.run_data import run_data
from megarl.report.run_files import read_run
from megarl.types import UserError

_PAGE = "report.html"
_COMPARISON = "comparison.html"


def write_reports(
    folders: Sequence[Path], out: Path | None, say: Say, *, compares: bool, plans: bool
) -> None:
    """Write a page of each run, or one of all. out: None: into the run's folder. plans: as of `run_data`.

    Raises UserError where a folder is no run's, or the disk refuses a page.
    """
    if compares:
        _write_report(folders, out or folders[0] / _COMPARISON, say, plans=plans)
        return
    if out and len(folders) > 1:
        problem = f"{out} is one page, and these are {len(folders)} runs"
        raise UserError("--out", problem, "add --compare to lay them over each other")
    for folder in folders:
        _write_report([folder], out or folder / _PAGE, say, plans=plans)


def _write_report(folders: Sequence[Path], target: Path, say: Say, *, plans: bool) -> None:
    runs = [read_run(folder) for folder in folders]
    if error := output_error(target, "--out", replaces=True):
        raise error
    html = page([run_data(run, plans=plans) for run in runs])
    with writing(target.absolute().parent, target.name, "--out"):
        partial = target.with_name(f".{target.name}.partial")
        partial.write_text(html, encoding="utf-8")
        partial.replace(target)
    say(f"{target}: {len(html) / 2**20:.1f} MiB, to be opened in a browser")
