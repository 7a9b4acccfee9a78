"""The reader of shared libraries' symbols on small compiled ones, and by night on all libraries of the GPU lock."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.symbols import Missing, missing, read, shared_libraries, system_libraries

ROOT = Path(__file__).parents[2]
DRIVERS = ("libcuda.so.1", "libnvidia-ml.so.1")
# The libraries whose symbols are there when another package's module is imported: the program's, torch's, and
# TransformerEngine's own, which it loads for all (RTLD_GLOBAL) before its torch part.
LOADED_BEFORE = ("libtorch.so", "libtorch_python.so", "libtransformer_engine.so")
OPTIONAL = {  # libraries that nothing of a run loads -> why they lack something
    r"/nvidia/nvshmem/lib/nvshmem_(bootstrap|transport)_": "each is for one kind of network or launcher",
    r"/nvidia/cu13/lib/libcufile_rdma": "it is for RDMA cards, whose libraries a machine without them lacks",
    r"/torchcodec/libtorchcodec_": "each is for one version of FFmpeg; megarl reads no video",
    r"/torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch2\d-": "each is for one older version of torch",
    r"/torch_memory_saver_hook_mode_(preload|torch)(_cu12)?\.abi3": "these are for CUDA 12; those for 13 end in _cu13",
    r"/numba/np/ufunc/(omp|tbb)pool": "thread pools that numba does without",
}

needs_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("readelf")),
    reason="gcc and readelf make and read the libraries",
)


def compiled(folder: Path, name: str, source: str, *options: str) -> Path:
    """A shared library lib<name>.so of a C source; the options name the libraries that it is linked to."""
    path = folder / f"lib{name}.so"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-x",
        "c",
        "-",
        "-o",
        str(path),
        f"-Wl,-soname,lib{name}.so",
    ]
    subprocess.run([*command, "-x", "none", *options], input=source, text=True, check=True)
    return path


def lacking(folder: Path, *loaded_before: str, absent: tuple[str, ...] = ()) -> list[Missing]:
    return missing(read(shared_libraries(folder)), {}, loaded_before=loaded_before, absent=absent)


@needs_compiler
def test_a_symbol_that_another_version_of_a_library_has_is_missing(tmp_path: Path) -> None:
    """As TransformerEngine's of a newer cuBLAS: linked to one version, installed beside another."""
    newer = compiled(tmp_path, "blas", "void old(void){} void grouped(void){}")
    path = compiled(tmp_path, "engine", "void grouped(void); void f(void){grouped();}", str(newer))
    assert lacking(tmp_path) == []
    compiled(tmp_path, "blas", "void old(void){}")
    assert lacking(tmp_path) == [Missing(str(path), (), ("grouped",))]


@needs_compiler
def test_a_symbol_comes_from_what_a_needed_library_needs_and_from_nowhere_else(
    tmp_path: Path,
) -> None:
    base = compiled(tmp_path, "base", "void deep(void){}")
    middle = compiled(tmp_path, "middle", "void deep(void); void half(void){deep();}", str(base))
    user = compiled(
        tmp_path,
        "user",
        "void deep(void); void f(void){deep();}",
        "-Wl,--no-as-needed",
        str(middle),
    )
    alone = compiled(tmp_path, "alone", "void deep(void); void g(void){deep();}")
    assert lacking(tmp_path) == [Missing(str(alone), (), ("deep",))]
    assert lacking(tmp_path, "libbase.so") == [], (
        "a program that has loaded it offers its symbols to all"
    )
    middle.unlink()
    assert lacking(tmp_path, "libbase.so") == [Missing(str(user), ("libmiddle.so",), ())]


@needs_compiler
def test_a_symbol_of_another_version_is_another_symbol(tmp_path: Path) -> None:
    (tmp_path / "two.map").write_text("V1 { global: f; };\n")
    versioned = compiled(
        tmp_path, "v", "void f(void){}", f"-Wl,--version-script={tmp_path / 'two.map'}"
    )
    user = compiled(tmp_path, "user", "void f(void); void g(void){f();}", str(versioned))
    assert lacking(tmp_path) == []
    (tmp_path / "two.map").write_text("V2 { global: f; };\n")
    compiled(tmp_path, "v", "void f(void){}", f"-Wl,--version-script={tmp_path / 'two.map'}")
    assert lacking(tmp_path) == [Missing(str(user), (), ("f@V1",))]


@needs_compiler
def test_weak_symbols_may_be_absent_and_the_drivers_may_be_elsewhere(tmp_path: Path) -> None:
    driver = compiled(tmp_path, "cuda", "void cuInit(void){}")
    driver.rename(tmp_path / "libcuda.so.1")
    source = "void cuInit(void); void cat(void); void w(void) __attribute__((weak)); "
    source += "void g(void){cuInit(); cat(); w();}"
    user = compiled(tmp_path, "user", source, "-Wl,--no-as-needed", str(tmp_path / "libcuda.so.1"))
    (tmp_path / "libcuda.so.1").unlink()
    assert lacking(tmp_path, absent=("libcuda.so",)) == [Missing(str(user), (), ("cat",))]
    assert lacking(tmp_path) == [Missing(str(user), ("libcuda.so",), ("cat", "cuInit"))]


def test_files_that_are_no_libraries_are_left_out(tmp_path: Path) -> None:
    for name in ("a.so.py", "libx.solid", "libtext.so"):
        (tmp_path / name).write_text("INPUT(-lx)\n")
    assert [path.name for path in shared_libraries(tmp_path)] == ["libtext.so"]
    assert read(shared_libraries(tmp_path)) == []


@pytest.fixture(scope="session")
def gpu_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the lock's packages: of the environment whose Python MEGARL_GPU_PYTHON names, or fetched, some
    10 GiB. TransformerEngine's torch part, which has to be compiled, is there in the first case alone."""
    if python := os.environ.get("MEGARL_GPU_PYTHON"):
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(subprocess.check_output([python, "-c", program], text=True).strip())
    folder = tmp_path_factory.mktemp("gpu")
    if shutil.disk_usage(folder).free < 30 * 2**30:
        pytest.skip("30 GiB of disk are needed for the packages of the GPU lock")
    lines = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    names = folder / "names.txt"
    names.write_text(
        "\n".join(line for line in lines if not line.startswith("transformer-engine-torch=="))
    )
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
    ]
    done = subprocess.run(
        [*install, "--target", folder / "packages", "-r", names], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(
            f"the packages of the GPU lock are not in reach: {done.stderr.strip().splitlines()[-1]}"
        )
    return folder / "packages"


@pytest.mark.slow
@pytest.mark.nightly  # 10 GiB are fetched and read
@needs_compiler
def test_every_library_of_the_gpu_lock_finds_its_symbols(gpu_environment: Path) -> None:
    """Of the driver's libraries alone, which no package has, symbols are taken as given."""
    program = read([Path(sys.executable).resolve()])
    libraries = read(shared_libraries(gpu_environment))
    assert {"libtorch_cuda.so", "libtransformer_engine.so", "libcublasLt.so.13"} <= {
        library.soname for library in libraries
    }
    before = (program[0].soname, *LOADED_BEFORE)
    gaps = missing([*libraries, *program], system_libraries(), loaded_before=before, absent=DRIVERS)
    assert [
        gap for gap in gaps if not any(re.search(pattern, gap.library) for pattern in OPTIONAL)
    ] == []
