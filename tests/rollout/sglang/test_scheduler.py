"""What SGLang's scheduler processes are given beside their arguments: the environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.device import use_sglang_nccl_settings
from megarl.rollout.sglang.scheduler import _reserve_memory, inherited_environment, set_environment

NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
SGLANG_SETS = """
import os
from types import SimpleNamespace
from megarl.cpu import sglang_patches
from megarl.rollout.sglang import scheduler
sglang_patches.prepare()
with sglang_patches.quiet_import():
    from sglang.srt.entrypoints import engine
known = {"nnodes": 1, "enable_symm_mem": False, "enable_nccl_nvls": False, "dcp_size": 1, "enable_metrics": False}
engine.resolving_view = lambda arguments: arguments
for os.environ["NCCL_NVLS_ENABLE"] in ("0", "1"):
    os.environ.pop("NCCL_CUMEM_ENABLE", None)
    scheduler.set_environment()
    try:
        engine._set_envs_and_config(SimpleNamespace(**known))
    except AttributeError:
        pass  # of what it reads once NCCL's part is set
    print(os.environ["NCCL_CUMEM_ENABLE"], os.environ["NCCL_NVLS_ENABLE"])
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    return monkeypatch


def test_training_ranks_and_engines_give_nccl_the_same_settings() -> None:
    use_sglang_nccl_settings()
    ranks = [os.environ[name] for name in NCCL]
    for name in NCCL:
        del os.environ[name]
    set_environment()
    assert [os.environ[name] for name in NCCL] == ranks == ["0", "0"]


def test_the_users_settings_of_nccl_hold() -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    use_sglang_nccl_settings()
    set_environment()
    assert [os.environ[name] for name in NCCL] == ["0", "1"]


@pytest.mark.slow
@pytest.mark.nightly  # a fact of SGLang, which only a new release can change
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_sglang_itself_leaves_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_SETS], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-2:] == ["0 0", "0 1"], done.stderr


def test_an_engine_starts_beside_training_that_takes_unequal_parts_of_its_gpus() -> None:
    set_environment()
    assert os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"


def test_whole_shared_experts_are_the_layouts_choice_and_not_the_environments() -> None:
    os.environ["SGLANG_SHARED_EXPERT_TP1"] = "1"
    set_environment()
    assert os.environ["SGLANG_SHARED_EXPERT_TP1"] == "0"
    set_environment(whole_shared=True)
    assert os.environ["SGLANG_SHARED_EXPERT_TP1"] == "1"


def test_room_is_held_until_sglang_has_sized_its_cache(environment: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Room:
        def __init__(self, num_bytes: int, **how: object) -> None:
            events.append(f"{num_bytes} bytes on {how['device']}")

        def __del__(self) -> None:
            events.append("given up")

    class Scheduler:
        def __init__(self, argument: int) -> None:
            events.append(f"cache {argument}")

    environment.setattr(torch, "empty", Room)
    environment.setattr(torch.cuda, "empty_cache", lambda: events.append("given back"))
    sglang = SimpleNamespace(Scheduler=Scheduler)
    _reserve_memory(sglang, 3, 100)
    sglang.Scheduler(7)
    assert events == ["100 bytes on cuda:3", "cache 7", "given up", "given back"]


def test_no_file_that_others_may_write_is_run_to_start_a_scheduler() -> None:
    """Whatever the user's environment says: SGLang's scheduler then binds itself to its GPU's NUMA node."""
    os.environ["SGLANG_NUMA_BIND_V2"] = "1"
    set_environment()
    assert os.environ["SGLANG_NUMA_BIND_V2"] == "0"


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_sglang_still_reads_that_variable() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    source = (Path(spec.origin).parent / "srt" / "utils" / "numa_utils.py").read_text()
    start = source.partition("def configure_subprocess(")[2].partition(
        "_create_numactl_executable"
    )[0]
    assert "if envs.SGLANG_NUMA_BIND_V2.get():" in start


def test_the_memory_savers_library_is_looked_up_where_it_was_loaded() -> None:
    here = {"LD_PRELOAD": "", "HOME": "/home/me", "NCCL_DEBUG": "WARN"}
    assert inherited_environment(here) == {"HOME": "/home/me", "NCCL_DEBUG": "WARN"}
