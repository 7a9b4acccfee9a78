"""Facts of this machine: real disks, ports and limits; RDMA cards as /sys has them."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megarl.device import listening_socket
from megarl.doctor import machine
from megarl.doctor.facts import UNLIMITED, Nic
from tests.cluster.test_topology import card, hgx
from tests.small_disk import small_disk

ROOT = Path(__file__).parents[2]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        with (
            (disk / "filler").open("ab", buffering=0) as file,
            pytest.raises(OSError, match="No space left"),
        ):
            while True:
                file.write(bytes(4096))
        folder = machine.folder(disk / "runs", "run.dir", is_written=True)
        assert (folder.exists, folder.is_written, folder.total_bytes) == (False, True, 2**20)
        assert folder.error == "no space left" and folder.write_bytes_per_s is None


def test_a_disk_has_its_size(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", "4m") as disk:
        total, free = machine.disk_bytes(disk)
    assert 0 < free <= total == 4 * 2**20
    assert machine.disk_bytes(tmp_path / "nowhere") == (0, 0)


def test_a_disk_with_room_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    folder = machine.folder(tmp_path, "run.dir", is_written=True)
    assert folder.error == "" and folder.exists and folder.file_system
    assert folder.write_bytes_per_s is not None and folder.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_only_read_is_not_written_to(tmp_path: Path) -> None:
    assert machine.folder(tmp_path, "model.path", is_written=False).write_bytes_per_s is None
    missing = machine.folder(tmp_path / "no" / "model", "model.path", is_written=False)
    assert (missing.exists, missing.is_written) == (False, False)


def test_a_folder_knows_whether_it_sees_the_first_nodes_file(tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    seen = [
        machine.folder(tmp_path / "runs", "run.dir", is_written=True, shared_name=name)
        for name in ("probe", "x")
    ]
    assert [folder.is_shared for folder in seen] == [True, False]
    assert machine.folder(tmp_path, "run.dir", is_written=True).is_shared is None


def test_a_port_that_is_taken_names_who_has_it() -> None:
    with listening_socket() as listener:
        number = listener.getsockname()[1]
        taken = machine.port(number)
    assert taken.taken_by == f"{psutil.Process().name()} (pid {os.getpid()})"
    assert machine.port(number).taken_by == ""


def test_a_port_on_which_only_a_connection_has_ended_is_free() -> None:
    # which lets others reuse its address, as servers do
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", number))
        server, _ = listener.accept()
        server.close()  # this side closes first, so that the port stays in TIME_WAIT
        client.close()
    assert machine.port(number).taken_by == ""


@pytest.mark.slow
def test_the_limits_are_the_soft_ones_of_the_process() -> None:
    program = (
        "import json, resource; from megarl.doctor import machine;"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]));"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (777, resource.getrlimit(resource.RLIMIT_NOFILE)[1]));"
        "found = machine.limits(); print(json.dumps([found.memlock_bytes, found.num_files]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    memlock, files = json.loads(done.stdout)
    assert (memlock, files) == (65536, 777)
    soft_limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    num_processes = machine.limits().num_processes
    assert (
        num_processes == UNLIMITED
        or soft_limit == resource.RLIM_INFINITY
        or num_processes <= soft_limit
    )


def test_the_tightest_control_group_bounds_the_host(tmp_path: Path) -> None:
    assert machine.host_bytes(tmp_path) == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.host_bytes(tmp_path) == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text(f"{10**9}\n")
    assert machine.host_bytes(tmp_path) == 10**9


def test_of_the_environment_only_what_libraries_read_is_told() -> None:
    secrets = ["WANDB_API_KEY", "SGLANG_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN"]
    unread = ["PATH", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"]
    read = {"NCCL_IB_HCA": "mlx5", "RAY_AUTH_MODE": "token"}
    assert machine.environment((dict.fromkeys(secrets + unread, "x") | read).items()) == read


def test_the_digest_is_of_every_python_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = machine.source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert machine.source_digest(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert machine.source_digest(tmp_path) != before


def test_every_port_has_its_state_and_rate(tmp_path: Path) -> None:
    card(tmp_path, "pci0000:15", "0000:15:01.0", 0, "mlx5_10")
    card(tmp_path, "pci0000:15", "0000:15:02.0", 0, "mlx5_2", "1: DOWN")
    port = tmp_path / "class/infiniband/mlx5_10/ports/1"
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    assert machine.nics(tmp_path) == [
        Nic("mlx5_2", 1, False, None, ""),
        Nic("mlx5_10", 1, True, 400.0, "InfiniBand"),
    ]
    assert machine.nics(tmp_path / "nothing") == []


def test_cards_that_gpus_share_are_told_and_gpus_that_sys_hides_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    gpus = hgx(tmp_path, {0: "mlx5_0", 1: "mlx5_1"})[:4]
    cards, errors = machine.gpu_nics([*gpus, "0000:ff:00.0"], "10.0.0.1", tmp_path)
    assert [cards[gpu] for gpu in gpus[:2]] == ["mlx5_0", "mlx5_1"] and len(cards) == 4
    assert any("share the network card" in error for error in errors)
    assert machine.gpu_nics(["0000:ff:00.0"], "10.0.0.1", tmp_path) == ({}, ())
