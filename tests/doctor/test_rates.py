"""Ranks that measure one another over gloo, and the hardware file that is made of it."""

from __future__ import annotations

from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megarl.config.hardware import Hardware, load_hardware
from megarl.device import Address, address_of, host_store
from megarl.doctor import rates
from megarl.doctor.facts import RankRates
from megarl.doctor.measure import base_of, hardware_text, laggards
from megarl.doctor.rates import RateRank, Sizes
from tests import forked
from tests.doctor.nodes import sound

ROOT = Path(__file__).parents[2]
H800 = load_hardware(ROOT / "recipes/hardware/h800.yaml")
_TIMEOUT_S = 60.0
_SMALL = Sizes(4096, 65_536, 64, 16, 1)


def measuring(
    pipe: Connection, rank: int, num_ranks: int, node_ranks: int, address: Address
) -> None:
    """One rank, in a process of its own."""
    rates.CPU_SIZES = _SMALL
    measuring_rank = RateRank(rank, num_ranks, node_ranks, address, _TIMEOUT_S)
    pipe.send(asdict(measuring_rank.measure()))
    measuring_rank.close()


@pytest.mark.slow
def test_every_rank_measures_everything_that_it_has_a_peer_for() -> None:
    """Four ranks as on two nodes of two."""
    store = host_store(_TIMEOUT_S)
    started = [forked.start(measuring, rank, 4, 2, address_of(store)) for rank in range(4)]
    for rank, (process, pipe) in enumerate(started):
        values = pipe.recv()
        process.join(_TIMEOUT_S)
        assert process.exitcode == 0
        assert values.pop("node") == rank // 2
        assert values.pop("device_name") == ""
        assert values.pop("host_bytes_per_s") is None, "without a GPU nothing is copied to one"
        assert values.pop("communicator_bytes") is None, "nor is memory of one taken"
        assert all(value > 0 for value in values.values()), values


def gpu(**changed: object) -> RankRates:
    values: dict[str, object] = {
        "node": 0, "device_name": "NVIDIA H800", "memory_bytes": 84_930_000_000, "matmul_flops": 700e12,
        "copy_bytes_per_s": 2.9e12, "host_bytes_per_s": 55e9, "inside_bytes_per_s": 170e9, "between_bytes_per_s": 48e9,
        "inside_latency_s": 20e-6, "between_latency_s": 45e-6,
        "communicator_bytes": 300 << 20,
    }  # fmt: skip
    return RankRates(**(values | changed))  # type: ignore[arg-type]


def written(tmp_path: Path, *ranks: RankRates, base: Hardware | None = H800) -> Hardware:
    file = tmp_path / "mine.yaml"
    file.write_text(hardware_text(ranks, [sound()], base))
    assert all("#" in line for line in file.read_text().splitlines())
    return load_hardware(file)


def test_of_an_unknown_card_everything_is_as_measured(tmp_path: Path) -> None:
    slower = gpu(node=1, matmul_flops=600e12, inside_bytes_per_s=160e9, between_latency_s=50e-6)
    card = written(tmp_path, gpu(), slower, base=None)
    assert (card.name, card.gpus_per_node, card.fp8_flops) == ("NVIDIA H800", 1, None)
    assert (card.bf16_flops, card.hbm_bytes_per_s, card.host_bytes) == (600e12, 2.9e12, 2 * 10**12)
    assert (card.nvlink_bytes_per_s, card.nic_bytes_per_s) == (160e9, 48e9)
    assert (card.nic_latency_s, card.nvlink_share, card.nic_share) == (50e-6, 1.0, 1.0)
    assert card.disk_bytes_per_s == 5e9, "of the first folder that was written to"


def test_of_a_known_card_peaks_stay_and_links_are_the_measured_ones(tmp_path: Path) -> None:
    card = written(tmp_path, gpu(), gpu(node=0, inside_bytes_per_s=160e9), gpu(node=1), gpu(node=1))
    assert (card.name, card.bf16_flops, card.fp8_flops) == ("H800", H800.bf16_flops, H800.fp8_flops)
    assert (card.compute_share, card.hbm_share) == (H800.compute_share, H800.hbm_share)
    assert card.nvlink_bytes_per_s * card.nvlink_share == 160e9, "the slowest GPU's"
    assert (card.nic_bytes_per_s * card.nic_share, card.pcie_bytes_per_s) == (48e9, 55e9)
    assert (card.gpus_per_node, card.nvlink_latency_s) == (2, pytest.approx(20e-6))


def test_a_card_that_reaches_less_than_its_share_has_that_share(tmp_path: Path) -> None:
    card = written(tmp_path, gpu(matmul_flops=300e12, copy_bytes_per_s=1e12))
    assert card.compute_share == card.prefill_share == pytest.approx(300 / 989.4, rel=1e-3)
    assert card.hbm_share == pytest.approx(1 / 3.35, rel=1e-3)


def test_what_could_not_be_measured_is_the_cards_own(tmp_path: Path) -> None:
    peers = {"inside_bytes_per_s": None, "between_bytes_per_s": None, "inside_latency_s": None}
    card = written(tmp_path, gpu(**peers, between_latency_s=None, host_bytes_per_s=None))
    for name, value in H800:
        if name.startswith(("nvlink", "nic", "pcie")):
            assert getattr(card, name) == value, name


def test_what_a_group_of_nccls_takes_is_measured_or_the_cards_own(tmp_path: Path) -> None:
    base = H800.model_copy(update={"communicator_bytes": 123_456_789})
    assert (
        written(tmp_path, gpu(communicator_bytes=None), base=base).communicator_bytes == 123_456_789
    )
    measured = written(tmp_path, gpu(), gpu(communicator_bytes=500 << 20), base=base)
    assert measured.communicator_bytes == 500 << 20, "of the GPU where it took most"


def test_every_key_of_a_hardware_file_is_written(tmp_path: Path) -> None:
    # from its README: a doctor does not start it
    of_deepep = {"deepep_latency_s", "deepep_token_s"}
    assert written(tmp_path, gpu()).model_fields_set == set(Hardware.model_fields) - of_deepep


@pytest.mark.parametrize(
    ("name", "device", "is_it"),
    [
        ("H20", "NVIDIA H20-3e", True), ("H20", "NVIDIA H200", False), ("H200", "NVIDIA H200", True),
        ("NVIDIA L40S", "NVIDIA L40S", True), ("A100 80GB", "NVIDIA A100-SXM4-80GB", False), ("CPU", "", False),
    ],
)  # fmt: skip
def test_a_card_is_known_by_the_whole_words_of_its_name(
    name: str, device: str, is_it: bool
) -> None:
    assert H800.model_copy(update={"name": name}).is_card(device) == is_it


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H800", "H800"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H20-3e", "H20"), ("NVIDIA L40S", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_cards_own_file_is_found_by_its_name(device: str, name: str | None) -> None:
    base = base_of(device, ROOT / "recipes/hardware")
    assert (base.name if base else None) == name


def test_a_gpu_that_lags_behind_is_named_on_its_node() -> None:
    ranks = [gpu(node=rank // 4) for rank in range(8)]
    ranks[6] = gpu(node=1, matmul_flops=420e12)
    (finding,) = laggards(ranks, ["10.0.0.1", "10.0.0.2"])
    assert finding.line(2).startswith(
        "warning: 10.0.0.2: GPU 2: matrix products at 60% of the median GPU's rate; "
    )
    assert laggards(ranks[:2], ["10.0.0.1"]) == []
