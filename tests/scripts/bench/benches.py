"""Runs of the scripts in scripts/bench."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"


def run(name: str, options: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / f"{name}.py", *shlex.split(options)]
    settings = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=settings)


def figures(name: str, options: str = "") -> Any:
    """What a run prints with --json."""
    done = run(name, f"{options} --json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(name: str, options: str, **environment: str) -> str:
    """The last line of a run that refuses its options."""
    done = run(name, options, **environment)
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]
