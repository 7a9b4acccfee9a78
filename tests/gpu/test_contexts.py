"""Which processes hold a context on the GPU: one that only imports megarl's modules holds none."""

from __future__ import annotations

import subprocess

import pytest

from megarl.device import DEVICE
from tests.gpu.child import Child
from tests.gpu.conftest import Record

ON_GPU = DEVICE == "cuda"
MODULES = [
    "megarl.device",
    "megarl.checkpoints.hf_import",
    "megarl.parallel.rank_model",
    "megarl.resharding.execute",
    "megarl.resharding.memory_handles",
]
FREE_OF_NOISE = 64  # MiB; a context takes several times as much


def used_mib() -> int:
    """Of the first GPU, by all processes; NVIDIA's driver may know the processes of a container by other numbers."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_an_import_makes_no_context() -> None:
    with Child("tests.gpu.contexts:Importer", fresh=True) as child:
        assert child.ask("load", modules=MODULES) is False


@pytest.mark.skipif(not ON_GPU, reason="nvidia-smi tells the memory of a GPU")
def test_memory_of_a_context(record: Record) -> None:
    """Unverified on a GPU.

    device.py empty_cache, fleet/fleet.py: engines on shared GPUs start behind the ranks, when these have given back
    what torch keeps. To check first: `nvidia-smi` before an engine starts: contexts and the policy's parameters;
    SGLang's cache is as large in every start.
    """
    with Child("tests.gpu.contexts:Importer", fresh=True) as child:
        before = used_mib()
        child.ask("load", modules=MODULES)
        imported = used_mib()
        child.ask("use")
        used = used_mib()
    assert imported - before < FREE_OF_NOISE
    record("a context", used - imported, "MiB")
