"""A machine with a GPU, a driver and megarl's packages, as megarl itself sees it."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megarl.cluster.stillness import Stillness, work_of
from megarl.cluster.visible_gpus import device_errors, num_listed_gpus

ROOT = Path(__file__).parents[2]
ERRORS = "from megarl.cluster.visible_gpus import device_errors; print(*device_errors())"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@needs_gpu
def test_the_driver_lists_the_gpus_that_torch_sees() -> None:
    assert num_listed_gpus() >= torch.cuda.device_count() > 0
    assert device_errors() == []


@needs_gpu
def test_a_process_that_waits_for_its_gpu_does_not_stand_still() -> None:
    """Unverified on a GPU.

    cluster/stillness.py: while its kernels compute for seconds, a rank is in the driver, which by default spins on a
    processor. Where it sleeps instead, ranks with long kernels would be given up. To check first: the same where fewer
    processors than GPUs are left to the ranks.
    """
    stillness = Stillness()
    stillness.look(time.monotonic(), work_of(os.getpid()))
    torch.cuda._sleep(5 * 10**9)
    torch.cuda.synchronize()
    assert stillness.look(time.monotonic(), work_of(os.getpid())) == 0.0


@needs_gpu
def test_hidden_gpus_are_an_error_and_a_wish_for_the_cpu_is_none() -> None:
    """Each in a process of its own: torch looks once."""

    def said(**environment: str) -> str:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(
            [sys.executable, "-c", ERRORS],
            env=variables,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert said(CUDA_VISIBLE_DEVICES="").startswith("CUDA_VISIBLE_DEVICES: ''")
    assert said(CUDA_VISIBLE_DEVICES="", MEGARL_DEVICE="cpu") == ""


@needs_gpu
def test_cuda_calls_broken_hardware_what_we_look_for() -> None:
    """Unverified on a GPU.

    cluster/node_faults.py hardware_error: CUDA's texts are written from its documentation. To check first: the texts
    that `cudaGetErrorString` has for these numbers.
    """
    pytest.importorskip("ray", reason="nodes are Ray's")
    from megarl.cluster.node_faults import hardware_error

    torch.cuda.init()
    loaded = re.search(r"/\S*libcudart\S*", Path("/proc/self/maps").read_text())
    assert loaded
    library = ctypes.CDLL(loaded[0])
    library.cudaGetErrorString.restype = ctypes.c_char_p
    texts = {
        number: f"CUDA error: {library.cudaGetErrorString(number).decode()}"
        for number in (46, 100, 214, 220, 714, 721, 802, 999, 2, 700, 719)
    }
    software = {number for number, text in texts.items() if hardware_error(text) is None}
    assert software == {2, 700, 719}, texts


@needs_gpu
def test_nvidia_smi_is_understood() -> None:
    """Unverified on a GPU.

    doctor/nvidia.py: the words of `nvidia-smi --query-gpu`, of its heading and of `topo -m`, read as documented; no
    GPU has answered yet; the fields' older names. To check first: `megarl doctor --json` against what `nvidia-smi`,
    `nvidia-smi -q` and `nvidia-smi topo -m` print.
    """
    pytest.importorskip("pydantic", reason="the doctor is tested where everything is installed")
    from megarl.doctor.nvidia import gpu_facts

    facts = gpu_facts()
    assert facts.nvidia_smi == ""
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", facts.driver) and facts.driver_cuda
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    assert names <= {gpu.name for gpu in facts.gpus}


@needs_gpu
def test_the_packages_that_a_run_needs_are_the_locks_and_load() -> None:
    """Unverified on a GPU.

    requirements/gpu.txt, scripts/setup_env.sh on a machine with GPUs: pip has installed the lock without a GPU, and
    every library finds its symbols there (`tests/scripts/test_symbols.py`); not run: apex at its commit, the
    images. To check first: `bash -c 'source scripts/setup_env.sh'` on a node, then `python -c 'import
    transformer_engine.pytorch, sglang'`.

    doctor/packages.py torch_facts, import_errors: what torch says of CUDA, NCCL and cuDNN in a process of its own;
    that TransformerEngine, SGLang's kernels and the memory saver are imported there. To check first: a node on
    which all of it is installed has no finding; with each package removed it has that one.
    """
    pytest.importorskip("sglang", reason="the packages are tested where everything is installed")
    from megarl.doctor.packages import MODULES, import_errors, versions

    lines = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8").splitlines()
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), re.MULTILINE))
    wrong = {
        name: version
        for name, version in versions().items()
        if lock.get(name, version) != version.split("+")[0]
    }
    assert wrong == {}
    errors = import_errors()
    optional = {"flash_attn"}  # cuDNN's attention is used
    assert {
        name: errors[name] for name in MODULES if errors.get(name) and name not in optional
    } == {}
    importlib.import_module("transformer_engine.pytorch")


@needs_gpu
def test_a_sound_machine_has_no_error() -> None:
    """Unverified on a GPU.

    doctor/rules_node.py: bounds of clocks, lanes, held memory, `nvidia_peermem` or open kernel modules, NVLinks of
    H800, fabric manager's error 802. To check first: a sound node has no warning; `modprobe -r nvidia_peermem`, a
    locked clock and a MIG instance each have theirs.
    """
    pytest.importorskip("sglang", reason="the doctor is tested where everything is installed")
    command = [sys.executable, "-m", "megarl.cli", "doctor"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
