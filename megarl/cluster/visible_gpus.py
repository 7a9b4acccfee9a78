"""Checks that torch sees the GPUs of this machine, and that engines can map the GPU memory of training ranks.

Without the first check a run would silently train on the CPU over gloo, thousands of times slower.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess

import torch

from megarl.device import DEVICE, DEVICE_VARIABLE
from megarl.types import UserError

_ANSWER_S = 60.0  # without persistence mode the driver starts up for each call, seconds a GPU
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads both
_EXPANDABLE = re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE)
_INSTALL = "install requirements/gpu.txt (docs/install.md)"


def device_errors() -> list[UserError]:
    """Errors of this machine and of this process's environment; none where MEGARL_DEVICE asks for the CPU."""
    asked = os.environ.get(DEVICE_VARIABLE, "")
    if asked not in ("", "cpu", "cuda"):
        hint = "set it to cpu or cuda, or leave it out"
        return [UserError(DEVICE_VARIABLE, f"{asked!r} is no device", hint)]
    if DEVICE == "cuda":
        return _allocator_errors()
    if asked == "cpu":
        return []
    if count := num_listed_gpus():
        return [_unseen(count)]
    if not asked:
        return []
    problem = f"cuda, but nvidia-smi lists no GPU on {socket.gethostname()}"
    hint = "mend the driver (docs/install.md), or leave it out"
    return [UserError(DEVICE_VARIABLE, problem, hint)]


def _allocator_errors() -> list[UserError]:
    """Allocator settings that forbid CUDA IPC, by which engines map the parameters of training ranks."""
    named = [name for name in _ALLOCATOR if _EXPANDABLE.search(os.environ.get(name, ""))]
    problem = (
        "it has expandable_segments:True, and mapping such memory over CUDA IPC is not verified yet"
    )
    return [UserError(name, problem, "remove expandable_segments from it") for name in named]


def _unseen(count: int) -> UserError:
    """Why torch sees none of the GPUs that nvidia-smi lists."""
    anyway = f"or set {DEVICE_VARIABLE}=cpu to use no GPU"
    gpus = f"nvidia-smi lists {count} GPU{'s' if count > 1 else ''} on {socket.gethostname()}"
    if torch.version.cuda is None:
        problem = f"{torch.__version__} is a build without CUDA, and {gpus}"
        return UserError("torch", problem, f"{_INSTALL}, {anyway}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        problem = f"{visible!r}: torch sees no GPU, and {gpus}"
        return UserError("CUDA_VISIBLE_DEVICES", problem, f"leave it out, {anyway}")
    problem = f"{torch.__version__} (CUDA {torch.version.cuda}) sees no GPU, and {gpus}"
    return UserError("torch", problem, f"update the driver (docs/install.md), {anyway}")


def num_listed_gpus() -> int:
    """How many GPUs nvidia-smi lists; 0 without a driver, or where it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run(
            [program, "--list-gpus"], capture_output=True, text=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if listed.returncode != 0:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
