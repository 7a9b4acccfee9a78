"""The error of a run that has run out of memory: who, when, what was measured, what the plan has, and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.commands.memory_report import with_memory_report
from megarl.diagnosis.phases import Phase
from megarl.types.memory_use import MemoryUse
from tests.plan import recipes

TRAIN, ROLLOUT = Phase(3, "train", 0.0), Phase(3, "rollout", 0.0)
USE = MemoryUse(
    "CUDA out of memory. Tried to allocate 2 GiB", {"allocated": 64 * 10**9, "free": 5 * 10**8}
)
# by Ray 2.60 after SIGSEGV, and the same after SIGKILL
RAYS_WORDS = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: _Shell\n\tpid: 7900\n\tip: 192.0.2.2\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV or another unexpected error. If the process was killed by the kernel OOM killer "
    "(verifiable by checking for OOM in dmesg of the OOMing node), consider enabling resource isolation via "
    "--enable-resource-isolation to prevent node deaths by resource contention and significant loss of progress by "
    "uninformed kernel OOM killing."
)
ENGINE_LOG = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.5 GiB"


@pytest.mark.nightly
def test_a_ranks_error_has_the_plans_figure_and_the_key_that_helps(tmp_path: Path):
    """The plan builds the model, in a process of its own."""
    failed = WorkerFailed(
        "training rank 2: out of memory (OutOfMemoryError)", "traceback", "training rank 2", USE
    )
    recipe = recipes.small(tmp_path, "train.tokens_per_micro_batch=65536")
    told = with_memory_report(recipe, failed, TRAIN, kernel_kills=0)
    who, measured, planned, hint = str(told).split("; ")
    assert who == (
        "training rank 2 ran out of memory in phase train of step 3: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert measured == "measured: allocated 64.00 GB, free 0.50 GB"
    assert planned.startswith("the plan has ") and " on the fullest GPU in train (" in planned
    assert hint.startswith("set train.tokens_per_micro_batch to ")
    assert told.evidence == "traceback" and told.worker == "training rank 2"


def test_an_engines_error_is_known_by_its_log(tmp_path: Path):
    failed = WorkerFailed(
        "engine 0: EngineLost: scheduler 0 has ended",
        f"MemoryError\nlog\n{ENGINE_LOG}\n",
        "engine 0",
    )
    recipe = recipes.small(tmp_path, "placement.hardware=null")
    told = str(with_memory_report(recipe, failed, ROLLOUT, kernel_kills=0))
    assert told.startswith(f"engine 0 ran out of memory in phase rollout of step 3: {ENGINE_LOG}; ")
    assert "placement.hardware is not set" in told
    assert "; lower mem_fraction_static in rollout.engine.sglang, or set " in told


def test_a_death_is_one_of_memory_where_the_kernel_has_killed(tmp_path: Path):
    failed = WorkerFailed("training rank 0: its process died", "died", "training rank 0")
    recipe = recipes.small(tmp_path, "placement.hardware=null")
    assert with_memory_report(recipe, failed, TRAIN, kernel_kills=0) is failed
    told = str(with_memory_report(recipe, failed, None, kernel_kills=1))
    assert told.startswith(
        "training rank 0 ran out of memory: the kernel has killed it, or another process"
    )


def test_rays_words_about_every_dead_process_are_none_of_memory(tmp_path: Path):
    """They name the OOM killer also for SIGSEGV and `kill -9`; a path may have BLOOM in it."""
    for evidence in (
        RAYS_WORDS,
        "Fatal Python error: Segmentation fault in /models/BLOOM-7b/run.py",
    ):
        failed = WorkerFailed("training rank 0: its process died", evidence, "training rank 0")
        assert with_memory_report(recipes.small(tmp_path), failed, TRAIN, kernel_kills=0) is failed


def test_another_failure_stays_as_it_is(tmp_path: Path):
    failed = WorkerFailed(
        "training rank 0: ValueError: shapes differ", "traceback", "training rank 0"
    )
    assert with_memory_report(recipes.small(tmp_path), failed, TRAIN, kernel_kills=1) is failed
