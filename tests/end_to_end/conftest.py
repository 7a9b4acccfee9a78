"""Real runs of the command, on a model and data made once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.leftovers import left_since, shared_files

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
_POLL_S = 0.1


@dataclass(frozen=True)
class Seen:
    """One process of a run at one moment."""

    pid: int
    command_line: str
    environment: dict[str, str]
    listening: list[tuple[str, int]]


@dataclass
class Command:
    """A `megarl` that is running, or has run, in a folder of its own."""

    process: subprocess.Popen[str]
    folder: Path
    marker: str
    files_before: set[str] = field(default_factory=set)
    out: str = ""
    err: str = ""

    def records(self, run: str = "quickstart") -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / "metrics.jsonl"
        if not path.exists():
            return []
        return [
            json.loads(line)
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def steps(self) -> list[dict[str, Any]]:
        """The records of training steps."""
        return [record for record in self.records() if record["step"] > 0]

    def wait_for_step(self, step: int, timeout_s: float = 180.0) -> None:
        """Return when the record of that step is written; fails when the command ends first."""
        deadline = time.monotonic() + timeout_s
        while not any(record["step"] >= step for record in self.records()):
            if self.process.poll() is not None:
                self.finish()
                raise AssertionError(f"ended before step {step}:\n{self.out}\n{self.err}")
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s} s"
            time.sleep(_POLL_S)

    def finish(self, timeout_s: float = 600.0) -> int:
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def ends_well(self, timeout_s: float) -> None:
        """With exit code 0, and leaving nothing behind."""
        assert self.finish(timeout_s) == 0, self.err
        assert self.leftovers() == []

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def look(self) -> list[Seen]:
        """The command and its processes; one that ends meanwhile is not among them."""
        seen = []
        for process in [psutil.Process(self.process.pid), *self.tree()]:
            with suppress(psutil.NoSuchProcess):
                listening = [
                    (connection.laddr.ip, connection.laddr.port)
                    for connection in process.net_connections(kind="inet")
                    if connection.status == psutil.CONN_LISTEN
                ]
                line = " ".join(process.cmdline())
                seen.append(Seen(process.pid, line, process.environ(), listening))
        return seen

    def leftovers(self) -> list[str]:
        """Processes, shared-memory files and session folders that outlived the command."""
        alive = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_ours = process.environ().get("MEGARL_TEST") == self.marker
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"process {process.info['cmdline']}")
        return alive + left_since(self.files_before)


def convert(folder: Path, run: str, *arguments: str) -> None:
    """`megarl convert` in a folder in which a run was."""
    command = [sys.executable, "-m", "megarl.cli", "convert", run, *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def inputs(tiny_model: Path, arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's own model and data, where its recipe looks for them."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "models").mkdir()
    (folder / "models" / "tiny-qwen3-moe").symlink_to(tiny_model)
    (folder / "data").symlink_to(arithmetic)
    return folder


@pytest.fixture
def launch(inputs: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `megarl train` (or another verb) on the quickstart recipe, or another, with overrides and options, in a
    folder that all commands of a test share; whatever a test does, nothing of it survives. module: of the command."""
    started: list[Command] = []

    for name in ("models", "data"):
        (tmp_path / name).symlink_to(inputs / name)

    def start(
        *overrides: str, verb: str = "train", recipe: Path = RECIPE, module: str = "megarl.cli"
    ) -> Command:
        marker = f"{tmp_path}-{len(started)}"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "MEGARL_TEST": marker, "PYTHONPATH": path}
        before = shared_files()
        process = subprocess.Popen(
            [sys.executable, "-m", module, verb, str(recipe), *overrides],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(Command(process, tmp_path, marker, before))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            tree = command.tree()
            os.killpg(command.process.pid, signal.SIGKILL)
            for child in tree:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            command.process.communicate()
