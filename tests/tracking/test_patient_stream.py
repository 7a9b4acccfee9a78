"""A log whose disk is full for a while has every line once, in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from megarl.tracking.patient_stream import PatientStream
from tests.small_disk import small_disk
from tests.test_disk import fill


def test_what_a_full_disk_does_not_take_is_printed_later(tmp_path: Path) -> None:
    lines = [f"line {number} {'x' * 3000}" for number in range(9)]
    with small_disk(tmp_path / "disk", "1m") as disk:
        with (disk / "log").open("w", encoding="utf-8") as log:
            stream = PatientStream(log)
            console = Console(file=stream, width=4000)  # type: ignore[arg-type]
            for number, line in enumerate(lines):
                if number == 2:
                    filler = fill(disk)
                if number == 7:
                    assert 0 < (disk / "log").stat().st_size < 4 * 4096
                    filler.unlink()
                console.print(line)
        assert (disk / "log").read_text() == "".join(f"{line}\n" for line in lines)


def test_of_too_many_lines_the_oldest_are_lost_and_counted(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        filler = fill(disk)
        with (disk / "log").open("w", encoding="utf-8") as log:
            stream = PatientStream(log, most_bytes=30)
            for number in range(10):
                stream.write(f"line {number}...\n")
                stream.flush()
            filler.unlink()
            stream.flush()
        said = "8 lines of this log are lost: its disk was full"
        assert (disk / "log").read_text().splitlines() == [said, "line 8...", "line 9..."]


def test_a_reader_that_has_gone_is_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, pytest.raises(BrokenPipeError):
        stream = PatientStream(pipe)
        stream.write("x")
        stream.flush()


def test_what_others_print_comes_in_its_place(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        stream = PatientStream(log)
        print("first", file=log)
        stream.write("second\n")
        stream.flush()
        print("third", file=log, flush=True)
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird\n"
