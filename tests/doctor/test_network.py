"""RDMA cards as /sys has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.doctor import network
from megarl.doctor.facts import Nic
from tests.cluster.test_topology import card, hgx


def test_every_port_has_its_state_and_rate(tmp_path: Path) -> None:
    card(tmp_path, "pci0000:15", "0000:15:01.0", 0, "mlx5_10")
    card(tmp_path, "pci0000:15", "0000:15:02.0", 0, "mlx5_2", "1: DOWN")
    port = tmp_path / "class/infiniband/mlx5_10/ports/1"
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    assert network.nics(tmp_path) == [Nic("mlx5_2", 1, False, None, ""), Nic("mlx5_10", 1, True, 400.0, "InfiniBand")]
    assert network.nics(tmp_path / "nothing") == []


def test_cards_that_gpus_share_are_told_and_gpus_that_sys_hides_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    gpus = hgx(tmp_path, {0: "mlx5_0", 1: "mlx5_1"})[:4]
    found = network.gpu_nics([*gpus, "0000:ff:00.0"], tmp_path)
    assert [found[gpu] for gpu in gpus[:2]] == ["mlx5_0", "mlx5_1"] and len(found) == 4
    assert any("share the network card" in said for said in network.nic_faults(gpus, "10.0.0.1", tmp_path))
    assert network.nic_faults(["0000:ff:00.0"], "10.0.0.1", tmp_path) == []
