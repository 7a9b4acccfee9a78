"""What several test files need: the quickstart's own model and data, made once by its own scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

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

# an example's default bound of 0.2 s knows how busy it is
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder that scripts/make_tiny_moe.py writes."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, ROOT / "scripts/make_tiny_moe.py", "--out", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the train.jsonl and eval.jsonl that scripts/make_arithmetic.py writes."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run(
        [sys.executable, ROOT / "scripts/make_arithmetic.py", "--out", folder], check=True
    )
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
    for script, out in (("make_tiny_moe.py", folder / "model"), ("make_arithmetic.py", folder)):
        subprocess.run(
            [sys.executable, ROOT / "scripts" / script, "--tools", "--out", out], check=True
        )
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval.products={folder / 'eval.jsonl'}",
    ]
