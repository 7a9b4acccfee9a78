"""`megarl doctor` on two Ray nodes of this machine, each with an address of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.hardware import load_hardware
from megarl.device import DEVICE, is_loopback
from megarl.training.flops import peak_flops
from tests.ray_nodes import RayNodes, inherited

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
HEAD = os.environ.get("RAY_ADDRESS", "").rpartition(":")[0]
JOINS_OTHERS = HEAD != "" and not is_loopback(HEAD)
_LIMIT_S = 300.0


def megarl(
    folder: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.cli", *arguments]
    variables = environment | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_LIMIT_S
    )


class Nodes(RayNodes):
    """Two nodes of two simulated GPUs each; the second has a package more, and a variable of NCCL's."""

    def start_both(self) -> None:
        extra = self.folder / "site" / "apex-0.1.dist-info"
        extra.mkdir(parents=True)
        (extra / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
        self.start_head(FIRST)
        site = os.pathsep.join([str(ROOT), str(self.folder / "site")])
        self.join(SECOND, PYTHONPATH=site, NCCL_IB_HCA="mlx5_1")
        self.wait_for(2)

    def doctor(
        self, *arguments: str, token: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        joins = {"RAY_ADDRESS": self.address, "RAY_AUTH_TOKEN_PATH": str(token or self.token)}
        return megarl(self.folder, self.environment() | joins, "doctor", *arguments)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("doctor")
    with (
        tempfile.TemporaryDirectory(prefix="d-", dir="/tmp") as disk,
        Nodes(folder, Path(disk), gpus=2) as two_nodes,
    ):
        two_nodes.start_both()
        yield two_nodes


def test_this_machine_measures_itself_and_a_plan_takes_it(inputs: Path, tmp_path: Path) -> None:
    """Unverified on a GPU.

    doctor/rates.py: products, copies, pinned copies, sends around a ring and all-reduces over NCCL, timed. To check
    first: the rates against `nccl-tests` and the data sheet; `megarl plan --hardware` with the file against the
    first run's step.
    """
    environment = inherited("RAY_") | {"OMP_NUM_THREADS": "1"}
    file = tmp_path / "mine.yaml"
    done = megarl(inputs, environment, "doctor", "--measure", "--out", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"measured: {file}, for megarl plan RECIPE --hardware {file}" in done.stdout.splitlines()
    recipe = str(ROOT / "recipes/quickstart.yaml")
    plan = megarl(inputs, environment, "plan", recipe, "--hardware", str(file), "--json")
    # whether the quickstart fits on a GPU like that is not the question
    assert plan.returncode in (0, 2), plan.stderr
    planned, card = json.loads(plan.stdout), load_hardware(file)
    assert planned["memory"]["capacity_bytes"] == card.memory_bytes
    assert planned["step"]["total_s"] > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="peaks are known of GPUs alone")
def test_products_reach_a_good_part_of_the_peak_and_no_more(tmp_path: Path) -> None:
    """A peak that is too low is passed; that of sparse products, twice the right one, is not reached by half.

    Unverified on a GPU.

    training/flops.py PEAKS, device.py gpu_name: the peaks are from data sheets, written from memory. To check
    first: NVIDIA's pages; measured products against the peak; `speed/train_mfu` of a known run.
    """
    for rate in measured_rates(tmp_path, inherited("RAY_"))["rates"]:
        peak = peak_flops(rate["device_name"])
        assert peak, f"megarl/training/flops.py has no peak of {rate['device_name']}"
        assert 0.4 < rate["matmul_flops"] / peak <= 1, rate["device_name"]


@pytest.mark.skipif(not JOINS_OTHERS, reason="RAY_ADDRESS names no cluster of several machines")
def test_several_machines_measure_the_links_between_them(tmp_path: Path) -> None:
    """Unverified on a GPU.

    cluster/ray_session.py _join, device.py use_network: several real machines: Ray nodes with their own addresses,
    gloo and NCCL on the interface that leads to the head; tried with Ray nodes on one machine. To check first: a
    two-node run of the quickstart; on nodes with several networks, what NCCL's log says of interfaces; the test
    runs `megarl doctor --measure` where RAY_ADDRESS names a cluster of several machines, and on one of them the
    quickstart is run by hand.
    """
    report = measured_rates(tmp_path, dict(os.environ))
    addresses = {node["address"] for node in report["facts"]}
    assert len(addresses) > 1 and not any(map(is_loopback, addresses))
    assert {rate["node"] for rate in report["rates"]} == {*range(len(addresses))}
    assert all(rate["between_bytes_per_s"] > 0 for rate in report["rates"])


def measured_rates(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What `megarl doctor --measure` says; its findings are not the question."""
    options = ("--measure", "--json", "--out", str(folder / "mine.yaml"))
    done = megarl(folder, environment, "doctor", *options)
    assert done.returncode in (0, 2), done.stdout + done.stderr
    return json.loads(done.stdout)


def test_both_nodes_are_looked_at_measured_and_told_apart(nodes: Nodes) -> None:
    file = nodes.folder / "hardware.yaml"
    done = nodes.doctor("--measure", "--out", str(file), "--json")
    assert done.returncode == 2, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {node["address"]: node["ray_gpus"] for node in report["facts"]} == {FIRST: 2, SECOND: 2}
    assert report["facts"][0]["address"] == FIRST, "this command's own node"
    lines = {
        (finding["severity"], finding["where"], *finding["nodes"]): finding["problem"]
        for finding in report["findings"]
    }
    assert lines["error", "apex", SECOND] == "0.1, where 1 node has nothing"
    assert lines["warning", "NCCL_IB_HCA", SECOND] == "mlx5_1, where 1 node has nothing"
    assert [key for key in lines if key[0] == "error"] == [("error", "apex", SECOND)]
    for node in report["facts"]:
        assert abs(node["clock_offset_s"]) <= node["clock_error_s"], (
            "two processes of one machine have one clock"
        )
        assert node["folders"][0]["is_shared"] is True
    assert [(rate["node"], rate["between_bytes_per_s"] > 0) for rate in report["rates"]] == [
        (0, True), (0, True), (1, True), (1, True),
    ]  # fmt: skip
    card = load_hardware(file)
    assert card.gpus_per_node == 2
    assert card.nic_bytes_per_s == pytest.approx(
        min(rate["between_bytes_per_s"] for rate in report["rates"]), rel=1e-5
    )
    leftovers = [path.name for path in nodes.folder.iterdir() if path.name.startswith(".megarl")]
    assert leftovers == [], "the file by which nodes know a shared disk"


@pytest.mark.nightly  # tests/cluster/test_ray_session.py has a client with a wrong token
def test_a_wrong_token_is_named_and_this_machine_is_looked_at_all_the_same(nodes: Nodes) -> None:
    wrong = nodes.folder / "wrong"
    wrong.write_text("6" * 64)
    wrong.chmod(0o600)
    done = nodes.doctor(token=wrong)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: RAY_ADDRESS: no Ray cluster can be joined at {nodes.address} (")
    assert "token that RAY_AUTH_TOKEN_PATH names" in line
    assert "note: GPUs: nvidia-smi lists none" in done.stdout
    assert "6" * 64 not in done.stdout + done.stderr
