"""Hit processes of a run again and again, and compare its end with that of an undisturbed run.

    python scripts/chaos.py --faults 40 [--seed 1] [--run plain] [--folder DIR] [--json] [--page FILE]

A tiny model, on CPU, seeded samples. Each fault is drawn in advance: what is done (`KINDS`), to a process of which
role, and a moment of which phase of which step. A run is hit in every step from the second on. Where a fault ends the
run, it must say so in time, with a named cause and without a process or file left behind, and is resumed. At the end
weights, optimizer, metrics (but for times) and samples must be the undisturbed run's to the last bit. Exit code 1:
something differs, hangs or is left.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
import soak_resume as soak

ROOT = Path(__file__).resolve().parents[1]
DETECTED_S = 15.0  # within which a line tells of a fault
ENDED_S = 60.0  # within which the step is done after all, or the run has ended
STEPS = 12
SMALL = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=24",
    "rollout.seeded=true",
    "rollout.engine.tp=1",
    "rollout.engine.count=2",
    "warm_start.steps=0",
    "train.tp=1",
    "train.pp=1",
    "train.ep=2",
    "train.updates_per_step=2",
    "placement.gpus=2",
    "evaluation.max_prompts=4",
    "evaluation.every=3",
    "reward.function=odd_reward:score",
    "run.trackers=[]",
    "run.restarts=100",
    "run.timeout_s=60",
    "checkpoint.every=2",
    f"run.steps={STEPS}",
]
PHASED = ["rollout.phase_tokens=6", "rollout.prompts_in_flight=16"]
AHEAD = [*PHASED, "rollout.ahead=1", "placement.gpus=4", "placement.first_engine_gpu=2"]
CRITIC = ["algorithm.name=vapo", "algorithm.critic_warmup_steps=2"]
RUNS = {
    "plain": SMALL,
    "phases": [*SMALL, *PHASED],
    "ahead": [*SMALL, *AHEAD],
    "critic": [*SMALL, *CRITIC],
    "lora": [*SMALL, *soak.LORA],
    "episodes": [*SMALL, *soak.EPISODES],
}
ROLES = ("engine", "scheduler", "rank", "critic", "reward worker")
KINDS = ("kill", "stop", "raise", "sockets", "memory")
PHASES = ("rollout", "train", "save", "reshard", "eval")
# what two engines measure otherwise, and what faults cost
MEASURED = (*soak.OF_ENGINES, "recovery/")
_POLL_S = 0.005
_PIDFD_GETFD = 438


@dataclass(frozen=True)
class Fault:
    """What is done to a process of a role, `share` of the phase's usual seconds after it began in this step."""

    kind: str
    role: str
    phase: str
    step: int
    share: float

    def __str__(self) -> str:
        return f"{self.kind} {self.role} in {self.phase} of step {self.step}"


@dataclass
class Outcome:
    """What became of a fault; seconds since it. outcome: recovered, ended or hung; missed: nobody was there to hit."""

    fault: Fault
    outcome: str = "missed"
    detected_s: float | None = None
    lost_s: float | None = None
    cause: str = ""


def draw(count: int, seed: int, run: str) -> list[Fault]:
    """So many faults, one in each step from the second on, of as many runs as that takes."""
    rng = random.Random(f"{seed} {run}")
    roles = [role for role in ROLES if role != "critic" or run == "critic"]
    faults = []
    for index in range(count):
        role = rng.choice(roles)
        kind = rng.choice([kind for kind in KINDS if kind != "raise" or role in ("rank", "critic")])
        step = 2 + index % (STEPS - 1)
        faults.append(Fault(kind, role, _phase(rng, role, step), step, rng.random()))
    return faults


def _phase(rng: random.Random, role: str, step: int) -> str:
    """A phase that the step has."""
    phases = {"rollout", "train", "reshard"}
    if step % 2 == 0:
        phases.add("save")
    if step % 3 == 0:
        phases.add("eval")
    if role == "critic":
        phases.add("critic")
    return rng.choice(sorted(phases))


class Attack:
    """A run under attack: its process, what its driver says of it, and its log."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.name = name
        self.log = folder / f"{name}.log"
        self._state = folder / "chaos"
        self._state.mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Begin or resume the run."""
        for file in self._state.iterdir():
            file.unlink()
        recipe = ROOT / "recipes" / (self._folder / "recipe").read_text()
        driver = ROOT / "scripts" / "chaos_driver.py"
        overrides = (self._folder / "overrides").read_text().splitlines()
        command = [sys.executable, str(driver), "train", str(recipe), "--resume", *overrides]
        settings = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "MEGARL_CHAOS": str(self._state),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"run.name={self.name}"],
                cwd=self._folder,
                env=os.environ | settings,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def state(self) -> dict[str, Any]:
        try:
            return json.loads((self._state / "state.json").read_text())
        except FileNotFoundError:
            return {"step": -1, "phase": "", "phases": 0, "pids": {}}

    @property
    def steps(self) -> int:
        """The last step that has its record; -1: none."""
        records = soak.records(self._folder, self.name)
        return records[-1]["step"] if records else -1

    def victim(self, role: str, rng: random.Random) -> int | None:
        """The process id of somebody with the role."""
        pids = self.state()["pids"]
        engines = [pid for name, pid in pids.items() if name.startswith("engine")]
        by_role: dict[str, Callable[[], list[int]]] = {
            "engine": lambda: engines,
            "scheduler": lambda: _descendants(engines, "forkserver"),
            "rank": lambda: [pid for name, pid in pids.items() if name.startswith("training rank")],
            "critic": lambda: [pid for name, pid in pids.items() if name.startswith("critic")],
            "reward worker": lambda: _descendants(engines, "reward"),
        }
        alive = [pid for pid in sorted(by_role[role]()) if psutil.pid_exists(pid)]
        return rng.choice(alive) if alive else None

    def let_raise(self, role: str) -> None:
        """The next call of somebody with the role raises."""
        prefix = "training rank" if role == "rank" else role
        (name, *_) = [name for name in self.state()["pids"] if name.startswith(prefix)]
        part = self._state / "raise.part"
        part.write_text(name)
        part.rename(self._state / "raise")


def _descendants(pids: Sequence[int], word: str) -> list[int]:
    """The children of those children of the processes whose command line has the word, or these themselves."""
    found = []
    for pid in pids:
        try:
            for child in psutil.Process(pid).children():
                if word in " ".join(child.cmdline()):
                    below = [process.pid for process in child.children()]
                    found += below or [child.pid]
        except psutil.NoSuchProcess:
            continue
    return found


def hit(kind: str, pid: int) -> None:
    """Do to a process what a fault does."""
    if kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif kind == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif kind == "sockets":
        _shut_sockets(pid)
    elif kind == "memory":
        # every larger allocation fails from now on
        used = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (used, used))


def _shut_sockets(pid: int) -> None:
    """Shut the TCP connections of another process down, as a network that fails does."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.status != psutil.CONN_ESTABLISHED:
            continue
        copy = libc.syscall(_PIDFD_GETFD, process, connection.fd, 0)
        if copy >= 0:
            with socket.socket(fileno=copy) as shared:
                try:
                    shared.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
    os.close(process)


def attack(attack: Attack, fault: Fault, usual_s: float, rng: random.Random) -> Outcome:
    """Wait for the fault's moment, do it, and wait for what becomes of it."""
    outcome = Outcome(fault)
    if not _await_moment(attack, fault):
        return outcome
    time.sleep(fault.share * usual_s)
    log_size = attack.log.stat().st_size
    if fault.kind == "raise":
        attack.let_raise(fault.role)
    else:
        pid = attack.victim(fault.role, rng)
        if pid is None:
            return outcome
        try:
            hit(fault.kind, pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return outcome
    began = time.monotonic()
    while True:
        passed_s = time.monotonic() - began
        new = attack.log.read_bytes()[log_size:].decode(errors="replace")
        if outcome.detected_s is None and _tells(new):
            outcome.detected_s = passed_s
        if attack.process.poll() is not None:
            outcome.outcome = "ended"
            outcome.cause = new.strip().splitlines()[-1] if new.strip() else ""
            break
        if attack.steps >= fault.step:
            outcome.outcome = "recovered"
            break
        if passed_s > ENDED_S + DETECTED_S:
            outcome.outcome = "hung"
            outcome.cause = new[-500:]
            break
        time.sleep(10 * _POLL_S)
    outcome.lost_s = passed_s
    return outcome


def _await_moment(attack: Attack, fault: Fault) -> bool:
    """Wait until the phase has begun in the step; False where the run has ended or the step passed without it."""
    began = time.monotonic()
    while attack.process.poll() is None and time.monotonic() - began < soak._LIMIT_S:
        state = attack.state()
        if state["step"] == fault.step and state["phase"] == fault.phase:
            return True
        if attack.steps >= fault.step:
            return False
        time.sleep(_POLL_S)
    return False


def _tells(text: str) -> bool:
    """Whether a line tells of a process that is lost, or of another fault."""
    return bool(re.search(r"started anew|is repeated|WorkerFailed|its process died|megarl: ", text))


def usual_seconds(folder: Path, name: str) -> dict[str, float]:
    """Of each phase in the undisturbed run, the mean."""
    steps = [record for record in soak.records(folder, name) if record["step"] > 0]
    means = {}
    for phase in (*PHASES, "critic"):
        seconds = [record[f"time/{phase}_s"] for record in steps if f"time/{phase}_s" in record]
        means[phase] = sum(seconds) / len(seconds) if seconds else 0.0
    return means


def disturb(folder: Path, run: str, faults: Sequence[Fault], seed: int) -> list[Outcome]:
    """A run that is hit by these faults, one in each of its steps, to its end."""
    rng = random.Random(f"victims {seed}")
    attacked = Attack(folder, "disturbed")
    usual_s = usual_seconds(folder, "undisturbed")
    attacked.start()
    outcomes = []
    for fault in faults:
        if attacked.process.poll() is not None:
            attacked.start()
        outcomes.append(attack(attacked, fault, usual_s[fault.phase], rng))
        print(json.dumps({"run": run, "fault": str(fault)} | asdict(outcomes[-1])), flush=True)
        if outcomes[-1].outcome == "hung":
            soak.kill(attacked.process)
    while attacked.process.wait(soak._LIMIT_S) != 0:
        attacked.start()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=STEPS - 1, help="of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", action="append", choices=[*RUNS], help="by default all of them")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    faulty = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        for run in arguments.run or RUNS:
            folder = (arguments.folder or Path(temporary)) / run
            folder.mkdir(parents=True, exist_ok=True)
            episodes = run == "episodes"
            soak.prepare(folder, RUNS[run], episodes=episodes)
            soak.STEPS = STEPS
            soak.finish(folder, "undisturbed")
            faults = draw(arguments.faults, arguments.seed, run)
            outcomes = disturb(folder, run, faults, arguments.seed)
            unequal = soak.differences(
                folder, "undisturbed", "disturbed", MEASURED, episodes=episodes
            )
            hung = [outcome for outcome in outcomes if outcome.outcome == "hung"]
            faulty += bool(unequal or hung)
            print(json.dumps({"run": run, "differences": unequal[:20], "hung": len(hung)}))
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
