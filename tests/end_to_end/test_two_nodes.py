"""A Slurm job of two nodes, each a Ray node of this machine with an address of its own; Slurm alone is a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NODES = ("127.0.0.2", "127.0.0.3")
STEPS = 3
SMALL = (
    "placement.gpus=4", "placement.gpus_per_node=2", "train.tp=2", "train.pp=2", "train.ep=2", "rollout.engine.count=2",
    "rollout.engine.tp=2", "warm_start.steps=2", "rollout.prompts_per_step=8", "evaluation.max_prompts=8",
    "run.trackers=[]", f"run.steps={STEPS}", "checkpoint.every=1", "checkpoint.asynchronous=false",
)  # fmt: skip
_LIMIT_S = 400.0
_POLL_S = 0.1


class Job:
    """A run of the quickstart on two nodes, in a folder of its own."""

    def __init__(self, inputs: Path, folder: Path, disk: str) -> None:
        """disk: a short path, for what the nodes have of their own."""
        self.disk = Path(disk)
        self._run = folder / "runs" / "quickstart"
        self.jobs, self._log = folder / "jobs", folder / "job.log"
        data = [f"model.path={inputs}/models/tiny-qwen3-moe", f"data.train={inputs}/data/train.jsonl"]
        data += [f"data.eval.arith={inputs}/data/eval.jsonl", f"run.dir={folder}/runs"]
        command = ["sbatch", "--nodes=2", "scripts/slurm/megarl.sbatch", "recipes/quickstart.yaml", *SMALL, *data]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MEGARL_"))}
        path = [str(ROOT / "tests" / "slurm"), str(Path(sys.executable).parent), os.environ["PATH"]]
        own = {
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(ROOT),
            "FAKE_SLURM": str(folder),
            "MEGARL_JOBS": str(self.jobs),
            "MEGARL_RAY_DIR": disk,
            "TMPDIR": str(folder),  # of the driver; the nodes have folders of their own on the disk
            "OMP_NUM_THREADS": "1",
            "MEGARL_OBJECT_STORE_BYTES": str(2**28),
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=inherited | own, stdout=log, stderr=log)

    def log(self) -> str:
        return self._log.read_text()

    def steps(self) -> list[int]:
        file = self._run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def records(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self._run / "metrics.jsonl").read_text().splitlines()]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while step not in self.steps():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(_POLL_S)

    def tree(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def driver(self) -> psutil.Process:
        return next(one for one in self.tree() if "megarl train recipes/quickstart.yaml" in _line(one))

    def below_raylet(self, address: str) -> list[psutil.Process]:
        """The megarl processes of a node."""
        own = f"--node_ip_address={address}"
        (raylet,) = [one for one in self.tree() if one.name() == "raylet" and own in _line(one)]
        return [one for one in raylet.children() if _line(one).startswith("ray::_Shell")]

    def kill_second_node(self) -> None:
        """All processes of it, at once."""
        start = f"bash {ROOT}/scripts/ray_node.sh worker"
        node = next(one for one in self.tree() if _line(one).startswith(start))
        for one in [node, *node.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture
def job(inputs: Path, tmp_path: Path) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp") as disk:
        made = Job(inputs, tmp_path, disk)
        yield made
        if made.process.poll() is None:
            for one in [psutil.Process(made.process.pid), *made.tree()]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            made.process.wait()


def test_a_job_of_two_nodes_survives_the_death_of_one(job: Job) -> None:
    """Each engine lies inside a node; when the second is gone the job is queued again and goes on where it was."""
    job.wait_for_step(1)
    job.driver().suspend()  # so that the run is where it is for as long as we look
    for address in NODES:
        # An engine's ranks are forked, on CPU, from a server that is the child of its worker.
        ranks = [sum(len(one.children()) for one in worker.children()) for worker in job.below_raylet(address)]
        assert sorted(ranks) == [0, 0, 2], "two training ranks, and both ranks of an engine"
    job.kill_second_node()
    job.driver().resume()
    assert job.process.wait(_LIMIT_S) == 0, job.log()

    said = job.log().splitlines()
    assert "megarl: job 4711: failed (exit code 1) and is queued again, restart 1 of 3" in said, job.log()
    assert any(line.startswith("this run goes on after step ") for line in said)
    assert said[-1] == "megarl: job 4711: the run is done"
    assert [step for step in job.steps() if step] == [1, 2, 3]
    for record in job.records():
        assert record.get("rollout/logprob_gap_mean", 0.0) < 1e-4, "the weights came over whole, between nodes too"
    assert [one.name for one in job.jobs.iterdir()] == ["4711.logs"]
    kept = list(job.jobs.glob(f"4711.logs/0/{NODES[0]}/logs/worker-*"))
    assert kept, "what the processes said in the life that failed; the other node died"
    assert list(job.disk.iterdir()) == [], "the next life takes away what the dead node left"
