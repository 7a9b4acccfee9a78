"""The facts of the installed packages; those that start CUDA or load kernels are imported in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

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
# Modules that a run on GPUs loads: only their import shows that a kernel was built for another torch or CUDA.
MODULES = (
    "transformer_engine.pytorch",
    "sgl_kernel",
    "flashinfer",
    "flash_attn",
    "torch_memory_saver",
)
_PINNED_BY_SGLANG = ("torch", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python", "transformers")
_IMPORT_S = 180.0  # from a cold shared disk
_CUDNN_FOLDERS = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
_TOOLKIT = Path("/usr/local/cuda")
_LDCONFIG = "/sbin/ldconfig"
_TORCH = """
import json, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda or ""}
if torch.version.cuda:
    try:
        torch.cuda.init()
        facts["num_devices"] = torch.cuda.device_count()
    except Exception as error:
        facts["error"] = str(error).strip().splitlines()[0]
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["cudnn"] = str(torch.backends.cudnn.version() or "")
print("\\n" + json.dumps(facts))
"""


def versions() -> dict[str, str]:
    """The versions of the installed distributions."""
    versions_by_name = {}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions_by_name[name] = metadata.version(name)
    return versions_by_name


def sglang_pins() -> dict[str, str]:
    """The exact versions that the installed SGLang requires of the packages with its kernels."""
    with suppress(metadata.PackageNotFoundError):
        return pins(metadata.requires("sglang") or [])
    return {}


def pins(demands: list[str]) -> dict[str, str]:
    """Name -> version of the relevant `name==version` requirements of a distribution."""
    versions_by_name = {}
    for text in demands:
        try:
            demand = Requirement(text)
        except InvalidRequirement:
            continue
        name = canonicalize_name(demand.name)
        exact = [specifier.version for specifier in demand.specifier if specifier.operator == "=="]
        if name in _PINNED_BY_SGLANG and exact and not demand.marker:
            versions_by_name[name] = exact[0]
    return versions_by_name


def foreign_cudnn(environment: Mapping[str, str], packages: Path, toolkit: Path = _TOOLKIT) -> str:
    """A cuDNN that is found before the environment's own package; "" where there is none.

    TransformerEngine looks in the folders of these variables first (common/__init__.py), in the toolkit's and where the
    loader looks for libcudnn.so; the loader itself takes LD_LIBRARY_PATH before the paths that torch names.
    packages: the folder of the environment's own packages.
    """
    named = [Path(environment[name]) for name in _CUDNN_FOLDERS if environment.get(name)]
    searched = [
        path for folder in (*named, toolkit) for path in sorted(folder.glob("**/libcudnn.so*"))
    ]
    paths = filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))
    searched += [path for folder in paths for path in sorted(Path(folder).glob("libcudnn.so*"))]
    cached = _cached("libcudnn.so")
    searched += [cached] if cached else []
    real = (path.resolve() for path in searched if "stub" not in str(path))
    return next((str(path) for path in real if not path.is_relative_to(packages.resolve())), "")


def _cached(name: str) -> Path | None:
    """Where the loader's cache has a library; None where it lacks it."""
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            [_LDCONFIG, "-p"], capture_output=True, text=True, timeout=_IMPORT_S
        ).stdout
        rows = (line.strip().rpartition(" => ") for line in listed.splitlines())
        return next((Path(path) for named, _, path in rows if named.split(" ")[0] == name), None)
    return None


def torch_facts() -> Torch:
    """The facts of torch, read in another process, because this one must not hold a CUDA context."""
    output, error = _python(_TORCH)
    if error:
        return Torch(error=error)
    return Torch(**json.loads(output.strip().splitlines()[-1]))


def import_errors(modules: tuple[str, ...] = MODULES) -> dict[str, str]:
    """Module -> why it cannot be imported, or ""."""
    return {name: import_error(name) for name in modules}


def import_error(module: str) -> str:
    """Import a module in another process, which a kernel of another build may kill; returns the error or ""."""
    error = _python(f"import {module}")[1]
    absent = f"ModuleNotFoundError: No module named {module.partition('.')[0]!r}"
    if error == absent:
        return "not installed"
    return error


def _python(program: str) -> tuple[str, str]:
    """(output of a Python program, last line of its error or "")."""
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return "", f"no end after {_IMPORT_S:.0f} s"
    if done.returncode == 0:
        return done.stdout, ""
    if done.returncode < 0:
        ended = f"killed by signal {-done.returncode}"
    else:
        ended = f"exit code {done.returncode}"
    return "", next(reversed(done.stderr.strip().splitlines()), ended)
