"""Which network card each GPU gets, on trees of /sys as machines have them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from megarl.cluster.topology import (
    DevicePlacement,
    bundles_by_address,
    nearest_nics,
    own_placement,
    placement_among,
    placement_errors,
    placement_lines,
)
from megarl.types import UserError

ROOTS = (
    "pci0000:15",
    "pci0000:37",
    "pci0000:48",
    "pci0000:59",
    "pci0000:97",
    "pci0000:b7",
    "pci0000:c7",
    "pci0000:d7",
)


def device(sysfs: Path, bridges: str, address: str, numa: int) -> Path:
    """A PCI device below bridges, and its link in bus/pci."""
    folder = sysfs / "devices" / bridges / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    links = sysfs / "bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / address).symlink_to(os.path.relpath(folder, links))
    return folder


def card(
    sysfs: Path, bridges: str, address: str, numa: int, name: str, state: str = "4: ACTIVE"
) -> None:
    """A network card with one port, and its link in class/infiniband."""
    folder = device(sysfs, bridges, address, numa) / "infiniband" / name
    (folder / "ports/1").mkdir(parents=True)
    (folder / "ports/1/state").write_text(f"{state}\n")
    (folder / "device").symlink_to("../..")
    links = sysfs / "class/infiniband"
    links.mkdir(parents=True, exist_ok=True)
    (links / name).symlink_to(os.path.relpath(folder, links))


def hgx(sysfs: Path, names: dict[int, str]) -> list[str]:
    """Eight GPUs on switches of their own, four on each socket; names: of the cards on those switches."""
    gpus = []
    for index, root in enumerate(ROOTS):
        bus, numa = root[-2:], index // 4
        switch = f"{root}/0000:{bus}:01.0/0000:{bus[0]}8:00.0"
        gpus.append(f"00{bus}:19:00.0")
        device(sysfs, f"{switch}/00{bus}:01:00.0", gpus[-1], numa)
        if index in names:
            card(sysfs, f"{switch}/00{bus}:02:00.0", f"00{bus}:1a:00.0", numa, names[index])
    return gpus


def test_each_of_eight_gpus_gets_the_card_on_its_own_switch(tmp_path: Path) -> None:
    names = {
        0: "mlx5_10",
        1: "mlx5_9",
        2: "mlx5_2",
        3: "mlx5_3",
        4: "mlx5_1",
        5: "mlx5_0",
        6: "mlx5_7",
        7: "mlx5_4",
    }
    gpus = hgx(tmp_path, names)
    # for storage, on the root complex of GPU 0
    card(tmp_path, "pci0000:15/0000:15:02.0", "0000:aa:00.0", 0, "mlx5_5")
    expected = {gpus[index]: name for index, name in names.items()}
    assert nearest_nics(gpus, tmp_path) == expected
    assert nearest_nics(gpus[::-1], tmp_path) == expected, "in whatever order they are named"


def test_four_cards_serve_two_gpus_each_of_their_own_socket(tmp_path: Path) -> None:
    gpus = hgx(tmp_path, {0: "mlx5_0", 1: "mlx5_1", 4: "mlx5_2", 6: "mlx5_3"})
    nics_by_gpu = nearest_nics(gpus, tmp_path)
    assert Counter(nics_by_gpu.values()) == dict.fromkeys(
        ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), 2
    )
    assert {nics_by_gpu[gpu] for gpu in gpus[:4]} == {"mlx5_0", "mlx5_1"}
    assert [nics_by_gpu[gpus[index]] for index in (0, 1, 4, 6)] == [
        "mlx5_0",
        "mlx5_1",
        "mlx5_2",
        "mlx5_3",
    ]


def test_a_card_that_is_down_is_nobodys(tmp_path: Path) -> None:
    gpus = hgx(tmp_path, {index: f"mlx5_{index}" for index in range(8)})
    (tmp_path / "class/infiniband/mlx5_3/ports/1/state").write_text("1: DOWN\n")
    nics_by_gpu = nearest_nics(gpus, tmp_path)
    assert nics_by_gpu[gpus[3]] in {"mlx5_0", "mlx5_1", "mlx5_2"}, "another of its socket"
    assert {gpu: nics_by_gpu[gpu] for gpu in gpus if gpu != gpus[3]} == {
        gpu: f"mlx5_{index}" for index, gpu in enumerate(gpus) if index != 3
    }


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("mlx5_1", {"mlx5_1", "mlx5_10"}), ("=mlx5_1:1", {"mlx5_1"}), ("^mlx5_1", {"mlx5_2"}),
        ("^=mlx5_1,mlx5_2", {"mlx5_10"}), ("", {"mlx5_1", "mlx5_2", "mlx5_10"}), ("bond0", set()),
    ],
)  # fmt: skip
def test_cards_are_named_as_nccl_is_told(tmp_path: Path, wanted: str, expected: set[str]) -> None:
    gpus = hgx(tmp_path, {0: "mlx5_1", 1: "mlx5_2", 2: "mlx5_10"})
    assert set(nearest_nics(gpus, tmp_path, wanted).values()) == expected


def test_without_a_card_or_a_gpu_a_seat_says_so(tmp_path: Path) -> None:
    assert nearest_nics(hgx(tmp_path, {}), tmp_path) == {}
    gpus = sorted(path.name for path in (tmp_path / "bus/pci/devices").iterdir())
    placement = placement_among(2, gpus, "10.0.0.1", tmp_path)
    assert (placement.address, placement.gpu, placement.nic) == ("10.0.0.1", gpus[2], "")
    none = placement_among(0, [], "10.0.0.1", tmp_path)
    assert (none.gpu, none.nic) == ("", "")
    assert placement_errors([placement, none]) == []


def test_shared_cards_and_the_other_sockets_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    gpus = hgx(tmp_path, {0: "mlx5_0", 1: "mlx5_1"})
    placements = [placement_among(slot, gpus[2:6], "10.0.0.1", tmp_path) for slot in range(4)]
    assert [(placement.nic, placement.sharers, placement.crosses) for placement in placements] == [
        ("mlx5_0", 2, False), ("mlx5_0", 2, False), ("mlx5_1", 2, True), ("mlx5_1", 2, True),
    ]  # fmt: skip
    errors = [str(error) for error in placement_errors(placements)]
    assert len(errors) == 4
    assert f"rank 2's GPU {gpus[4]} sends through mlx5_1, which is on the other socket" in errors[0]
    assert "ranks 0, 1 share the network card mlx5_0" in errors[2]
    assert "ranks 2, 3 share the network card mlx5_1" in errors[3]


def test_ranks_are_listed_by_node() -> None:
    placements = [DevicePlacement("a", "10.0.0.1", "0000:18:00.0", "mlx5_0")]
    placements.append(DevicePlacement("a", "10.0.0.1", "0000:2a:00.0", "mlx5_1"))
    placements.append(DevicePlacement("b", "10.0.0.2", "", ""))
    assert placement_lines(placements) == [
        "a (10.0.0.1): ranks 0 0000:18:00.0 through mlx5_0, 1 0000:2a:00.0 through mlx5_1",
        "b (10.0.0.2): ranks 2",
    ]


def test_this_process_has_a_seat() -> None:
    """Unverified on a GPU.

    cluster/topology.py own_placement: a GPU's PCI address from torch's device properties; the tree of a real /sys,
    with cards whose virtual functions or bonds stand in class/infiniband. To check first: the card of each rank
    against `nvidia-smi topo -m` and against what NCCL's log (`NCCL_DEBUG=INFO`) says it uses.

    fleet/fleet.py _say_device_placements: the lines of GPUs and network cards of each node. To check first: they
    name what `nvidia-smi topo -m` shows.
    """
    placement = own_placement(0, "127.0.0.1")
    assert placement.host
    assert placement.address == "127.0.0.1"


def test_nodes_are_ordered_by_number_and_known_by_no_name() -> None:
    assert bundles_by_address({0: "10.0.0.10", 1: "10.0.0.9", 2: "10.0.0.1"}) == [2, 1, 0]
    with pytest.raises(UserError, match=r"placement\.network: .*'vm'.*--node-ip-address"):
        bundles_by_address({0: "10.0.0.1", 1: "vm"})
