"""How an engine ends: by shutdown, by a killed scheduler, by its host's death, or before it has begun."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq.asyncio

from megarl.cluster.failures import WorkerFailed, reported
from megarl.cluster.session_folder import remove_dead
from megarl.commands.memory_report import with_memory_report
from megarl.device import DEVICE
from megarl.diagnosis.phases import Phase
from megarl.rollout.sglang.engine import Engine, EngineError
from megarl.rollout.sglang.host import PREFIX
from megarl.rollout.sglang.loop_counts import PEERS_S
from megarl.types.sampling import Sampling
from tests.leftovers import gone, left_since, shared_files
from tests.plan import recipes

pytestmark = pytest.mark.slow

PROMPT = [3, 7, 15, 8, 18, 4]
BOUND_S = 5.0  # of a standstill; the machine may be busy


def children() -> set[int]:
    """Every descendant, the fork server and Python's resource tracker of the whole process among them."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_shutdown_leaves_no_process_and_no_file(
    build_engine: Callable[..., Engine], fork_server: None
) -> None:
    files, processes = shared_files(), children()
    engine = build_engine(2, 1)
    assert children() - processes >= set(engine.pids())
    asyncio.run(engine.generate(PROMPT, Sampling(2, 4)))
    engine.shutdown()
    engine.shutdown()
    assert children() == processes
    assert left_since(files) == []
    with pytest.raises(EngineError, match="the engine was shut down"):
        asyncio.run(engine.generate(PROMPT, Sampling(1, 4)))


def test_a_killed_scheduler_is_named_to_who_waits_and_to_who_comes(
    build_engine: Callable[..., Engine],
) -> None:
    """Unverified on a GPU.

    rollout/sglang/scheduler.py, rollout/sglang/arguments.py: schedulers are spawned, not forked; file rendezvous
    beside NCCL; `base_gpu_id`; the memory saver. To check first: a killed scheduler is still named: SGLang's own
    hang watchdog signals the host process.
    """
    engine = build_engine(2, 1)
    pids = engine.pids()
    cause = rf"engine scheduler 1 \(pid {pids[1]}\) was killed by SIGKILL$"

    async def kill_while_waiting() -> None:
        pending = asyncio.ensure_future(engine.generate(PROMPT, Sampling(64, 450)))
        await asyncio.sleep(0.2)
        assert not pending.done()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineError, match=cause):
            await asyncio.wait_for(pending, timeout=10)
        with pytest.raises(EngineError, match=cause):
            await asyncio.wait_for(engine.generate(PROMPT, Sampling(1, 4)), timeout=10)

    asyncio.run(kill_while_waiting())
    engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's memory has no limit of a process")
def test_an_engine_that_runs_out_of_memory_is_named_in_the_report(
    build_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """By a limit of its scheduler's address space, which the log of the scheduler tells."""
    engine = build_engine(1, 1)
    asyncio.run(engine.generate(PROMPT, Sampling(1, 4)))
    (pid,) = engine.pids()
    limit = psutil.Process(pid).memory_info().vms + 2**21
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    with pytest.raises(EngineError) as caught:
        asyncio.run(asyncio.wait_for(engine.generate(PROMPT * 50, Sampling(64, 100)), 60))
    failed = reported("engine 0", caught.value)
    assert isinstance(failed, WorkerFailed)
    recipe = recipes.small(tmp_path, "placement.hardware=null")
    told = with_memory_report(recipe, failed, Phase(3, "rollout", 0.0), kernel_kills=0)
    assert str(told).startswith("engine 0 ran out of memory in phase rollout of step 3: "), failed
    assert "; lower mem_fraction_static in rollout.engine.sglang, or set " in str(told)


def test_a_scheduler_that_stays_in_one_round_is_named(build_engine: Callable[..., Engine]) -> None:
    """The weight loader may take its time while it works, whoever loads; a round of the loop may not."""
    engine = build_engine(2, 1, timeout_s=BOUND_S)
    asyncio.run(engine.reshard({"work_s": BOUND_S + 2 * PEERS_S}, 1))
    asyncio.run(engine.generate(PROMPT, Sampling(1, 4)))
    asyncio.run(engine.reshard({"rest_in_next_round_s": 600.0}, 2))
    ranks = r"0 \(pid \d+\), 1 \(pid \d+\)"
    # by their work, or by the limit of a round, whichever comes first
    what = "(done nothing|used no processor and moved no bytes)"
    with pytest.raises(EngineError, match=rf"^engine scheduler {ranks} has {what} for \d+ s$"):
        asyncio.run(asyncio.wait_for(engine.generate(PROMPT, Sampling(1, 4)), timeout=10 * BOUND_S))


def open_contexts() -> set[int]:
    """ZeroMQ contexts that would block the garbage collector, should it find them before their sockets."""
    return {
        id(item)
        for item in gc.get_objects()
        if isinstance(item, zmq.asyncio.Context) and not item.closed
    }


def test_an_engine_that_cannot_start_says_why(
    build_engine: Callable[..., Engine], checkpoint: Path
) -> None:
    files, processes, contexts = shared_files(), children(), open_contexts()
    weights = checkpoint / "model.safetensors"
    hidden = weights.rename(checkpoint / "hidden")
    try:
        with pytest.raises(EngineError) as caught:
            build_engine(1, 1)
    finally:
        hidden.rename(weights)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("engine scheduler 0 (pid ")
    assert "Cannot find any model weights" in last
    assert open_contexts() <= contexts
    assert children() <= processes
    assert left_since(files) == []


def test_an_argument_that_sglang_refuses_is_named(build_engine: Callable[..., Engine]) -> None:
    with pytest.raises(EngineError, match="Unknown schedule_policy: .*no-such-policy"):
        build_engine(1, 1, sglang={"schedule_policy": "no-such-policy"})


def test_schedulers_die_with_a_killed_host_and_the_next_start_removes_its_folder(
    checkpoint: Path, tmp_path: Path
) -> None:
    program = """
import sys
from megarl.rollout.sglang.engine import Engine
from tests.tiny_engines import tiny_settings
engine = Engine(tiny_settings(2, model_path=sys.argv[1]))
print(*engine.pids(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(checkpoint)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # who is killed cannot remove its folder
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as host:
        assert host.stdout is not None
        schedulers = [int(pid) for pid in host.stdout.readline().split()]
        host.kill()
        assert len(schedulers) == 2 and gone(schedulers)
    (left,) = tmp_path.glob("megarl-engine-*")
    assert left.stat().st_mode & 0o777 == 0o700
    assert remove_dead(PREFIX, str(tmp_path)) == 1
    assert list(tmp_path.glob("megarl-engine-*")) == []
