"""What several test files need: the quickstart's own model and data, made once by its own scripts."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from megarl.collector import collector_paused
from tests.tiny_engines import (  # noqa: F401 - fixtures
    build_engine,
    checkpoint,
    fork_server,
    isolation,
    judges,
    loader_path,
    odd_rewards,
    plain_tokenizer,
    reference,
    tokenizer,
)

# an example's default bound of 0.2 s, and one of the time to draw examples, know how busy it is
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# as at a terminal: a suite that runs in the background begins, and with it all that it starts, with SIGINT ignored
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep Python's collector away from all that the tests import, as where a run imports it."""
    with collector_paused():
        result = yield
        gc.freeze()
    return result


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models of tests are too small to share out, and other processes want the cores."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def make(script: str, *arguments: str | Path) -> None:
    """Run a script of scripts/ as its command does, in this process, which has its imports."""
    from megarl.cpu import sglang_patches

    sglang_patches.declare_torchvision_operators()  # transformers imports torchvision where it is
    with patch.object(sys, "argv", [script, *map(str, arguments)]):
        importlib.import_module(f"scripts.{script}").main()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder that scripts/make_tiny_moe.py writes."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make("make_tiny_moe", "--out", folder)
    return folder


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the train.jsonl and eval.jsonl that scripts/make_arithmetic.py writes."""
    folder = tmp_path_factory.mktemp("data")
    make("make_arithmetic", "--out", folder)
    return folder


@pytest.fixture(scope="session")
def quickstart_inputs(tiny_model: Path, arithmetic: Path) -> list[str]:
    """Overrides that point the quickstart recipe at them."""
    return [
        f"model.path={tiny_model}",
        f"data.train={arithmetic / 'train.jsonl'}",
        f"data.eval.arith={arithmetic / 'eval.jsonl'}",
    ]


@pytest.fixture(scope="session")
def quickstart_tools_inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that point the recipe of the quickstart with tools at its model and data."""
    folder = tmp_path_factory.mktemp("tools")
    make("make_tiny_moe", "--tools", "--out", folder / "model")
    make("make_arithmetic", "--tools", "--out", folder)
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval.products={folder / 'eval.jsonl'}",
    ]
