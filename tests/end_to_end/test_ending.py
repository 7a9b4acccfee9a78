"""However a run ends, it ends soon, says why on its last line and leaves nothing; and what a live one exposes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import psutil
import pytest

from megarl.types import EpisodeEnd
from tests.leftovers import shared_files

pytestmark = pytest.mark.slow

FOREVER = (
    "run.steps=100000", "warm_start.steps=0", "rollout.prompts_per_step=8", "evaluation.max_prompts=8",
    "train.tp=1", "train.pp=1", "train.ep=2", "placement.gpus=2", "rollout.engine.tp=1",
)  # fmt: skip
TOOLS_RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart_tools.yaml"
CALLING = (
    "data.train=calls.jsonl", "run.name=quickstart", "run.trackers=[]", "run.steps=100000", "warm_start.steps=25",
    "train.replay=r3", "rollout.prompts_per_step=16", "evaluation.max_prompts=16", "evaluation.every=1",
    "algorithm.name=remax", "reshard.verify=full", "train.pp=1", "placement.gpus=2", "rollout.engine.tp=2",
    "rollout.engine.ep=2", "rollout.engine.count=1", "rollout.engine.place_experts=true",
)  # fmt: skip
ENDS = get_args(EpisodeEnd)
BOUND_S = 30.0
SILENCE_S = 30.0  # the machine may be busy
RAY_SERVERS = ("gcs_server", "raylet", "/ray/")


def _end(command, last_line: str, code: int) -> None:
    """The command is on its way out: it must be gone in time, with its last word and without a trace."""
    assert command.finish(BOUND_S) == code, command.err
    assert last_line in command.err.strip().splitlines()[-1]
    assert command.leftovers() == []


def test_ctrl_c_and_what_a_live_run_of_episodes_exposes(
    launch: Callable, quickstart_tools_inputs: Sequence[str], tmp_path: Path
) -> None:
    """A run whose model calls a tool, in TP2 EP2, with the experts that the engine chose at each turn.

    Each reshard places these anew, and the ranks replay them.

    Of ReMax, so that greedy samples, which are none of those that it trains on, are drawn by day. All demonstrations of
    its warm start have a call: few steps teach it.
    """
    train = Path(quickstart_tools_inputs[1].partition("=")[2])
    lines = train.read_text().splitlines(keepends=True)
    (tmp_path / "calls.jsonl").write_text("".join(line for line in lines if "tool_calls" in line))
    command = launch(*quickstart_tools_inputs, *CALLING, recipe=TOOLS_RECIPE)
    command.wait_for_step(2)
    _check_sockets(command)
    _check_secrets(command)
    _check_folders(command)
    os.killpg(command.process.pid, signal.SIGINT)
    _end(command, "interrupted", 130)
    assert "calls are read as SGLang's hermes" in command.out + command.err
    steps = command.steps()
    assert len(steps) >= 2, "what was measured before stays"
    for record in steps:
        assert record["rollout/samples"] == 128
        assert record["episode/calls_mean"] > 0 and record["episode/turns_max"] > 1
        assert record["rollout/logprob_diff_turn_1"] < 1e-4
        assert record["rollout/logprob_diff_turn_2"] < 1e-4
        assert sum(record[f"episode/end/{end}"] for end in ENDS) == pytest.approx(1.0)
        assert record["episode/dropped_tokens"] == 0.0
        # by the load that placed them; the next step's is another
        placed, before = (record[f"rollout/expert_imbalance{of}"] for of in ("_placed", ""))
        assert 1 <= placed <= before
        assert record["replay/logprob_diff"] < 1e-4 and record["train/grad_norm"] > 0
        assert 1 < record["eval/products/turns_mean"] <= 3
        assert 0 < record["eval/products/calls_mean"] < 3


def test_sigterm_while_everything_starts(launch: Callable):
    """What Slurm sends: no step is done yet, ranks and engines are half way up."""
    command = launch(*FOREVER)
    assert command.process.stdout is not None
    # another test's killed session may be told of first
    lines = iter(command.process.stdout.readline, "")
    assert any(line.startswith("starting training ranks") for line in lines)
    os.kill(command.process.pid, signal.SIGTERM)
    _end(command, "terminated", 143)


def _check_sockets(command) -> None:
    """Only Ray listens beyond loopback: its servers, and one port in each worker and in the command itself."""
    ours = 0
    for process in command.look():
        beyond = [
            address
            for address in process.listening
            if address[0] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
        ]
        ours += len(process.listening) - len(beyond)
        if process.pid in _own_pids(command) or "ray::" in process.command_line:
            assert len(beyond) <= 1, (process, "a worker's only open port is Ray's")
        elif beyond:
            assert any(word in process.command_line for word in RAY_SERVERS), process
    assert ours, "the store and gloo listen"


def _own_pids(command) -> list[int]:
    """Of the command, and of its supervisor above it."""
    supervisor = psutil.Process(command.process.pid)
    (below,) = supervisor.children()
    return [supervisor.pid, below.pid]


def _check_secrets(command) -> None:
    """The token is in the environment of this user's processes and nowhere else."""
    seen = command.look()
    # the command's own is what it was started with
    below = [process for process in seen if process.pid not in _own_pids(command)]
    (token,) = {process.environment.get("RAY_AUTH_TOKEN", "") for process in below} - {""}
    assert len(token) >= 32
    assert not [process for process in seen if token in process.command_line]
    sessions = [
        path for path in shared_files() - command.files_before if _is_of(command, Path(path))
    ]
    assert sessions
    for folder in (*sessions, str(command.folder / "runs")):
        for path in Path(folder).rglob("*"):
            assert token not in _text(path), path


def _check_folders(command) -> None:
    """Nobody but this user can reach what a run has in the common places: Ray opens its own folder to everyone."""
    new_paths = [Path(path) for path in shared_files() - command.files_before]
    folders = [path for path in new_paths if _is_of(command, path)]
    assert len(folders) == 1, (new_paths, "one session, one folder")
    assert folders[0].is_dir() and not folders[0].is_symlink()
    assert folders[0].stat().st_mode & 0o7777 == 0o700 and folders[0].stat().st_uid == os.geteuid()
    assert list(folders[0].glob("megarl-engine-*")) and list(
        folders[0].glob("ray/session_*/sockets/raylet*")
    )
    longest = max(len(str(path)) for path in folders[0].rglob("*") if path.is_socket())
    assert longest <= 107 - len("4294967")  # a process id may have more digits than these have


def _is_of(command, path: Path) -> bool:
    """Whether a process of the command has its temporary files there."""
    return any(process.environment.get("TMPDIR") == str(path) for process in command.look())


def _text(path: Path) -> str:
    """Of a file that may be gone by now; sockets and folders have none."""
    try:
        return path.read_text(errors="ignore") if path.is_file() else ""
    except FileNotFoundError:
        return ""


@pytest.mark.nightly  # tests/cluster/test_ray_session.py kills a light worker
def test_a_killed_training_rank(launch: Callable):
    command = launch(*FOREVER)
    command.wait_for_step(1)
    victim = _trainer(command)
    victim.kill()
    _end(command, "its process died", 1)
    assert "training rank" in command.err.strip().splitlines()[-1]


@pytest.mark.nightly  # tests/cluster/test_ray_session.py stops a light worker
def test_a_stopped_training_rank(launch: Callable):
    """It is there and says nothing, and its peers wait for it in their collectives."""
    command = launch(*FOREVER, f"run.timeout_s={SILENCE_S:g}")
    command.wait_for_step(1)
    victim = _trainer(command)
    victim.suspend()
    assert command.finish(4 * SILENCE_S + BOUND_S) == 1, command.err
    last = command.err.strip().splitlines()[-1]
    assert re.search(
        rf"training rank \d \(pid {victim.pid}\) has not answered for .* s: a signal stopped it",
        last,
    )
    assert command.leftovers() == []


def _trainer(command) -> psutil.Process:
    """A Ray worker that has no engine under it."""
    return next(process for process in _workers(command) if not process.children())


def _workers(command) -> list[psutil.Process]:
    return [
        psutil.Process(process.pid)
        for process in command.look()
        if process.command_line.startswith("ray::_Shell")
    ]
