"""A run whose engine is SGLang's own HTTP server, which the test has started, and which dies and comes back."""

from __future__ import annotations

import asyncio
import importlib.metadata
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from megarl.config import EngineConfig
from megarl.model.hf_config import read_model
from megarl.rollout.external.engine import ExternalEngine
from megarl.rollout.external.server_checks import WantedServer
from megarl.rollout.external.weight_files import WeightFiles
from megarl.types.sampling import Sampling
from tests.end_to_end.conftest import ROOT
from tests.tiny_engines import tiny_settings

pytestmark = pytest.mark.slow

_START_S = 180.0
_POLL_S = 0.2
_KEY = "a-key-of-the-servers"
_KEY_VARIABLE = "SERVERS_KEY"
ONE_RANK = (
    "placement.gpus=1", "train.tp=1", "train.pp=1", "train.ep=1", "train.updates_per_step=1", "warm_start.steps=10",
    "rollout.prompts_per_step=8", "rollout.seeded=true", "evaluation.max_prompts=8",
    # half of the responses of a model that has learnt little: each step changes the weights
    "reward.function=megarl.rollout.rewards.format:score", "reward.arguments={pattern: '[0-4].*'}",
)  # fmt: skip


@contextmanager
def server(model: Path, port: int, tp: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """SGLang's server on loopback, once it answers; its children end with it."""
    script = ROOT / "tests" / "rollout" / "external" / "sglang_server.py"
    command = [sys.executable, str(script), str(model), str(port), str(tp), _KEY]
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
        reply = httpx.get(
            f"http://127.0.0.1:{port}/model_info",
            headers={"Authorization": f"Bearer {_KEY}"},
            timeout=5.0,
            trust_env=False,
        )
    except httpx.TransportError:
        return None
    return reply.json() if reply.status_code == 200 else None


def check_seeds(model: Path, port: int) -> None:
    """A sample of a server depends on its seed, and not on what is sampled beside it."""
    wanted = WantedServer(
        version=importlib.metadata.version("sglang"),
        architectures=("Qwen3MoeForCausalLM",),
        shape=read_model(str(model)).shape,
        dtype="float32",
        context_tokens=64,
        is_seeded=True,
        has_stop_texts=False,
    )
    settings = replace(
        tiny_settings(model_path=str(model), number=0, seeded=True, timeout_s=60.0),
        engine=EngineConfig(external=(f"127.0.0.1:{port}",)),
    )
    engine = ExternalEngine(settings, wanted, _KEY_VARIABLE)
    try:
        asyncio.run(engine.take_files(WeightFiles(str(model), "again", 0)))

        def sampled(number: int) -> list[list[int]]:
            sampling = Sampling(number, 16, stream=(1, 2))
            samples = asyncio.run(engine.generate([5, 6, 7], sampling))
            return [sample.only_row.response_ids_T.tolist() for sample in samples]

        (alone,) = sampled(1)
        first, *others = sampled(4)
        assert first == alone
        assert alone not in others
    finally:
        engine.shutdown()


def test_a_run_samples_by_a_server_of_others_and_outlives_its_death(
    launch: Callable[..., Any], inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logprobs of all samples are the trainer's, also in phases, and after the server has come back with two ranks.

    Unverified on a GPU.

    rollout/external/engine.py: `weights_checksum`, which SGLang computes on GPUs alone; a server of several ranks. To
    check first: that reshard.verify=checksum compares two servers.
    """
    monkeypatch.setenv(_KEY_VARIABLE, _KEY)
    port = free_port()
    model = (inputs / "models" / "tiny-qwen3-moe").resolve()
    log = tmp_path / "server.log"
    engine = f"{{external: ['127.0.0.1:{port}'], external_key_env: {_KEY_VARIABLE}}}"
    keys = [
        *ONE_RANK, f"rollout.engine={engine}", "run.steps=4", "rollout.phase_tokens=3",
        "algorithm.rollout_correction=tis",
    ]  # fmt: skip
    refused = launch(*keys)
    assert refused.finish(120) == 2
    assert f"rollout.engine.external[0]: 127.0.0.1:{port} does not answer" in refused.err

    with server(model, port, 1, log) as process:
        command = launch(*keys)
        command.wait_for_step(1)
        process.kill()
        process.wait()
    with server(model, port, 2, log):
        assert command.finish(300) == 0, command.err
        stated = facts(port)
        check_seeds(model, port)
    assert _KEY not in command.out + command.err
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
