"""However a run ends, it ends soon, says why on its last line and leaves nothing; and what a live one exposes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.end_to_end.conftest import files

pytestmark = pytest.mark.slow

FOREVER = ("run.steps=100000", "warm_start.steps=0", "rollout.prompts_per_step=8", "evaluation.max_prompts=8")
BOUND_S = 30.0
RAY_PROCESSES = ("gcs_server", "raylet", "/ray/", "ray::")


def _end(command, last_line: str, code: int) -> None:
    """The command is on its way out: it must be gone in time, with its last word and without a trace."""
    began = time.monotonic()
    assert command.finish(BOUND_S) == code, command.err
    assert time.monotonic() - began < BOUND_S
    assert last_line in command.err.strip().splitlines()[-1]
    assert command.leftovers() == []


def _is_rays(process: psutil.Process) -> bool:
    """Ray's own servers, and the port that Ray opens in each worker (`ray::` process or the command itself)."""
    return any(word in " ".join(process.cmdline()) for word in RAY_PROCESSES)


def test_ctrl_c_and_what_a_live_run_exposes(launch: Callable):
    command = launch(*FOREVER)
    command.wait_for_step(1)
    _check_sockets(command)
    _check_secrets(command)
    os.killpg(command.process.pid, signal.SIGINT)
    _end(command, "interrupted", 130)
    assert len(command.records()) >= 2, "what was measured before stays"


def test_sigterm_while_everything_starts(launch: Callable):
    """What Slurm sends: no step is done yet, ranks and engines are half way up."""
    command = launch(*FOREVER)
    assert command.process.stdout is not None
    said = [command.process.stdout.readline() for _ in range(2)]
    assert said[1].startswith("starting training ranks"), said
    os.kill(command.process.pid, signal.SIGTERM)
    _end(command, "terminated", 143)


def _check_sockets(command) -> None:
    """Only Ray listens beyond loopback: one port per Ray process and worker, behind the token."""
    ray_ports, ours = [], []
    for process in [psutil.Process(command.process.pid), *command.tree()]:
        for connection in process.net_connections(kind="inet"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            on_loopback = connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
            if on_loopback:
                ours.append(connection.laddr.port)
            else:
                ray_ports.append((process, connection.laddr))
    assert ours, "the store and gloo listen"
    for process, address in ray_ports:
        is_driver = process.pid == command.process.pid
        assert is_driver or _is_rays(process), f"{process.cmdline()} listens on {address}"
    by_process = [process.pid for process, _ in ray_ports if "ray::" in " ".join(process.cmdline())]
    assert len(by_process) == len(set(by_process)), "a worker's only open port is Ray's"
    assert not [process for process, _ in ray_ports if "sglang" in " ".join(process.cmdline())]


def _check_secrets(command) -> None:
    """The token is in the environment of this user's processes and nowhere else."""
    tokens = {one.environ().get("RAY_AUTH_TOKEN") for one in command.tree()} - {None}
    (token,) = tokens
    assert len(token) >= 32
    assert not [one for one in command.tree() if token in " ".join(one.cmdline())]
    sessions = [path for path in files() - command.files_before if path.startswith("/tmp/megarl-")]
    assert sessions
    for folder in (*sessions, str(command.folder / "runs")):
        for path, _, names in os.walk(folder):
            for name in names:
                if os.path.isfile(f"{path}/{name}"):
                    with open(f"{path}/{name}", errors="ignore") as text:
                        assert token not in text.read(), f"{path}/{name}"


def test_a_killed_training_rank(launch: Callable):
    command = launch(*FOREVER)
    command.wait_for_step(1)
    victim = _trainer(command)
    victim.kill()
    _end(command, "its process died", 1)
    assert "training rank" in command.err.strip().splitlines()[-1]


def _trainer(command) -> psutil.Process:
    """A Ray worker that has no engine under it."""
    return next(one for one in _workers(command) if not one.children())


def _workers(command) -> list[psutil.Process]:
    return [one for one in command.tree() if "".join(one.cmdline()[:1]).startswith("ray::_Shell")]


def test_a_killed_engine_process(launch: Callable):
    command = launch(*FOREVER)
    command.wait_for_step(1)
    # Schedulers are forked, on CPU, from a server that is the child of the engine's worker.
    schedulers = [one for worker in _workers(command) for server in worker.children() for one in server.children()]
    assert len(schedulers) == 2
    schedulers[1].kill()
    _end(command, f"(pid {schedulers[1].pid}) was killed by SIGKILL", 1)


def test_an_exception_in_a_rank(launch: Callable):
    """A learning rate that overflows: the gradient is not finite, and the rank says so."""
    command = launch(*FOREVER, "warm_start.steps=5", "warm_start.lr=1e30")
    _end_after_start(command, "the gradient norm is", 1)


def test_a_reward_that_turns_bad(launch: Callable):
    """Preflight sees it score well; in the run it returns NaN: a fault of the user's, so exit code 2."""
    command = launch(*FOREVER, "reward.function=bad_reward:score")
    (command.folder / "bad_reward.py").write_text(
        "calls = []\n"
        "def score(response, answer, row):\n"
        "    calls.append(response)\n"
        "    return float('nan') if len(calls) > 40 else 1.0\n"
    )
    _end_after_start(command, "reward.function", 2)


def _end_after_start(command, last_line: str, code: int) -> None:
    assert command.finish(180) == code, command.err
    assert last_line in command.err.strip().splitlines()[-1]
    assert command.leftovers() == []
