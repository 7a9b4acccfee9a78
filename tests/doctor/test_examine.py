"""The command on this machine: real facts, with a program in nvidia-smi's place where GPUs are wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.hardware import load_hardware
from megarl.config.loading import load_recipe
from megarl.device import listening_socket
from megarl.doctor import measure
from megarl.doctor.examine import _measured, _token_findings
from megarl.doctor.findings import Finding, Report
from tests.doctor.nodes import SMI_HEAD, fake_smi, smi_csv, smi_topology, sound
from tests.doctor.test_rates import gpu

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes/quickstart.yaml"


def doctor(
    cwd: Path, *arguments: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "megarl.cli", "doctor", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_cpu_torch_beside_gpus_no_te_and_no_kernel_are_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, monkeypatch, smi_csv(), smi_topology(), SMI_HEAD)
    done = doctor(tmp_path)
    assert done.returncode == 2, done.stderr
    lines = done.stdout.splitlines()
    for start in (
        "error: torch: 2.13.0+cpu is a CPU build on a node with 8 GPUs",
        "error: transformer-engine: it cannot be imported (not installed)",
        "error: sglang-kernel: it cannot be imported (not installed)",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, lines
    assert lines[-1].startswith("megarl doctor: 1 node, 8 x NVIDIA H800: ")
    assert done.stderr == ""


@pytest.mark.slow
def test_a_port_and_a_recipes_errors_are_told_and_json_has_the_facts(tmp_path: Path) -> None:
    with listening_socket() as listener:
        port = listener.getsockname()[1]
        done = doctor(tmp_path, QUICKSTART, "train.pp=3", "--port", str(port), "--json")
    assert done.returncode == 2, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_code"] == 2 and report["hardware_file"] is None and report["rates"] == []
    wheres = [finding["where"] for finding in report["findings"] if finding["severity"] == "error"]
    assert {
        f"port {port}",
        "placement.gpus",
        "data.train",
        "models/tiny-qwen3-moe/config.json",
    } <= {*wheres}
    (node,) = report["facts"]
    assert node["versions"]["torch"] == "2.13.0+cpu" and node["limits"]["num_files"] != 0
    assert [folder["purpose"] for folder in node["folders"]][::2] == ["run.dir", "model.path"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_recipe_that_cannot_be_read_and_a_cluster_that_is_gone_keep_nothing_else_from_being_told(
    tmp_path: Path,
) -> None:
    with listening_socket() as listener:
        address = "{}:{}".format(*listener.getsockname())
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o644)
    done = doctor(
        tmp_path,
        QUICKSTART,
        "train.tpp=2",
        "--measure",
        RAY_ADDRESS=address,
        RAY_AUTH_TOKEN_PATH=str(token),
    )
    assert done.returncode == 2
    for start in (
        "error: override train.tpp=2: unknown key",
        f"error: RAY_ADDRESS: nobody answers at {address}",
        f"error: RAY_AUTH_TOKEN_PATH: {token} can be read by other users",
        "note: GPUs: nvidia-smi lists none",
    ):
        assert sum(line.startswith(start) for line in done.stdout.splitlines()) == 1, done.stdout
    assert "0" * 64 not in done.stdout + done.stderr
    assert [*tmp_path.iterdir()] == [token], "one machine's figures are not the cluster's"


def test_a_torch_that_cannot_be_imported_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open', name='torch')\n"
    )
    done = doctor(tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "torch: it cannot be imported (libcudart.so.13: cannot open); install it"
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_token_of_mode_600_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("x")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    token.chmod(0o640)
    assert [finding.where for finding in _token_findings()] == ["RAY_AUTH_TOKEN_PATH"]
    token.chmod(0o600)
    assert _token_findings() == []
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    assert _token_findings() == []


@pytest.mark.parametrize(
    ("severities", "code", "reward_result"),
    [
        ((), 0, "nothing must be corrected, 0 warnings"),
        (("warning", "note"), 0, "nothing must be corrected, 1 warning"),
        (("error", "warning", "warning"), 2, "1 error to correct, 2 warnings"),
    ],
)
def test_only_errors_fail(severities: tuple[str, ...], code: int, reward_result: str) -> None:
    findings = [Finding(severity, "a", "b", "c") for severity in severities]  # type: ignore[arg-type]
    report = Report([sound()], findings)
    assert report.exit_code == code
    assert len(report.lines()) == len(severities) + 1
    assert report.lines()[-1] == f"megarl doctor: 1 node, 8 x NVIDIA H800: {reward_result}"
    assert json.loads(report.to_json())["facts"][0]["gpus"][0]["pci"] == "0000:18:00.0"


def test_a_recipe_with_another_cards_file_is_measured_beside_the_cards_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letters of H20 are in H200."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(measure, "measure", lambda *_: ([gpu(device_name="NVIDIA H200")], []))
    recipe = load_recipe(QUICKSTART, ["placement.hardware=recipes/hardware/h20.yaml"])
    file = tmp_path / "mine.yaml"
    assert _measured(recipe, file, [sound()], [], print)
    assert load_hardware(file).name == "H200"
