"""Hit processes of a run again and again, and compare its end with that of an undisturbed run.

    python scripts/chaos.py --faults 40 [--from 0] [--seed 1] [--run plain] [--steps 16] [--results FILE] [--page FILE]
        [--folder DIR]
    python scripts/chaos.py --run plain --numbers 3 7 20
    python scripts/chaos.py --run quickstart --every 20 --for 600 [--results FILE] [--folder DIR]

A tiny model, on CPU, seeded samples. Each fault is drawn by its number: what is done, to a process of which role, and a
moment of which phase (chaos_faults.py); it hits the next step that has the phase. Where a fault ends the run, it must
say so in time, with a named cause and without a process or file left behind, and is resumed. At the end weights,
optimizer, metrics (but for times) and samples must be the undisturbed run's to the last bit, where samples are seeded.

Each fault is a line of JSON, also appended to --results, so that many commands make one matrix: --page makes a page of
all of its lines, with --faults 0 of them alone. Of a number that was hit more than once the last line counts. With
--every faults come by the clock, wherever the run is, and none is waited for. Exit code 1: something differs, hangs or
is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import soak_resume as soak
from chaos_compare import UNDISTURBED, differences
from chaos_faults import (
    DISK_S,
    MARKER,
    NODES,
    Disk,
    Fault,
    Leftovers,
    Victims,
    drawn,
    hit,
)
from chaos_network import Nodes, ray_nodes
from chaos_page import page
from chaos_runs import PHASES, RUNS

ROOT = Path(__file__).resolve().parents[1]
ENDED_S = 60.0  # within which the step is done after all, or the run has ended
HUNG_S = 200.0
FIRST = 4  # the steps before have longer starts, and teach how long a silence may be
_POLL_S = 0.005


@dataclass
class Outcome:
    """What became of a fault.

    outcome: recovered; unnoticed: two steps went on as if nothing had been; ended: the run did; missed: nobody was
    there to hit; hung. Seconds since it: until a line told of it, until the step was recorded or the run had ended;
    lost: until the step was recorded, by the run that resumes where it ended, without the step's usual seconds.
    """

    fault: Fault
    step: int = -1
    outcome: str = "missed"
    detected_s: float | None = None
    ended_s: float | None = None
    lost_s: float | None = None
    cause: str = ""
    left: Sequence[str] = field(default_factory=list)


class Attack:
    """A run under attack: its process, what its driver says of it, and its log."""

    def __init__(self, folder: Path, name: str, nodes: Nodes | None = None) -> None:
        self._folder = folder
        self.nodes = nodes
        self.name = name
        self.log = folder / f"{name}.log"
        self._state = folder / f"{name}.chaos"
        self._state.mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes]
        self._last = -1
        self.began_s = time.monotonic()  # of the step that is under way

    def start(self) -> None:
        """Begin or resume the run."""
        for file in self._state.iterdir():
            # the folders of all its sessions are looked for when it has ended
            if file.name != "sessions":
                file.unlink()
        recipe = ROOT / "recipes" / (self._folder / "recipe").read_text()
        driver = ROOT / "scripts" / "chaos_driver.py"
        overrides = (self._folder / "overrides").read_text().splitlines()
        command = [sys.executable, str(driver), "train", str(recipe), "--resume", *overrides]
        settings = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            MARKER: self.marker,
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

    @property
    def marker(self) -> str:
        return str(self._state)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def state(self) -> dict[str, Any]:
        try:
            return json.loads((self._state / "state.json").read_text())
        except FileNotFoundError:
            return {"step": -1, "phase": "", "phases": 0, "pids": {}}

    @property
    def steps(self) -> int:
        """The last step that has its record; -1: none."""
        records = soak.records(self._folder, self.name)
        last = records[-1]["step"] if records else -1
        if last != self._last:
            self._last = last
            self.began_s = time.monotonic()
        return last

    def strike(self, fault: Fault, rng: random.Random) -> bool:
        """Hit somebody with the fault's role; whether anybody was there."""
        try:
            victims = Victims(self._state / "state.json", self.process.pid)
            if fault.kind == "raise":
                return self._let_raise(victims.name(fault.role))
            if self.nodes and fault.role in NODES:
                self.nodes.strike(fault, self.state()["pids"], self.log)
                return True
            hit(fault.kind, rng.choice(victims.of(fault.role)))
        except (OSError, IndexError, ValueError, psutil.NoSuchProcess):
            return False
        return True

    def _let_raise(self, name: str) -> bool:
        """The next call of the worker raises; returns when it has been made."""
        part = self._state / "raise.part"
        wanted = self._state / "raise"
        part.write_text(name)
        part.rename(wanted)
        while name and wanted.exists() and self.is_running:
            time.sleep(_POLL_S)
        return bool(name)

    def kill(self) -> None:
        """All of its processes, at once."""
        soak.kill(self.process)
        # psutil has reaped it, so that it is not known how it ended
        self.process.returncode = -signal.SIGKILL

    def new_text(self, log_size: int) -> str:
        with self.log.open("rb") as log:
            log.seek(log_size)
            return log.read().decode(errors="replace")


def attack(
    run: Attack, fault: Fault, usual_s: dict[str, float], rng: random.Random, disk: Disk | None
) -> Outcome:
    """Wait for the fault's moment, do it, and wait for what becomes of it."""
    outcome = Outcome(fault)
    step = _await_moment(run, fault)
    if step is None:
        return outcome
    time.sleep(fault.share * usual_s[fault.phase])
    # a run that resumes has records already
    outcome.step = step = max(step, run.steps + 1)
    step_began_s = run.began_s
    log_size = run.log.stat().st_size
    with ExitStack() as stack:
        if disk:
            stack.enter_context(disk.broken(fault.kind))
        elif not run.strike(fault, rng):
            return outcome
        _watch(run, outcome, log_size, stack)
    num_steps = max(1, run.steps - step + 1)
    outcome.lost_s = max(0.0, time.monotonic() - step_began_s - num_steps * usual_s["step"])
    return outcome


def _watch(run: Attack, outcome: Outcome, log_size: int, stack: ExitStack) -> None:
    """Until the step of the fault, or the one in which it is noticed, has its record, or the run ends or hangs."""
    began = time.monotonic()
    target = outcome.step
    while True:
        passed_s = time.monotonic() - began
        is_broken = outcome.fault.role == "disk" and passed_s <= DISK_S
        if not is_broken:
            stack.close()  # the disk is well again
        text = run.new_text(log_size)
        has_ended = not run.is_running and run.process.returncode != 0
        if outcome.detected_s is None and _tells(text):
            outcome.detected_s = passed_s
            target = max(target, run.state()["step"])
        steps = run.steps
        is_ending = re.search("^megarl: ", text, re.MULTILINE)
        if has_ended:
            outcome.outcome = "ended"
            outcome.cause = _last_line(run.new_text(log_size))
        elif passed_s > HUNG_S:
            outcome.outcome = "hung"
            outcome.cause = text[-2000:]
        elif is_ending and run.is_running:
            pass  # it has said its error, and has to end
        elif steps >= target and outcome.detected_s is not None:
            outcome.outcome = "recovered"
        elif (steps > outcome.step and not is_broken) or run.process.returncode == 0:
            outcome.outcome = "unnoticed"
        if outcome.outcome != "missed":
            outcome.ended_s = passed_s
            return
        time.sleep(10 * _POLL_S)


def _await_moment(run: Attack, fault: Fault) -> int | None:
    """The step in whose phase of the fault the run is now; None where it has ended before."""
    began = time.monotonic()
    before = run.state()["phases"]
    while run.is_running and time.monotonic() - began < soak.LIMIT_S:
        state = run.state()
        _ = run.steps  # when each began
        is_due = state["phases"] > before and state["step"] >= FIRST
        if state["phase"] == fault.phase and (is_due or fault.phase == "start"):
            return state["step"]
        time.sleep(_POLL_S)
    return None


def _tells(text: str) -> bool:
    """Whether a line tells of a process that is lost, or of another fault."""
    words = r"started anew|are ended|go on from|goes back|begins again|is repeated|WorkerFailed|its process died"
    return bool(re.search(rf"{words}|without the checkpoint|wait in memory|megarl: ", text))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""


def usual_seconds(folder: Path, name: str) -> dict[str, float]:
    """Of each phase in the undisturbed run, the mean; of a whole step, the median."""
    records = soak.records(folder, name)
    means = {}
    for phase in (*PHASES, "critic", "score", "ahead"):
        seconds = [record[f"time/{phase}_s"] for record in records if f"time/{phase}_s" in record]
        means[phase] = sum(seconds) / len(seconds) if seconds else 0.0
    means["step"] = median(record["time/step_s"] for record in records if record["step"] > 1)
    return means


def resumed_s(run: Attack, step: int) -> float:
    """Start the run that has ended; seconds until the step has its record, or the run has ended again."""
    began = time.monotonic()
    run.start()
    while run.is_running and run.steps < step and time.monotonic() - began < HUNG_S:
        time.sleep(10 * _POLL_S)
    return time.monotonic() - began


def disturb(
    folder: Path,
    name: str,
    faults: Iterator[tuple[int, Fault]],
    disk: Disk | None,
    nodes: Nodes | None,
) -> Iterator[dict[str, Any]]:
    """A run that is hit until it ends, or nothing is left to hit it with: a result for each fault, and of its end."""
    run = Attack(folder, name, nodes)
    usual_s = usual_seconds(folder, UNDISTURBED)
    leftovers = Leftovers(run.marker, *([nodes.has_for_run] if nodes else []))
    numbers = []
    run.start()
    for index, fault in faults:
        numbers.append(index)
        rng = random.Random(f"victim {index}")
        if fault.phase == "start" and run.steps >= 0:
            yield from _restarted(run, usual_s["step"])
        outcome = attack(run, fault, usual_s, rng, disk)
        if outcome.outcome == "hung":
            run.kill()
        if not run.is_running and run.process.returncode != 0:
            outcome.left = leftovers.found()
            outcome.lost_s = (outcome.ended_s or 0.0) + resumed_s(run, outcome.step)
            outcome.lost_s -= usual_s["step"]
        if nodes and outcome.outcome != "missed":
            nodes.renew(has_resumed=outcome.outcome == "ended")
        yield {"index": index} | asdict(outcome)
        if not run.is_running or run.steps >= soak.STEPS - 2:
            break
    yield {"end": _end_of(run, folder, leftovers), "faults": numbers}


def hit_by_clock(folder: Path, seed: int, every_s: float, for_s: float) -> Iterator[dict[str, Any]]:
    """The quickstart, hit every so many seconds for a time, and started again where that ends it; its end."""
    soak.STEPS = 30
    soak.LIMIT_S = 1800.0
    prepared(folder, "quickstart")
    run = Attack(folder, f"disturbed-{seed}")
    leftovers = Leftovers(run.marker)
    hits: list[str] = []
    num_starts = 1
    began = time.monotonic()
    run.start()
    for index, fault in _faults("quickstart", seed, range(round(for_s / every_s))):
        due = began + (index + 1) * every_s
        while time.monotonic() < due and (run.is_running or run.process.returncode != 0):
            if not run.is_running:
                run.start()
                num_starts += 1
            time.sleep(0.1)
        if not run.is_running:
            break
        if run.strike(fault, random.Random(f"victim {index}")):
            hits.append(f"{fault.kind} {fault.role}")
    end = _end_of(run, folder, leftovers)
    seconds = round(time.monotonic() - began)
    yield {"run": "quickstart", "hits": hits, "starts": num_starts, "seconds": seconds, "end": end}


def _restarted(run: Attack, step_s: float) -> Iterator[dict[str, Any]]:
    """Kill the whole run, and start it: what that costs."""
    # beyond those that are recorded
    step = run.steps + 1
    run.kill()
    seconds = resumed_s(run, step) - step_s
    yield {"restart_s": max(0.0, seconds)}
    run.kill()
    run.start()


def _end_of(run: Attack, folder: Path, leftovers: Leftovers) -> dict[str, Any]:
    """Let the run end, and compare it."""
    for _ in range(3):
        try:
            if run.process.wait(soak.LIMIT_S) == 0:
                break
        except subprocess.TimeoutExpired:
            run.kill()
        run.start()
    left = leftovers.found()
    if run.process.poll() != 0:
        if run.is_running:
            run.kill()
        return {"differences": [f"it does not end: {_last_line(run.new_text(0))}"], "left": left}
    return {"differences": differences(folder, run.name)[:20], "left": left}


def prepared(folder: Path, name: str) -> None:
    """The undisturbed run, if it is not there yet."""
    kind = RUNS[name]
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "runs" / UNDISTURBED / "checkpoints" / f"step-{soak.STEPS:06d}").exists():
        return
    overrides = [*kind.overrides, f"run.steps={soak.STEPS}"]
    many_ends = name != "quickstart"
    soak.prepare(folder, overrides, episodes=kind.episodes, many_ends=many_ends)
    if name == "critic":
        from tests.parallel.checkpoints import write_classifier

        write_classifier((folder / "models" / "tiny-qwen3-moe").resolve(), folder / "classifier")
    soak.finish(folder, UNDISTURBED)


def _faults(
    name: str, seed: int, numbers: Sequence[int], only: str | None = None
) -> Iterator[tuple[int, Fault]]:
    """Each number with its fault; only: what is done to whom in which phase, in place of what is drawn."""
    kind = RUNS[name]
    for index in numbers:
        fault = drawn(seed, name, index, kind.roles, kind.phases)
        if only:
            kind_of_fault, role, phase = only.split(",")
            fault = Fault(kind_of_fault, role, phase, fault.share)
        yield index, fault


def results_of(
    name: str, folder: Path, seed: int, numbers: Sequence[int], only: str | None = None
) -> Iterator[Any]:
    """The results of all faults with these numbers, by as many runs as that takes; only: as of `_faults`."""
    with ExitStack() as stack:
        disk = None
        nodes = None
        folder.mkdir(parents=True, exist_ok=True)
        if name == "nodes":
            nodes = stack.enter_context(
                ray_nodes(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            )
        prepared(folder, name)
        if name == "disk":
            disk = Disk(folder, 2**28)
            stack.callback(disk.close)
        faults = _faults(name, seed, numbers, only)
        index = -1
        for attempt in range(len(numbers)):
            run_name = f"disturbed-{seed}-{numbers[0]}-{attempt}"
            if disk:
                target = disk.path / run_name
                target.mkdir()
                (folder / "runs" / run_name).symlink_to(target)
            for result in disturb(folder, run_name, faults, disk, nodes):
                index = result.get("index", index)
                yield {"run": name, "seed": seed} | result
            if index == numbers[-1]:
                break


def is_bad(result: dict[str, Any]) -> bool:
    """Whether a result is one that must not be."""
    end = result.get("end", {})
    is_late = (result.get("ended_s") or 0.0) > ENDED_S
    return bool(end.get("differences") or end.get("left") or result.get("left") or is_late)


def _asked_for(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    if arguments.every:
        target = (folder / "quickstart").resolve()
        yield from hit_by_clock(target, arguments.seed, arguments.every, arguments.for_s)
        return
    following = range(arguments.first, arguments.first + arguments.faults)
    numbers = arguments.numbers or following
    for name in arguments.run or RUNS:
        if numbers:
            target = (folder / name).resolve()
            yield from results_of(name, target, arguments.seed, numbers, arguments.only)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="of each kind of run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first")
    parser.add_argument("--numbers", type=int, nargs="+", help="of the faults, in place of these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", action="append", choices=[*RUNS], help="by default all of them")
    parser.add_argument("--results", type=Path, help="a file to which the results are appended")
    parser.add_argument("--page", type=Path, help="a page of all results in the file")
    parser.add_argument("--steps", type=int, default=16, help="of a run")
    parser.add_argument("--every", type=float, help="hit the quickstart once in so many seconds")
    parser.add_argument("--for", type=float, default=600.0, dest="for_s", help="so many seconds")
    parser.add_argument("--only", help="this fault again and again, as kill,scheduler,train")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    soak.STEPS = arguments.steps
    num_bad = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        for result in _asked_for(arguments, arguments.folder or Path(temporary)):
            num_bad += is_bad(result)
            line = json.dumps(result)
            print(line, flush=True)
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(line + "\n")
    if arguments.page:
        lines = arguments.results.read_text().splitlines()
        before = arguments.page.read_text() if arguments.page.exists() else ""
        arguments.page.write_text(page([json.loads(line) for line in lines], before))
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
