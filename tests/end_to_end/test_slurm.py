"""megarl.sbatch under a real Slurm of three nodes, which are Ray nodes of this machine with addresses of their own."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import NODES, Slurm, line_of, missing, processes_with, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing()), reason=f"Slurm is not installed: {', '.join(missing())} missing"
    ),
]

ROOT = Path(__file__).parents[2]
STEPS = 3
SMALL = (
    "train.pp=2", "rollout.engine.count=1", "warm_start.steps=2", "rollout.prompts_per_step=8",
    "evaluation.max_prompts=8", "run.trackers=[]", f"run.steps={STEPS}",
)  # fmt: skip
_LIMIT_S = 400.0


class Job:
    """A run of the quickstart on two nodes, the first that are free, in a folder of its own."""

    def __init__(self, slurm: Slurm, inputs: Path, folder: Path, disk: str) -> None:
        """disk: a short path, for what the nodes have of their own."""
        self._slurm, self._inputs, self._folder, self.disk = slurm, inputs, folder, Path(disk)
        self._run = folder / "runs" / "quickstart"
        self.jobs, self._log = folder / "jobs", folder / "job.log"
        self.id = ""

    def submit(self, *keys: str, node_gpus: int = 1) -> None:
        """Tensor and expert parallel inside a node; SIGUSR1 half an hour before the time limit of an hour."""
        inside = ("placement.gpus_per_node", "train.tp", "train.ep", "rollout.engine.tp")
        sizes = [f"placement.gpus={2 * node_gpus}", *(f"{key}={node_gpus}" for key in inside)]
        files = [
            f"model.path={self._inputs}/models/tiny-qwen3-moe",
            f"data.train={self._inputs}/data/train.jsonl",
        ]
        files += [f"data.eval.arith={self._inputs}/data/eval.jsonl", f"run.dir={self._folder}/runs"]
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{self._slurm.environment['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MEGARL_JOBS": str(self.jobs),
            "MEGARL_RAY_DIR": str(self.disk),
            # of the driver; the nodes have folders of their own on the disk
            "TMPDIR": str(self._folder),
            "OMP_NUM_THREADS": "1",
            "MEGARL_OBJECT_STORE_BYTES": str(2**28),
        }
        handed_on = self._slurm.environment.items()
        known = {
            name: value for name, value in handed_on if not name.startswith(("RAY_", "MEGARL_"))
        }
        options = ["--nodes=2", f"--gpus-per-node={node_gpus}", "--time=60", "--signal=B:USR1@1800"]
        options += [f"--output={self._log}", f"--chdir={ROOT}", "--parsable"]
        self.id = self._slurm.call(
            "env", "-i", *(f"{name}={value}" for name, value in (known | variables).items()),
            "sbatch", *options, "scripts/slurm/megarl.sbatch", "recipes/quickstart.yaml", *SMALL, *sizes, *files, *keys,
        ).strip()  # fmt: skip

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def said(self) -> list[str]:
        """What the job's script told, without the job's number."""
        mark = f"megarl: job {self.id}: "
        return [
            line.removeprefix(mark) for line in self.log().splitlines() if line.startswith(mark)
        ]

    def records(self) -> list[dict[str, float]]:
        file = self._run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self) -> list[float]:
        return [record["step"] for record in self.records() if record["step"]]

    def state(self) -> str:
        return self._slurm.field(self.id, "JobState")

    def wait_for_state(self, *states: str) -> None:
        wait_until(lambda: self.state() in states, _LIMIT_S, self._tell)

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            assert not self.said(), self._tell()
            return step in self.steps()

        wait_until(is_there, _LIMIT_S, self._tell)

    def _tell(self) -> str:
        return f"{self.log()}\n{self._slurm.call('scontrol', 'show', 'job', self.id)}\n{self._slurm.log()}"

    def processes(self) -> list[psutil.Process]:
        return processes_with("MEGARL_JOBS", str(self.jobs))

    def driver(self) -> psutil.Process:
        """The process below its supervisor, which has the same command line."""
        supervisor = next(
            process
            for process in self.processes()
            if "megarl train recipes/quickstart.yaml" in line_of(process)
        )
        (driver,) = supervisor.children()
        return driver

    def on_node(self, address: str) -> list[psutil.Process]:
        """What runs there as a step; the first node has the job's script and its children beside it."""
        processes = set(self.processes()) & set(processes_with("SLURMD_NODENAME", address))
        return [process for process in processes if process.environ().get("SLURM_STEP_ID")]

    def below_raylet(self, address: str) -> list[psutil.Process]:
        """The megarl processes of a node."""
        (raylet,) = [process for process in self.on_node(address) if process.name() == "raylet"]
        return [
            process for process in raylet.children() if line_of(process).startswith("ray::_Shell")
        ]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder,
        Slurm(Path(folder)) as started,
    ):
        yield started


@pytest.fixture
def job(slurm: Slurm, inputs: Path, tmp_path: Path) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="nodes-", dir="/tmp") as disk:
        new_job = Job(slurm, inputs, tmp_path, disk)
        yield new_job
        if new_job.id:
            slurm.end(new_job.id)
            for process in new_job.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            wait_until(lambda: not new_job.processes(), _LIMIT_S, new_job.log)


def is_pending(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a process that is stopped has been sent the signal."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    pending = next(line.split()[1] for line in status if line.startswith("ShdPnd"))
    return bool(int(pending, 16) >> (number - 1) & 1)


def nodes_of(job: Job, slurm: Slurm) -> tuple[str, ...]:
    names = slurm.call("scontrol", "show", "hostnames", slurm.field(job.id, "NodeList"))
    return tuple(names.split())


# four minutes; tests/slurm/test_job.py has the script's answer, test_resume.py the driver's
@pytest.mark.nightly
def test_a_job_goes_on_after_the_signal_before_its_time_limit(job: Job, slurm: Slurm) -> None:
    """The limit is drawn near once a step is done; the driver is stopped until Slurm's signal has come.

    Unverified on a GPU.

    scripts/ray_node.sh, scripts/launch_env.sh: the GPUs that `nvidia-smi` counts, and those that a step of a Slurm
    with cgroups sees; NCCL's and SGLang's variables. To check first: `nproc` and `nvidia-smi` inside a step.
    """
    job.submit()
    job.wait_for_step(1)
    driver = job.driver()
    driver.suspend()
    slurm.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=25")
    wait_until(lambda: is_pending(driver, signal.SIGUSR1), _LIMIT_S, job.log)
    driver.resume()
    job.wait_for_state("PENDING")
    slurm.call("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")

    assert job.said() == ["ended before its time limit and is queued again", "the run is done"], (
        job.log()
    )
    (resumed,) = [
        line for line in job.log().splitlines() if line.startswith("this run goes on after step ")
    ]
    assert resumed.startswith(("this run goes on after step 1", "this run goes on after step 2"))
    assert job.steps() == [1, 2, 3]
    assert list(job.jobs.iterdir()) == [], "neither a token, a count nor logs"
    assert list(job.disk.iterdir()) == []
    assert job.processes() == []


# three minutes of Slurm's own waiting; tests/slurm/test_job.py has the script's answers
@pytest.mark.nightly
def test_a_job_survives_the_death_of_its_second_node(job: Job, slurm: Slurm) -> None:
    """Each engine lies inside a node; when the second is gone the job goes on without it, also where it is back."""
    job.submit(
        "rollout.engine.count=2", "checkpoint.every=1", "checkpoint.asynchronous=false", node_gpus=2
    )
    job.wait_for_step(1)
    job.driver().suspend()  # so that the run is where it is for as long as we look
    for address in NODES[:2]:
        # An engine's ranks are forked, on CPU, from a server that is the child of its worker.
        lines = [
            [line_of(child) for server in worker.children() for child in server.children()]
            for worker in job.below_raylet(address)
        ]
        ranks = [sum("sglang.preload" in line for line in of_worker) for of_worker in lines]
        assert sorted(ranks) == [0, 0, 2], f"two training ranks, both ranks of an engine: {lines}"
    slurm.kill_node(NODES[1], job.on_node(NODES[1]))
    job.driver().resume()
    wait_until(lambda: len(job.said()) == 2, _LIMIT_S, job.log)
    slurm.start_node(NODES[1])
    job.wait_for_state("PENDING")  # once the node has told that nothing of the job is left
    # Slurm sends the step's last signal once more after a minute, to a node that is back by then. Where cred_expire is
    # Slurm's own, 120 s, the next life begins later than that.
    slurm.call("scontrol", "update", f"JobId={job.id}", "StartTime=now+90")
    job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")

    logs = f"the logs of its nodes are in {job.jobs / f'{job.id}.logs' / '0'}"
    restarted = "failed (exit code 1) and is queued again, restart 1 of 3"
    *told, exclusion, done = job.said()
    assert told == [logs, restarted] and done == "the run is done", job.log()
    assert exclusion.startswith(f"node {NODES[1]} is excluded: it died ("), job.log()
    assert nodes_of(job, slurm) == (NODES[0], NODES[2])
    assert any(line.startswith("this run goes on after step ") for line in job.log().splitlines())
    assert job.steps() == [1, 2, 3]
    for record in job.records():
        assert record.get("rollout/logprob_diff_mean", 0.0) < 1e-4, (
            "the weights came over whole, between nodes too"
        )
    assert [path.name for path in job.jobs.iterdir()] == [f"{job.id}.logs"]
    kept = list(job.jobs.glob(f"{job.id}.logs/0/{NODES[0]}/logs/worker-*"))
    assert kept, "what the processes said in the life that failed; the other node died"
    left = [(folder / "address").read_text().strip() for folder in job.disk.iterdir()]
    assert left == [NODES[1]], "no life runs on the excluded node, whose folder is on its own disk"
    assert job.processes() == []


# two minutes; tests/slurm/test_job.py has the script's answers, tests/cluster/test_node_slots.py the driver's
@pytest.mark.nightly
def test_a_node_that_failed_is_left_out_of_the_next_life(job: Job, slurm: Slurm) -> None:
    """A raylet dies, of which Slurm knows nothing: the node is free, and the job gets another."""
    job.submit()
    wait_until(lambda: "starting training ranks" in job.log(), _LIMIT_S, job.log)
    assert nodes_of(job, slurm) == NODES[:2]
    (raylet,) = [process for process in job.on_node(NODES[1]) if process.name() == "raylet"]
    raylet.kill()
    wait_until(lambda: len(job.said()) == 3, _LIMIT_S, job.log)
    assert job.said()[2].startswith(f"node {NODES[1]} is excluded: it died ("), job.log()
    job.wait_for_state("RUNNING")
    assert nodes_of(job, slurm) == (NODES[0], NODES[2])
    assert slurm.field(job.id, "ExcNodeList") == NODES[1]


@pytest.mark.parametrize("is_training", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_cancelled_job_leaves_nothing(job: Job, slurm: Slurm, is_training: bool) -> None:
    """While everything starts or trains, and also where it was asked to end before: the driver is stopped meanwhile."""
    job.submit()
    if is_training:
        job.wait_for_step(1)
    wait_until(lambda: "starting training ranks" in job.log(), _LIMIT_S, job.log)
    driver = job.driver()
    driver.suspend()
    slurm.call("scancel", "--signal=USR1", "--batch", job.id)
    wait_until(partial(is_pending, driver, signal.SIGUSR1), _LIMIT_S, job.log)
    slurm.call("scancel", job.id)  # Slurm lets every process go on, so that it can end
    job.wait_for_state("CANCELLED")
    wait_until(lambda: not job.processes(), _LIMIT_S, job.log)
    assert job.said()[-1] == "ended by a signal; it is not queued again", job.log()
    assert list(job.disk.iterdir()) == []
    assert [path.name for path in job.jobs.iterdir()] == [f"{job.id}.logs"]
