"""SGLang's imports on a machine without an accelerator, with and without the packages that want one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = """
import transformers
from megarl.cpu import sglang_patches
sglang_patches.prepare()
sglang_patches.prepare()
from torchvision.transforms import InterpolationMode
from transformers import AutoImageProcessor
from transformers.utils import is_torchvision_available
assert AutoImageProcessor.register
assert not is_torchvision_available()
InterpolationMode.BICUBIC(1)
"""
# What PyPI's torchvision does when it is imported, and a library that does not load here.
CUDA_BUILD = """
import torch
__version__ = "0.28.0+cu130"
torch.library.register_fake("torchvision::nms")(lambda boxes, scores, threshold: scores)
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program], env=settings, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
def test_without_torchvision_its_names_are_there_and_raise_when_called(tmp_path: Path) -> None:
    done = run(ABSENT, tmp_path)
    names = "torchvision.transforms.InterpolationMode.BICUBIC was called on a machine without torchvision"
    assert done.stderr.splitlines()[-1] == f"RuntimeError: {names}, which SGLang imports"


@pytest.mark.slow
def test_a_cuda_build_of_torchvision_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(CUDA_BUILD)
    (tmp_path / "torchvision" / "_C.so").write_bytes(b"libcudart.so.13: not here")
    assert "operator torchvision::nms does not exist" in run("import torchvision", tmp_path).stderr
    done = run(
        "from megarl.cpu import sglang_patches; sglang_patches.prepare(); import torchvision",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
