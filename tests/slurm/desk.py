"""Where launchers are called with stand-ins for Slurm, Ray and megarl on PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "tests" / "slurm"
_LIMIT_S = 60.0
# A launcher leaves what is set as it is, and other tests of this process may have set these.
_NOT_HANDED_ON = ("RAY_", "NCCL_", "GLOO_", "CUDA_", "MEGARL_", "SGLANG_")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Desk:
    """Where jobs are submitted from, and what the stand-ins noted."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.jobs = room / "jobs"
        self.folder = ROOT
        (room / "nodes").mkdir()
        path = [SLURM, SLURM / "stubs", Path(sys.executable).parent, os.environ["PATH"]]
        self.path = os.pathsep.join(map(str, path))
        handed_on = {
            name: value for name, value in os.environ.items() if not name.startswith(_NOT_HANDED_ON)
        }
        self._environment = handed_on | {
            "PATH": self.path,
            "FAKE_SLURM": str(room),
            "MEGARL_JOBS": str(self.jobs),
            "MEGARL_RAY_DIR": str(room),
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, lives: str = "0", **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            list(map(str, command)), cwd=self.folder, env=self._environment | {"FAKE_LIVES": lives} | more,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def submit(
        self, *arguments: str, nodes: int = 2, lives: str = "0", **more: str
    ) -> subprocess.Popen[str]:
        command = ["sbatch", f"--nodes={nodes}", "scripts/slurm/megarl.sbatch", *arguments]
        return self.start(*command, lives=lives, **more)

    def done(self, *arguments: str, code: int = 0, **more: Any) -> str:
        """What a job says that ends with this code."""
        return output_of(self.submit(*arguments, **more), code)

    def lives(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.room.glob("life-*.json"))]

    def wait_for_life(self, count: int) -> None:
        wait_until(lambda: len(self.lives()) >= count)

    def heard(self) -> list[str]:
        file = self.room / "heard"
        return file.read_text().splitlines() if file.exists() else []

    def exclusions(self) -> list[str]:
        """What each life but the first had to leave out, as lists of nodes."""
        return [life["excluded"] for life in self.lives()[1:]]

    def ray(self, address: str) -> dict[str, Any]:
        return json.loads((self.room / f"ray-{address}.json").read_text())

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=_LIMIT_S)
    return process.returncode, out


def output_of(process: subprocess.Popen[str], code: int = 0) -> str:
    """The output of a process that ends with this code."""
    exit_code, out = ended(process)
    assert exit_code == code, out
    return out


def stub(folder: Path, name: str, says: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{says}\n")
    (folder / name).chmod(0o755)
