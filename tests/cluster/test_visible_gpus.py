"""A torch that does not see the machine's GPUs is refused, before a run and on every node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.cluster import actor, visible_gpus
from megarl.types import UserError

ROOT = Path(__file__).parents[2]
TWO_GPUS = 'echo "GPU 0: NVIDIA H800 (UUID: GPU-0)"; echo "GPU 1: NVIDIA H800 (UUID: GPU-1)"'


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CPU build on any machine, and nothing said of the device."""
    monkeypatch.setattr(visible_gpus, "DEVICE", "cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    for name in (
        "MEGARL_DEVICE",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):
        monkeypatch.delenv(name, raising=False)


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str | None) -> None:
    """PATH with this nvidia-smi and the system's shell alone; None: with no nvidia-smi."""
    if body is not None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def told() -> list[tuple[str, str, str]]:
    return [(error.where, error.problem, error.hint) for error in visible_gpus.device_errors()]


@pytest.mark.parametrize(
    "body", [None, "exit 0", f"{TWO_GPUS}; exit 9", "echo No devices were found"]
)
def test_a_machine_without_gpus_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None
) -> None:
    driver(tmp_path, monkeypatch, body)
    assert told() == []


def test_the_cpu_build_beside_gpus_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, TWO_GPUS)
    ((where, problem, hint),) = told()
    assert where == "torch"
    assert problem.startswith(
        f"{torch.__version__} is a build without CUDA, and nvidia-smi lists 2 GPUs on "
    )
    assert "requirements/gpu.txt" in hint and "MEGARL_DEVICE=cpu" in hint
    monkeypatch.setattr(visible_gpus, "DEVICE", "cuda")
    assert told() == []


@pytest.mark.parametrize(
    ("visible", "where", "says"),
    [("", "CUDA_VISIBLE_DEVICES", "''"), (None, "torch", "(CUDA 13.0) sees no GPU")],
)
def test_a_cuda_build_that_sees_no_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, where: str, says: str
) -> None:
    driver(tmp_path, monkeypatch, TWO_GPUS)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ((key, problem, hint),) = told()
    assert key == where and says in problem and "MEGARL_DEVICE=cpu" in hint


@pytest.mark.parametrize(
    ("asked", "body", "wheres"),
    [
        ("cpu", TWO_GPUS, []),
        ("cuda", TWO_GPUS, ["torch"]),
        ("cuda", "exit 9", ["MEGARL_DEVICE"]),
        ("gpu", "exit 9", ["MEGARL_DEVICE"]),
        ("", "exit 9", []),
    ],
)
def test_what_is_asked_for_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, body: str, wheres: list[str]
) -> None:
    driver(tmp_path, monkeypatch, body)
    monkeypatch.setenv("MEGARL_DEVICE", asked)
    assert [where for where, _, _ in told()] == wheres


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_engines_cannot_map_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128,expandable_segments:True")
    assert told() == [], "the CPU's memory has no segments"
    monkeypatch.setattr(visible_gpus, "DEVICE", "cuda")
    ((where, problem, hint),) = told()
    assert (where, hint) == (name, "remove expandable_segments from it")
    assert problem.endswith("mapping such memory over CUDA IPC is not verified yet")
    monkeypatch.setenv(name, "expandable_segments:False")
    assert told() == []


def test_a_driver_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, "exec /bin/sleep 60")
    monkeypatch.setattr(visible_gpus, "_ANSWER_S", 0.1)
    assert told() == []


def test_every_process_of_a_run_looks_at_its_own_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor._check_device()
    driver(tmp_path, monkeypatch, TWO_GPUS)
    with pytest.raises(UserError, match="lists 2 GPUs"):
        actor._check_device()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "chosen"), [("", "cuda nccl"), ("cuda", "cuda nccl"), ("cpu", "cpu gloo")]
)
def test_the_cpu_can_be_chosen_where_torch_sees_gpus(asked: str, chosen: str) -> None:
    seen = "import torch; torch.cuda.is_available = lambda: True"
    program = f"{seen}; from megarl.device import BACKEND, DEVICE; print(DEVICE, BACKEND)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MEGARL_DEVICE": asked},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == chosen, done.stderr


@pytest.mark.slow
def test_the_command_refuses_with_its_other_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch sees GPUs")
    driver(tmp_path, monkeypatch, TWO_GPUS)
    command = [
        sys.executable,
        "-m",
        "megarl.cli",
        "train",
        str(ROOT / "recipes" / "quickstart.yaml"),
    ]
    overrides = [f"run.dir={tmp_path}", f"model.path={tmp_path / 'none'}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert any("is a build without CUDA, and nvidia-smi lists 2 GPUs" in line for line in lines), (
        done.stderr
    )
    assert any("model.path" in line for line in lines), done.stderr
