"""Facts of packages: a kernel of another build is named with the loader's own words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.doctor import packages
from megarl.doctor.rules_node import gpu_findings
from tests.doctor.nodes import sound


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which modules are found by this process and by those it starts."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_te_may_be_missing_where_the_recipe_takes_megatrons_layers() -> None:
    errors = {"transformer_engine.pytorch": "not installed"}
    (line,) = [
        finding.line(1) for finding in gpu_findings(sound(import_errors=errors), local_layers=True)
    ]
    assert line.startswith(
        "warning: transformer-engine: it cannot be imported (not installed): training uses"
    )


def test_a_kernel_of_another_build_is_named_with_its_error(broken: Path) -> None:
    for program, error in (
        (
            "raise ImportError('libcudart.so.12: cannot open')",
            "ImportError: libcudart.so.12: cannot open",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
        ("", ""),
    ):
        (broken / "kernel_x.py").write_text(program)
        assert packages.import_error("kernel_x") == error
    assert packages.import_error("no_such_module.below") == "not installed"


@pytest.mark.slow
def test_torch_says_what_it_was_built_for() -> None:
    facts = packages.torch_facts()
    assert (facts.version, facts.cuda) == (torch.__version__, torch.version.cuda or "")
    assert facts.error == "" or facts.cuda


def test_a_torch_that_does_not_start_is_told(broken: Path) -> None:
    (broken / "torch.py").write_text("raise ImportError('undefined symbol: ncclCommWindow')\n")
    assert packages.torch_facts().error == "ImportError: undefined symbol: ncclCommWindow"


def test_only_exact_demands_that_count_here_are_pins() -> None:
    demands = [
        "torch==2.13.0",
        "sglang-kernel==0.4.7",
        "flashinfer_python[cu13]==0.6.18",
        "transformers>=5",
    ]
    demands += ["numpy==1", "sgl-deep-gemm==0.2.0; extra == 'x'", "not a requirement at all!"]
    assert packages.pins(demands) == {
        "torch": "2.13.0",
        "sglang-kernel": "0.4.7",
        "flashinfer-python": "0.6.18",
    }


def test_the_installed_sglang_pins_the_torch_that_is_installed() -> None:
    assert packages.versions()["torch"].partition("+")[0] == packages.sglang_pins()["torch"]


@pytest.mark.parametrize(
    "kind", ["", "CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "toolkit"]
)
def test_a_cudnn_that_is_found_before_the_packages_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Through the link that the loader follows; the environment's own, a stub and an empty folder are none."""
    monkeypatch.setattr(packages, "_cached", lambda name: None)
    packaged = tmp_path / "site-packages" / "nvidia" / "cudnn" / "lib"
    stubs = tmp_path / "stubs"
    foreign = tmp_path / "foreign"
    nothing = tmp_path / "nothing"
    for folder in (packaged, stubs, foreign, nothing):
        folder.mkdir(parents=True)
    for folder, version in ((packaged, "9.20.0"), (stubs, "9.1.0"), (foreign, "9.13.0")):
        (folder / f"libcudnn.so.{version}").touch()
        (folder / "libcudnn.so").symlink_to(f"libcudnn.so.{version}")
    places = {
        "LD_LIBRARY_PATH": f":{nothing}:{packaged}:{stubs}",
        "CUDA_HOME": str(nothing),
        "CUDA_PATH": str(packaged),
    }
    if kind == "LD_LIBRARY_PATH":
        places[kind] += f":{foreign}"
    elif kind and kind != "toolkit":
        places[kind] = str(foreign)
    toolkit = foreign if kind == "toolkit" else nothing
    named = packages.foreign_cudnn(places, tmp_path / "site-packages", toolkit)
    assert named == (str(foreign / "libcudnn.so.9.13.0") if kind else "")


def test_a_cudnn_in_the_loaders_cache_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ldconfig = tmp_path / "ldconfig"
    ldconfig.write_text("#!/bin/sh\necho ' libcudnn.so.9 (libc6,x86-64) => /a/libcudnn.so.9'\n"
                        "echo ' libcudnn.so (libc6,x86-64) => /b/libcudnn.so'\n")  # fmt: skip
    ldconfig.chmod(0o755)
    monkeypatch.setattr(packages, "_LDCONFIG", str(ldconfig))
    assert packages.foreign_cudnn({}, tmp_path, tmp_path / "none") == "/b/libcudnn.so"
    ldconfig.unlink()
    assert packages.foreign_cudnn({}, tmp_path, tmp_path / "none") == ""
