"""The facts of a node's GPUs, read from `nvidia-smi` and the driver's files in /proc; changes nothing."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.doctor import nvidia
from megarl.doctor.facts import Gpu, Topology

_ANSWER_S = 60.0  # a GPU that has fallen off the bus makes nvidia-smi wait
_OPEN = "Open Kernel Module"


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs, the driver and the topology. error: why nvidia-smi, which is installed, fails."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    driver_cuda: str = ""
    topology: Topology = Topology()
    error: str = ""
    has_peermem: bool = False
    has_open_driver: bool = False


def gpu_facts(proc: Path = Path("/proc")) -> GpuFacts:
    """The GPUs' facts; empty without nvidia-smi, for then megarl cannot use a GPU."""
    if shutil.which("nvidia-smi") is None:
        return GpuFacts()
    kernel = GpuFacts(has_peermem=_has_module("nvidia_peermem", proc), has_open_driver=_is_open(proc))
    try:
        found, driver = _query()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return replace(kernel, error=_words(error))
    try:
        head, matrix = _ask(), _ask("topo", "-m")
    except (OSError, subprocess.SubprocessError):  # containers hide the topology from some
        head = matrix = ""
    return replace(
        kernel,
        gpus=tuple(found),
        driver=driver,
        driver_cuda=nvidia.driver_cuda(head),
        topology=nvidia.topology(matrix),
    )


def _query() -> tuple[list[Gpu], str]:
    """The GPUs and the driver's version; drivers before 535 have another name for the clocks' reasons."""
    try:
        return nvidia.gpus(_ask(*nvidia.query()))
    except subprocess.CalledProcessError:
        old = [nvidia.OLD_REASONS if name == nvidia.REASONS else name for name in nvidia.FIELDS]
        return nvidia.gpus(_ask(*nvidia.query(old)))


def _ask(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_ANSWER_S).stdout


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {_ANSWER_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stdout + error.stderr).strip().splitlines()  # nvidia-smi writes errors to standard output
        return lines[0] if lines else f"exit code {error.returncode}"
    return str(error)


def _has_module(name: str, proc: Path) -> bool:
    try:
        return any(line.split()[:1] == [name] for line in (proc / "modules").read_text().splitlines())
    except OSError:
        return False


def _is_open(proc: Path) -> bool:
    """Whether the driver's kernel modules are the open ones, which export GPU memory as dmabuf."""
    try:
        return _OPEN in (proc / "driver/nvidia/version").read_text()
    except OSError:
        return False
