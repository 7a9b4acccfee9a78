"""What a run reads of the requests for engines that are left in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.tracking.engine_requests import request_engines, requested_engines


def test_the_newest_request_stands(tmp_path: Path) -> None:
    assert requested_engines(tmp_path) is None
    for count in (3, 12, 3):
        request_engines(tmp_path, count)
        assert requested_engines(tmp_path) == requested_engines(tmp_path) == count
    assert [path.name for path in tmp_path.iterdir()] == [".engines"]


@pytest.mark.parametrize("text", ["", "two", "1.5", "\xff"])
def test_a_file_that_is_no_request_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".engines").write_text(text, encoding="latin-1")
    assert requested_engines(tmp_path) is None


def test_a_folder_that_is_gone_takes_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        request_engines(tmp_path / "gone", 2)
    assert requested_engines(tmp_path / "gone") is None
