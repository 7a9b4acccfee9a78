"""A run whose engine is SGLang's own HTTP server, which the test has started, and which dies and comes back."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import ROOT

pytestmark = pytest.mark.slow

_START_S = 180.0
_POLL_S = 0.2
ONE_RANK = (
    "placement.gpus=1", "train.tp=1", "train.pp=1", "train.ep=1", "train.updates_per_step=1", "warm_start.steps=10",
    "rollout.prompts_per_step=8", "evaluation.max_prompts=8",
    # half of the responses of a model that has learnt little: each step changes the weights
    "reward.function=megarl.rollout.rewards.format:score", "reward.arguments={pattern: '[0-4].*'}",
)  # fmt: skip


@contextmanager
def server(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """SGLang's server on loopback, once it answers; its children end with it."""
    script = ROOT / "tests" / "rollout" / "external" / "sglang_server.py"
    command = [sys.executable, str(script), str(model), str(port)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            until = time.monotonic() + _START_S
            while facts(port) is None:
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(_POLL_S)
            yield process
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def facts(port: int) -> dict[str, Any] | None:
    """What the server states of its model; None while it does not answer."""
    try:
        reply = httpx.get(f"http://127.0.0.1:{port}/model_info", timeout=5.0, trust_env=False)
    except httpx.TransportError:
        return None
    return reply.json() if reply.status_code == 200 else None


def test_a_run_samples_by_a_server_of_others_and_outlives_its_death(
    launch: Callable[..., Any], inputs: Path, tmp_path: Path
) -> None:
    """The logprobs of all samples are the trainer's, also in phases, and after the server has come back.

    Unverified on a GPU.

    rollout/external/engine.py: `weights_checksum`, which SGLang computes on GPUs alone; a server of several ranks. To
    check first: that reshard.verify=checksum compares two servers.
    """
    port = free_port()
    model = (inputs / "models" / "tiny-qwen3-moe").resolve()
    log = tmp_path / "server.log"
    keys = [
        *ONE_RANK, f"rollout.engine={{external: ['127.0.0.1:{port}']}}", "run.steps=4", "rollout.phase_tokens=3",
        "algorithm.rollout_correction=tis",
    ]  # fmt: skip
    refused = launch(*keys)
    assert refused.finish(120) == 2
    assert f"rollout.engine.external[0]: 127.0.0.1:{port} does not answer" in refused.err

    with server(model, port, log) as process:
        command = launch(*keys)
        command.wait_for_step(1)
        process.kill()
        process.wait()
    with server(model, port, log):
        assert command.finish(300) == 0, command.err
        stated = facts(port)
    assert stated and stated["weight_version"].split("-")[1] == "5"
    steps = command.steps()
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert record["rollout/logprob_diff_mean"] < 1e-4
        assert record["train/grad_norm"] > 0
        assert record["reshard/wire_bytes"] > 4 * 500_000
    versions = [
        record["reshard/version"] for record in command.records() if "reshard/version" in record
    ]
    assert versions == [*range(6)], "after the start, the warm start and each step"
    assert sum(record.get("recovery/engines_lost", 0) for record in steps) >= 1
    assert "the server is asked again" in command.out + command.err
    assert not (command.folder / "runs" / "quickstart" / "weights").exists()
    assert command.leftovers() == []
