"""Facts of the installed packages. Those that start CUDA or load kernels are imported in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from megarl.doctor.facts import Torch

# Distributions whose versions must be equal on all nodes.
DISTRIBUTIONS = (
    "torch", "megatron-core", "sglang", "sglang-kernel", "transformer-engine", "transformer-engine-torch", "flash-attn",
    "flash-attn-3", "flash-attn-4", "flashinfer-python", "sgl-deep-gemm", "torch-memory-saver", "ray", "transformers",
    "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "numpy", "safetensors",
    "apex", "psutil",
)  # fmt: skip
# Modules that a GPU run loads: a kernel that was built for another torch or CUDA shows on import alone.
MODULES = ("transformer_engine.pytorch", "sgl_kernel", "flashinfer", "flash_attn", "torch_memory_saver")
_PINNED_BY_SGLANG = ("torch", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python", "transformers")
_IMPORT_S = 180.0  # a cold shared disk takes its time
_TORCH = """
import json, torch
said = {"version": torch.__version__, "cuda": torch.version.cuda or ""}
if torch.version.cuda:
    try:
        torch.cuda.init()
        said["num_devices"] = torch.cuda.device_count()
    except Exception as error:
        said["error"] = str(error).strip().splitlines()[0]
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    said["cudnn"] = str(torch.backends.cudnn.version() or "")
print("\\n" + json.dumps(said))
"""


def versions() -> dict[str, str]:
    """Of the distributions that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def sglang_pins() -> dict[str, str]:
    """The exact versions that the installed SGLang demands of what holds its kernels."""
    try:
        demands = metadata.requires("sglang") or []
    except metadata.PackageNotFoundError:
        return {}
    return pins(demands)


def pins(demands: list[str]) -> dict[str, str]:
    """Name and version of the `name==version` among a distribution's requirements that count here."""
    found = {}
    for text in demands:
        try:
            demand = Requirement(text)
        except InvalidRequirement:
            continue
        name, exact = canonicalize_name(demand.name), [one.version for one in demand.specifier if one.operator == "=="]
        if name in _PINNED_BY_SGLANG and exact and not demand.marker:
            found[name] = exact[0]
    return found


def torch_facts() -> Torch:
    """Asked of torch in another process: this one must not hold a CUDA context."""
    output, error = _python(_TORCH)
    if error:
        return Torch(error=error)
    return torch_of(json.loads(output.strip().splitlines()[-1]))


def torch_of(said: Mapping[str, object]) -> Torch:
    return Torch(**said)  # type: ignore[arg-type]


def import_errors(modules: tuple[str, ...] = MODULES) -> dict[str, str]:
    """By module why it cannot be imported; "" where it can."""
    return {name: import_error(name) for name in modules}


def import_error(module: str) -> str:
    """In another process: a kernel of another build may end the one that loads it."""
    error = _python(f"import {module}")[1]
    absent = f"ModuleNotFoundError: No module named {module.partition('.')[0]!r}"
    return "not installed" if error == absent else error


def _python(program: str) -> tuple[str, str]:
    """What a program prints, and the last line of why it failed."""
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return "", f"no end after {_IMPORT_S:.0f} s"
    if done.returncode == 0:
        return done.stdout, ""
    ended = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return "", next(reversed(done.stderr.strip().splitlines()), ended)
