"""What a summary keeps of a group."""

from __future__ import annotations

from megarl.samples.summaries import source_of


def test_the_source_of_a_row_is_short_and_empty_where_there_is_none() -> None:
    assert source_of({"data_source": "sums"}, "data_source") == "sums"
    assert source_of({"data_source": "x" * 200}, "data_source") == "x" * 100
    assert source_of({"data_source": 0}, "data_source") == "0"
    for row in ({}, {"data_source": None}):
        assert source_of(row, "data_source") == ""
    assert source_of({"data_source": "sums"}, "") == ""
