"""What SGLang's scheduler processes are given beside their arguments: the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from megarl.device import use_sglang_nccl_settings
from megarl.rollout.sglang.scheduler import _reserve_memory, inherited_environment, set_environment
from tests.rollout.sglang.test_arguments import sglang_source

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


@pytest.mark.parametrize("use_settings", [use_sglang_nccl_settings, set_environment])
@pytest.mark.parametrize("users", [{}, {"NCCL_NVLS_ENABLE": "1"}], ids=["unset", "user's"])
def test_training_ranks_and_engines_give_nccl_the_same_settings(
    use_settings: Callable[[], None], users: dict[str, str]
) -> None:
    os.environ.update(users)
    use_settings()
    expected = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"} | users
    assert expected.items() <= os.environ.items()


@pytest.mark.slow
@pytest.mark.nightly  # a fact of SGLang, which only a new release can change
def test_sglang_itself_leaves_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_SETS], env=dict(os.environ), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-2:] == ["0 0", "0 1"], done.stderr


@pytest.mark.parametrize("whole_shared", [False, True])
def test_the_users_environment_does_not_change_an_engine(whole_shared: bool) -> None:
    """Shared experts are the layout's choice; training takes unequal parts of an engine's GPUs.

    No file that others may write is run: SGLang's scheduler then binds itself to its GPU's NUMA node.
    """
    off = ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "SGLANG_NUMA_BIND_V2"]
    expected = dict.fromkeys(off, "0") | {"SGLANG_SHARED_EXPERT_TP1": str(int(whole_shared))}
    os.environ.update(dict.fromkeys(expected, "1"))
    set_environment(whole_shared=whole_shared)
    assert expected.items() <= os.environ.items()


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


def test_sglang_still_reads_that_variable() -> None:
    source = sglang_source("utils", "numa_utils.py")
    start = source.partition("def configure_subprocess(")[2].partition(
        "_create_numactl_executable"
    )[0]
    assert "if envs.SGLANG_NUMA_BIND_V2.get():" in start


def test_the_memory_savers_library_is_looked_up_where_it_was_loaded() -> None:
    here = {"LD_PRELOAD": "", "HOME": "/home/me", "NCCL_DEBUG": "WARN"}
    assert inherited_environment(here) == {"HOME": "/home/me", "NCCL_DEBUG": "WARN"}
