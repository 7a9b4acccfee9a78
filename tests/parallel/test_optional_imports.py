"""A TransformerEngine that cannot be loaded ends no run that uses other layers, and is named where it is needed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core
import pytest

from megarl.parallel.optional_imports import TransformerEngineFinder, layers_error

SYMBOL = "libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"
BROKEN = f"""
import pathlib
with open(pathlib.Path(__file__).with_name("tries"), "a") as file:
    file.write("x")
raise OSError({SYMBOL!r})
"""
# as TransformerEngine's own __init__
HALF = "try:\n    from . import pytorch\nexcept ImportError:\n    pass\n"
REASONS = [
    ({"__init__.py": BROKEN}, SYMBOL),
    (
        {
            "__init__.py": HALF,
            "pytorch.py": "raise ImportError('libcudnn_graph.so.9: version mismatch')",
        },
        "libcudnn_gr",
    ),
    (
        {"__init__.py": HALF, "pytorch.py": "raise RuntimeError('Found cuDNN 9.13\\nmore')"},
        "Found cuDNN 9.13",
    ),
    ({"__init__.py": HALF, "pytorch.py": "raise RuntimeError"}, "RuntimeError"),
]


def write_engine(folder: Path, files: dict[str, str]) -> Path:
    """A stand-in for the package."""
    package = folder / "transformer_engine"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text)
    return package


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TransformerEngineFinder]:
    """The finder of a process with a GPU, which looks for packages in tmp_path too."""
    gpu_finder = TransformerEngineFinder("cuda")
    monkeypatch.setattr(
        sys,
        "meta_path",
        [gpu_finder, *(entry for entry in sys.meta_path if type(entry) is not type(gpu_finder))],
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield gpu_finder
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("files", "reason"), REASONS, ids=["library", "cuDNN", "error", "error without a text"]
)
def test_an_engine_that_does_not_load_is_not_installed(
    finder: TransformerEngineFinder, tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    package = write_engine(tmp_path, files)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine"):
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module(name)
        assert str(caught.value).startswith(reason) and "\n" not in str(caught.value)
        assert not [module for module in sys.modules if module.startswith("transformer_engine")]
    if (package / "tries").exists():
        assert (package / "tries").read_text() == "x", (
            "loaded once, not for each of Megatron's modules"
        )
    assert importlib.util.find_spec("transformer_engine"), (
        "who only asks whether it is there gets no exception"
    )


def test_a_sound_engine_is_imported_with_its_torch_part(
    finder: TransformerEngineFinder, tmp_path: Path
) -> None:
    write_engine(tmp_path, {"__init__.py": "", "pytorch.py": "answer = 42"})
    module: Any = importlib.import_module("transformer_engine")
    assert module.pytorch.answer == 42 and finder.error == ""
    assert module.__spec__.loader.get_source("transformer_engine") == ""


def test_an_absent_engine_is_told_by_python(finder: TransformerEngineFinder) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        with pytest.raises(ModuleNotFoundError, match="No module named 'transformer_engine'"):
            importlib.import_module("transformer_engine")


def test_the_cpu_leaves_it_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = write_engine(tmp_path, {"__init__.py": BROKEN})
    monkeypatch.setattr(sys, "meta_path", [TransformerEngineFinder("cpu"), *sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="the CPU does not use it"):
        importlib.import_module("transformer_engine.pytorch")
    assert not (package / "tries").exists()


@pytest.mark.parametrize(
    ("problem", "local_layers", "dtype", "where"),
    [
        ("", False, "bfloat16", None),
        ("", False, "float32", "model.dtype"),
        ("", True, "float32", "model.dtype"),
        ("broken", False, "bfloat16", "train.local_layers"),
        ("broken", False, "float32", "train.local_layers"),
        ("broken", True, "float32", None),
    ],
)
def test_which_layers_a_gpu_has(
    problem: str, local_layers: bool, dtype: str, where: str | None
) -> None:
    error = layers_error(problem, local_layers=local_layers, dtype=dtype)
    assert (error and error.where) == where
    assert not problem or error is None or problem in error.problem


ON_A_GPU = """
import megarl.device
megarl.device.DEVICE = "cuda"
import torch
from megarl.config import TrainConfig
from megarl.parallel import model
from megarl.types import UserError
assert not model.TRANSFORMER_ENGINE
model.select_layers(TrainConfig(lr=1.0, local_layers=True), torch.float32)
try:
    model.select_layers(TrainConfig(lr=1.0), torch.bfloat16)
except UserError as fault:
    print(fault)
"""


@pytest.mark.slow
def test_megatron_is_imported_beside_an_engine_whose_libraries_do_not_load(tmp_path: Path) -> None:
    """In a process that takes itself for one with a GPU: a run with train.local_layers goes on, another has a line."""
    package = write_engine(tmp_path, {"__init__.py": BROKEN})
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
        "TORCHDYNAMO_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"train.local_layers: TransformerEngine cannot be used ({SYMBOL}); install what req"
    )
    assert (package / "tries").read_text() == "x"


def test_megatron_does_without_a_tracker_that_others_may_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with monkeypatch.context() as importing:
        importing.setattr(megatron.core.__spec__, "_initializing", True, raising=False)
        with pytest.raises(ModuleNotFoundError, match="not needed while Megatron is imported"):
            importlib.import_module("wandb")
    assert importlib.util.find_spec("wandb")
