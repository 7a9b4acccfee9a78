"""The bar that is shown while something long is done before a run."""

from __future__ import annotations

import pytest

from megarl.tracking.progress import progress_bar


@pytest.mark.parametrize(("total", "told"), [(9_999, ""), (10_000, "[data] of a\n")])
def test_a_log_file_gets_one_line_of_what_is_long(
    total: int, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    with progress_bar("[data] of a", total) as done:
        done(total)
    assert capsys.readouterr() == ("", told)


def test_a_terminal_gets_a_bar_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar("[data] of a", 20_000) as done:
        done(5_000)
        done(15_000)
    out, err = capsys.readouterr()
    assert not out and "[data] of a" in err and "20000/20000" in err
