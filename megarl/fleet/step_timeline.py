"""The timelines of a run: chosen steps, in which all processes record, as files for Perfetto."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.cluster.actor import Worker, answers
from megarl.cluster.ray_session import Cluster
from megarl.config.timeline import TimelineConfig
from megarl.disk import writing
from megarl.printable import Say, first_line
from megarl.timeline import recorder
from megarl.timeline.chrome_trace import CONTROLLER, ProcessTrace, trace
from megarl.timeline.clocks import SAME_CLOCK, Alignment, Offset, measure
from megarl.timeline.recorder import Recording
from megarl.types import UserError

FOLDER = "timeline"
_RECORDER = "megarl.timeline.recorder"
_PROFILER = "megarl.training.profiling"
# for a process that is asked to begin or to end: the file is also written without it
_ANSWER_S = 30.0
_WRITING_S = 300.0  # for a profile, which may have millions of operations
_MOST_READERS = 2  # processes of a node by which its clock is measured


@dataclass(frozen=True)
class _StepRecordings:
    """What the processes of a step recorded. missing: the names of those that did not."""

    own: Recording
    of_workers: Mapping[Worker, Recording]
    missing: Sequence[str]


class StepTimeline:
    """Lets all processes record in the chosen steps, and writes what they did after each of them.

    Nothing is asked of them within a step, and nothing at all in other steps.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: TimelineConfig,
        folder: Path,
        say: Say,
        ranks: Callable[[], Sequence[Worker]] = lambda: (),
    ) -> None:
        """folder: of the run. ranks: of the policy, as they are now, for torch's profiler."""
        self._cluster = cluster
        self._ranks = ranks
        self._profiled_ranks = config.profile_ranks
        self._steps = frozenset(config.steps)
        self._folder = folder / FOLDER
        self._say = say
        # whether a recording was begun and not ended, as where a step has failed
        self._is_open = False

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record while the block runs, if it is a chosen step, and write the file after it."""
        if self._is_open:
            self._end()
        if step not in self._steps:
            yield
            return
        before = self._begin()
        self._begin_profiles(step)
        try:
            with recorder.span(f"step {step}"):
                yield
        except BaseException:
            self._forget_profiles()
            raise
        recorded = self._end()
        clocks = {worker: of.identity.clock for worker, of in recorded.of_workers.items()}
        after = _offsets(recorded.own.identity.clock, clocks)
        self._write(step, recorded, before, after)
        self._end_profiles()

    def _begin(self) -> dict[str, Offset]:
        """Let every process record; the offsets of the other nodes' clocks, by clock."""
        self._is_open = True
        own = recorder.begin()
        begun = _ask(self._cluster.workers, "begin")
        return _offsets(own.clock, {worker: identity.clock for worker, identity in begun.items()})

    def _begin_profiles(self, step: int) -> None:
        calls = {}
        for rank, worker in self._profiled():
            file = self._folder / f"step_{step}.rank_{rank}.json.gz"
            calls[worker.compute(f"{_PROFILER}:begin", str(file))] = worker.name
        if calls:
            answers(calls, _ANSWER_S)

    def _end_profiles(self) -> None:
        """Have the ranks write their profiles."""
        calls = {worker.compute(f"{_PROFILER}:end"): worker.name for _, worker in self._profiled()}
        if not calls:
            return
        for name, file in answers(calls, _WRITING_S).items():
            if isinstance(file, Exception):
                self._say(f"{name} has not written its profile: {first_line(file)}")
            elif file:
                self._say(f"the profile of {name} is in {file}")
            else:
                self._say(
                    f"{name} has no profile: it was started within the step, or did not train in it"
                )

    def _forget_profiles(self) -> None:
        """Have the ranks free their profiles, which may take GBs; a rank that is lost or hangs is not waited for."""
        for _, worker in self._profiled():
            worker.compute(f"{_PROFILER}:forget")

    def _profiled(self) -> list[tuple[int, Worker]]:
        """The ranks to profile."""
        ranks = enumerate(self._ranks())
        return [(rank, worker) for rank, worker in ranks if rank in self._profiled_ranks]

    def _end(self) -> _StepRecordings:
        """Let every process stop."""
        self._is_open = False
        own = recorder.end()
        assert own is not None
        workers = self._cluster.workers
        of_workers = _ask(workers, "end")
        missing = [worker.name for worker in workers if worker not in of_workers]
        for worker, recording in of_workers.items():
            missing += [
                f"{worker.name}: {name} ({child.problem})"
                for name, child in (recording.children or {}).items()
                if child.problem
            ]
        return _StepRecordings(own, of_workers, missing)

    def _write(
        self,
        step: int,
        recorded: _StepRecordings,
        before: Mapping[str, Offset],
        after: Mapping[str, Offset],
    ) -> None:
        alignments = {
            clock: Alignment(before.get(clock, offset), offset) for clock, offset in after.items()
        }
        alignments[recorded.own.identity.clock] = SAME_CLOCK
        processes = [ProcessTrace(CONTROLLER, recorded.own, SAME_CLOCK)]
        missing = list(recorded.missing)
        for worker, recording in recorded.of_workers.items():
            if alignment := alignments.get(recording.identity.clock):
                processes.append(ProcessTrace(worker.name, recording, alignment))
            else:
                missing.append(worker.name)
        file = self._folder / f"step_{step}.json.gz"
        try:
            with writing(self._folder.parent, f"{FOLDER}/{file.name}"):
                self._folder.mkdir(exist_ok=True)
                content = trace(processes, {"step": step, "missing": missing})
                self._cluster.run_beside(partial(write, content, file))
        except UserError as error:
            # no reason to end the run
            self._say(str(error))
            return
        self._say(_told(file, alignments, missing))


def write(content: Iterable[str], file: Path) -> None:
    """Write a timeline, compressed. Raises OSError."""
    with gzip.open(file, "wt", compresslevel=1) as writer:
        writer.writelines(content)


def _told(file: Path, alignments: Mapping[str, Alignment], missing: Sequence[str]) -> str:
    """The line about a timeline that is written."""
    line = f"the timeline of the step is in {file}: open it in ui.perfetto.dev"
    if len(alignments) > 1:
        error_us = max(alignment.error_ns for alignment in alignments.values()) / 1000
        line += f"; the clocks of {len(alignments)} nodes are aligned to within {error_us:.0f} us"
    if missing:
        line += f"; without {', '.join(missing)}, which did not record the whole step"
    return line


def _ask(workers: Sequence[Worker], function: str) -> dict[Worker, Any]:
    """What the recorder of each process returns; without those that are lost, or do not answer, or have nothing."""
    calls = {
        worker.compute(f"{_RECORDER}:{function}"): str(number)
        for number, worker in enumerate(workers)
    }
    by_number = answers(calls, _ANSWER_S)
    found = {worker: by_number[str(number)] for number, worker in enumerate(workers)}
    return {
        worker: answer
        for worker, answer in found.items()
        if not (answer is None or isinstance(answer, Exception))
    }


def _offsets(own_clock: str, clocks: Mapping[Worker, str]) -> dict[str, Offset]:
    """The offset of each clock but the own one; without those that cannot be read."""
    readers: dict[str, list[Worker]] = {}
    for worker, clock in clocks.items():
        if clock != own_clock:
            readers.setdefault(clock, []).append(worker)
    found = {}
    for clock, workers in readers.items():
        offsets = [clock_of(worker) for worker in workers[:_MOST_READERS]]
        known = [offset for offset in offsets if offset]
        if known:
            found[clock] = min(known, key=lambda offset: offset.error_ns)
    return found


def clock_of(worker: Worker) -> Offset | None:
    """How far the clock of a process is from this one's, by round trips; None where it does not answer."""

    def read() -> int:
        call = worker.compute(f"{_RECORDER}:now_ns")
        answer = answers({call: worker.name}, _ANSWER_S)[worker.name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        return measure(read)
    except Exception:
        # it is lost, which is told where it is missed
        return None
