"""Packaging: setup.py, and the locks for CPU and GPUs: exact, of the same versions, with all that packages ask for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
PYTHONS = ("3.11", "3.12")
PLATFORM = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
RESOLVE = ["--python-platform", "x86_64-manylinux_2_35", "--no-header", "--no-annotate"]


def pins(text: str) -> dict[str, str]:
    """Versions by name; every line that is no comment names one package and its version, and nothing else."""
    versions: dict[str, str] = {}
    for line in re.sub(r"(?m)(^|\s)#.*", "", text).split("\n"):
        if not line.strip():
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s=<>!*,;]+)\s*", line)
        assert match, line
        name = canonicalize_name(match[1])
        assert name not in versions, f"{name} is named twice"
        versions[name] = match[2]
    return versions


def lock(device: str) -> dict[str, str]:
    return pins((FOLDER / f"{device}.txt").read_text(encoding="utf-8"))


def overrides() -> dict[str, str | None]:
    """The versions that the GPU lock has whatever packages ask for, by name; None: the package is left out."""
    lines = re.sub(
        r"(?m)^#.*", "", (FOLDER / "gpu-overrides.txt").read_text(encoding="utf-8")
    ).split("\n")
    versions: dict[str, str | None] = {}
    for override in map(Requirement, filter(None, lines)):
        (version,) = [specifier.version for specifier in override.specifier] or [None]
        is_left_out = override.marker is not None and not override.marker.evaluate(
            PLATFORM | {"python_version": PYTHONS[0]}
        )
        versions[canonicalize_name(override.name)] = None if is_left_out else version
    return versions


def wishes(texts: list[str] | None, python: str, extra: str = "") -> list[Requirement]:
    """Requirements that count on Linux x86-64 with this Python."""
    environment = {
        **PLATFORM,
        "python_version": python,
        "python_full_version": f"{python}.1",
        "extra": extra,
    }
    requirements = [Requirement(text) for text in texts or []]
    return [wish for wish in requirements if not wish.marker or wish.marker.evaluate(environment)]


def unmet(requirements: list[Requirement], locked: dict[str, str]) -> list[str]:
    versions = [(wish, locked.get(canonicalize_name(wish.name))) for wish in requirements]
    return [
        str(wish)
        for wish, version in versions
        if not version or not wish.specifier.contains(version, True)
    ]


def packaging_lists() -> tuple[list[str], dict[str, list[str]]]:
    """CORE and EXTRAS of setup.py, which is not run."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return values["CORE"], values["EXTRAS"]


def asked_for(*extras: str) -> list[str]:
    """What setup.py asks for, with these extras beside those for every device."""
    core, lists = packaging_lists()
    return core + [
        text
        for name in (*extras, "report", "hangs", "search", "trackers", "dev")
        for text in lists[name]
    ]


def test_the_reader_of_locks_takes_nothing_but_exact_versions() -> None:
    assert pins("# x\nA_b==1.0+cu13  # via c\n\n") == {"a-b": "1.0+cu13"}
    for line in ("a", "a>=1", "a==1.*", "a==1,<2", "a[x]==1", "-r b.txt", "a==1\nA==1"):
        with pytest.raises(AssertionError):
            pins(line)


def test_core_is_small_and_every_dependency_says_why() -> None:
    core, _ = packaging_lists()
    assert len(core) <= 13
    source = (ROOT / "setup.py").read_text()
    for requirement in core:
        assert re.search(rf'"{re.escape(requirement)}",  # \w+', source), requirement


def test_every_list_of_pythons_is_the_same() -> None:
    assert 'python_requires=">=3.11,<3.13"' in (ROOT / "setup.py").read_text()
    assert (
        "for name in python3.11 python3.12; do" in (ROOT / "scripts" / "setup_env.sh").read_text()
    )
    assert "with Python 3.11 or 3.12 and no GPU" in (ROOT / "README.md").read_text()
    assert 'target-version = "py311"' in (ROOT / "pyproject.toml").read_text()


# --- CPU -------------------------------------------------------------------------------------------------------------


def test_the_cpu_lock_satisfies_setup_py() -> None:
    asked = [*asked_for(), "sglang==0.5.21"]
    assert unmet(list(map(Requirement, asked)), lock("cpu")) == []
    assert asked[-1] in asked_for("gpu")


def installed() -> dict[str, metadata.Distribution]:
    """The packages of the CPU lock, which are installed in its versions."""
    distributions = {}
    for name, version in lock("cpu").items():
        distributions[name] = metadata.distribution(name)
        assert distributions[name].version.split("+")[0] == version, name
    return distributions


def unmet_on_cpu(python: str) -> set[str]:
    """What the pinned packages ask for under this Python, and the lock does not have in a version that they take."""
    pins, gaps = lock("cpu"), set()
    for name, package in installed().items():
        headers: Any = package.metadata
        assert SpecifierSet(headers.get("Requires-Python") or "").contains(f"{python}.1"), name
        gaps |= {f"{name} wants {wish}" for wish in unmet(wishes(package.requires, python), pins)}
    return gaps


def test_the_cpu_lock_lacks_the_same_under_every_python() -> None:
    """Left out is what the tests do without, most of it SGLang's kernels: they run under one Python, here are both."""
    first, second = map(unmet_on_cpu, PYTHONS)
    assert first == second
    # of which a CUDA build needs CUDA's packages
    lacking = {line.split()[0] for line in first} - {"torch"}
    assert lacking == {"sglang", "huggingface-hub", "pyright", "python-dateutil", "databricks-sdk"}


INSTALL = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--retries", "1"]


def fetch(folder: Path, package: str) -> None:
    """Install a package into a folder, or skip the test."""
    command = [*INSTALL, "--target", folder, package]
    fetched = subprocess.run(command, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"no package index is in reach: {fetched.stderr.strip().splitlines()[-1]}")


def fits_one_python(name: str) -> bool:
    """Whether the wheel that is installed has machine code for this Python alone."""
    tags = re.findall(
        r"^Tag: (\S+)", metadata.distribution(name).read_text("WHEEL") or "", re.MULTILINE
    )
    return all(tag.startswith("cp") and "-abi3-" not in tag for tag in tags)


@pytest.mark.slow
@pytest.mark.nightly  # what a package index offers changes without us
def test_pip_finds_every_pinned_package_for_the_other_python(tmp_path: Path) -> None:
    """For this one they are installed. A newer pip reads what a package index says of its files, and fetches none."""
    fetch(tmp_path / "pip", "pip>=25")
    (other,) = set(PYTHONS) - {f"3.{sys.version_info.minor}"}
    pins = [f"{name}=={version}" for name, version in lock("cpu").items() if fits_one_python(name)]
    assert {"numpy", "ray", "torch"} <= {pin.split("==")[0] for pin in pins}
    asked = ["--dry-run", "--only-binary=:all:", "--target", tmp_path / "x"]
    command = [*INSTALL, *asked, "--python-version", other, *pins]
    settings = os.environ | {"PYTHONPATH": str(tmp_path / "pip")}
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_both_locks_have_the_same_versions_of_what_they_share() -> None:
    cpu, gpu = lock("cpu"), lock("gpu")
    assert not cpu.keys() - gpu.keys(), "what the tests use on CPU is there on GPUs too"
    assert {name: gpu[name] for name in cpu} == cpu


def test_the_gpu_lock_is_what_setup_py_asks_for() -> None:
    for python in PYTHONS:
        assert unmet(wishes(asked_for("gpu"), python), lock("gpu")) == []


def test_every_source_of_the_gpu_lock_is_named_there_as_setup_py_names_it() -> None:
    """So that a package which setup.py gains, or another version of the engine, cannot be forgotten."""
    lines = re.sub(r"\s*#.*", "", (FOLDER / "gpu.in").read_text(encoding="utf-8")).split("\n")
    named = {
        canonicalize_name(source.name): source
        for source in map(Requirement, filter(lambda x: x and x[0] != "-", lines))
    }
    for text in asked_for("gpu"):
        requirement = Requirement(text)
        source = named[canonicalize_name(requirement.name)]
        assert requirement.extras == source.extras, text
        assert not source.specifier or source.specifier == requirement.specifier, text


def test_the_gpu_lock_has_the_versions_that_override_what_packages_ask_for() -> None:
    """TransformerEngine does not load beside torch's own cuBLAS, and cuda-tile is fetched from another index."""
    asked, locked = overrides(), lock("gpu")
    assert asked == {"nvidia-cublas": "13.2.0.9", "cuda-tile": None}
    assert {name: locked.get(name) for name in asked} == asked
    assert "--override requirements/gpu-overrides.txt" in (FOLDER / "gpu.in").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_lock_has_all_that_the_installed_packages_ask_for(python: str) -> None:
    """SGLang's kernels among it, exactly as SGLang pins them; Megatron's packages for developers are another matter."""
    locked, decided = lock("gpu"), overrides()
    for name, package in installed().items():
        requirements = [
            wish
            for wish in wishes(package.requires, python)
            if canonicalize_name(wish.name) not in decided
        ]
        assert unmet(requirements, locked) == [], name
    of_sglang = {
        canonicalize_name(wish.name) for wish in wishes(metadata.requires("sglang"), python)
    }
    assert {"sglang-kernel", "flashinfer-python", "sgl-deep-gemm"} <= of_sglang


def test_the_gpu_lock_is_of_one_cuda() -> None:
    locked = lock("gpu")
    assert not [name for name in locked if re.search(r"(?<!libs)-cu12$", name)], (
        "one folder takes one core"
    )
    assert {"transformer-engine-cu13", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"} <= locked.keys()
    engine = {version for name, version in locked.items() if name.startswith("transformer-engine")}
    assert len(engine) == 1, "TransformerEngine refuses parts of several versions"


@pytest.fixture(scope="session")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The resolver, which unlike pip reads what a source package asks for without building it."""
    folder = tmp_path_factory.mktemp("uv")
    fetch(folder, "uv")
    return folder / "bin" / "uv"


@pytest.mark.slow
@pytest.mark.nightly  # what a package index offers changes without us
@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_lock_still_resolves(python: str, uv: Path, tmp_path: Path) -> None:
    """From gpu.in, held to the lock's versions: each is still offered, and they still agree. Nothing is installed."""
    command = [uv, "pip", "compile", "-q", FOLDER / "gpu.in", "-c", FOLDER / "gpu.txt"]
    command += ["--python-version", python, "--override", FOLDER / "gpu-overrides.txt"]
    settings = os.environ | {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_SYSTEM_CERTS": "1"}
    if index := os.environ.get("PIP_INDEX_URL"):
        settings |= {"UV_DEFAULT_INDEX": index}
    done = subprocess.run(
        [*command, *RESOLVE], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    if "error sending request" in done.stderr:
        pytest.skip(f"no package index is in reach: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert pins(done.stdout) == lock("gpu")
