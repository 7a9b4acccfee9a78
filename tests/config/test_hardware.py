"""The hardware table: every file loads, and agrees with the peaks that MFU is reckoned with."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.hardware import load_hardware
from megarl.training.flops import PEAKS
from megarl.types import UserError, UserErrors

FILES = sorted((Path(__file__).parents[2] / "recipes" / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_card_agrees_with_the_peaks_of_mfu(file: Path) -> None:
    card = load_hardware(file)
    assert card.name.lower() == file.stem
    assert card.bf16_flops == PEAKS[card.name]
    assert card.fp8_flops == pytest.approx(2 * card.bf16_flops, rel=1e-3)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_figure_says_where_it_is_from(file: Path) -> None:
    lines = file.read_text().splitlines()
    bare = [line for line in lines if line and "#" not in line]
    assert [line for line in bare if not line.startswith("name:")] == ["gpus_per_node: 8"]


def test_links_are_each_way_and_slower_than_memory() -> None:
    cards = {file.stem: load_hardware(file) for file in FILES}
    assert cards["h800"].nvlink_bytes_per_s * 2 == 400e9
    for card in cards.values():
        assert card.pcie_bytes_per_s <= card.nic_bytes_per_s
        assert card.nic_bytes_per_s < card.nvlink_bytes_per_s < card.hbm_bytes_per_s


def test_an_unknown_key_is_told_with_line_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(FILES[0].read_text().replace("nic_share", "nic_shares"))
    line = 1 + [text.startswith("nic_shares") for text in file.read_text().splitlines()].index(True)
    with pytest.raises(UserErrors) as caught:
        load_hardware(file)
    assert str(caught.value) == f"{file}:{line}: unknown key nic_shares; did you mean nic_share?"


def test_no_hardware_is_an_error_that_lists_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(FILES[0].parents[2])
    with pytest.raises(
        UserError, match="placement.hardware: .*--hardware.*recipes/hardware/b200.yaml, .*h800.yaml"
    ):
        load_hardware(None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="a file like those"):
        load_hardware(None)
