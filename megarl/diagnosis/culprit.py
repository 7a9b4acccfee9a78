"""From the evidence of a run that hangs to one line with the likeliest culprit. Pure.

The rules stand in the order of certainty: a disk or a server of Ray by which the run ends is to blame, what is dead or
stopped explains what waits for it, a full object store why a call has not arrived, and a rank that is missing from a
collective the ranks in it. Then come rules for what is slow, and last what a watchdog has said before it ends the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from megarl.diagnosis.collectives import Absence, Collective, absence, collective_of
from megarl.diagnosis.evidence import (
    RAYLET,
    SCHEDULER,
    Evidence,
    Frame,
    NodeEvidence,
    ProcessEvidence,
    WorkerEvidence,
)
from megarl.types.conditions import RunningJob

_MOST_NAMED = 4
_JOB_SHARE = 1 / 3  # of a phase that a job has taken: less is the work of a moment
_WHOLE_SHARE = 0.8  # the same, where nobody knows how long a phase takes
_SUBJECT_LETTERS = 120
_RAYS_OWN = "ray/_private/"
# files in which a thread waits for work
_IDLE_FILES = (
    "megarl/isolation/loop_thread.py",
    "threading.py",
    "concurrent/futures/thread.py",
    "selectors.py",
    "queue.py",
    "asyncio/base_events.py",
    "asyncio/runners.py",
)


def culprit(evidence: Evidence) -> str:
    """The likeliest reason why the phase does not end; without one, who is at work."""
    return named_culprit(evidence) or _who_works(evidence)


def named_culprit(evidence: Evidence) -> str:
    """The same by the first rule that finds one; "" where none does."""
    for rule in _RULES:
        if line := rule(evidence):
            return line
    return ""


def seems_hung(evidence: Evidence) -> bool:
    """Whether something is seen that a healthy phase has at most for a moment, however long it lasts.

    A healthy one, too, has a last engine, a store that is full, and ranks that wait for one which computes.
    """
    missing = _absence(evidence)
    jobs = running_jobs(evidence)
    is_job_old = bool(jobs) and jobs[0][1].seconds >= _WHOLE_SHARE * evidence.seconds
    return (
        bool(_dead_node(evidence) or _stopped(evidence) or _still_engine(evidence))
        or (missing is not None and _are_still(missing.missing, evidence))
        or is_job_old
        or _waits_for_none_at_work(evidence)
    )


def _are_still(names: Sequence[str], evidence: Evidence) -> bool:
    return all(_is_still(worker, evidence) for worker in evidence.workers if worker.name in names)


def _waits_for_none_at_work(evidence: Evidence) -> bool:
    """Whether all that the controller waits for stand still, and none has sent requests or jobs to others."""
    awaited = evidence.awaited
    for worker in awaited:
        condition = worker.condition
        # servers that others have started compute elsewhere, and so may a job
        if condition and (condition.load.num_running or condition.load.jobs):
            return False
        if condition and not condition.open_calls:
            return False
    return bool(awaited) and all(_is_still(worker, evidence) for worker in awaited)


def _dead_node(evidence: Evidence) -> str:
    for node in evidence.nodes:
        if node.is_dead:
            return f"node {node.address}: its raylet does not answer, and with it {_workers_on(node, evidence)}"
    return ""


def _workers_on(node: NodeEvidence, evidence: Evidence) -> str:
    names = [worker.name for worker in evidence.workers if worker.node == node.address]
    return f"{_listed(names)} of the run" if names else "no worker of the run"


def _stopped(evidence: Evidence) -> str:
    for process in evidence.processes:
        if process.is_stopped:
            whose = process.worker
            if whose == RAYLET:
                whose = f"Ray's raylet on node {process.node}"
            if not process.is_own:
                whose = f"{process.title} of {process.worker}"
            return (
                f"{whose} (pid {process.pid}): a signal has stopped the process (SIGSTOP or Ctrl-Z)"
            )
    return ""


def _absence(evidence: Evidence) -> Absence | None:
    """The members of a group that others of it wait for in a collective, of the first such group."""
    own = evidence.own_processes
    groups: dict[str, list[WorkerEvidence]] = defaultdict(list)
    for worker in evidence.workers:
        groups[worker.group].append(worker)
    for group in groups.values():
        members: dict[str, Collective | None] = {
            worker.name: collective_of(own[worker.name])
            for worker in group
            if worker.name in own and own[worker.name].threads
        }
        if found := absence(members):
            return found
    return None


def _missing_from_collective(evidence: Evidence) -> str:
    found = _absence(evidence)
    if found is None:
        return ""
    first = next(worker for worker in evidence.workers if worker.name == found.missing[0])
    is_one = len(found.waiting) == 1
    return (
        f"{_listed(found.missing)} {'is' if len(found.missing) == 1 else 'are'} not in the "
        f"{found.collective} in which {_listed(found.waiting)} {'waits' if is_one else 'wait'}; "
        f"{_activity(first, evidence)}"
    )


def _full_store(evidence: Evidence) -> str:
    for node in evidence.nodes:
        if node.is_store_full:
            return (
                f"the object store of node {node.address} is full ({node.store_share:.0%}): results and samples "
                "that are made there, or needed there, wait for room"
            )
    return ""


def _long_job(evidence: Evidence) -> str:
    jobs = running_jobs(evidence)
    if jobs:
        worker, job = jobs[0]
        if job.seconds >= _JOB_SHARE * evidence.seconds:
            return f"{described(job)}, for {worker}"
    return ""


def running_jobs(evidence: Evidence) -> list[tuple[str, RunningJob]]:
    """(worker, job) of all users' functions that run, the slowest first."""
    jobs = [
        (worker.name, job)
        for worker in evidence.workers
        if worker.condition
        for job in worker.condition.load.jobs
    ]
    return sorted(jobs, key=lambda found: -found[1].seconds)


def described(job: RunningJob) -> str:
    """In words."""
    subject = job.subject[:_SUBJECT_LETTERS]
    return f"{job.kind} {job.name} (pid {job.pid}) has been running for {job.seconds:.0f} s on {subject}"


def _silent_worker(evidence: Evidence) -> str:
    for worker in evidence.awaited:
        if worker.condition is None and worker.pid is None:
            return f"{worker.name} has never answered yet: its process is still being started"
        if worker.condition is None:
            return f"{worker.name} does not answer; {_activity(worker, evidence)}"
    return ""


def _still_engine(evidence: Evidence) -> str:
    """An engine with requests whose other processes, the schedulers among them, do nothing."""
    for worker in evidence.awaited:
        if not worker.condition or not worker.condition.load.num_running:
            continue
        schedulers = [
            process
            for process in evidence.processes
            if process.worker == worker.name and process.title == SCHEDULER
        ]
        if schedulers and all(process.is_still for process in schedulers):
            load = worker.condition.load
            return (
                f"{worker.name}: {load.num_running} requests are with its schedulers, which use no processor; "
                f"{schedulers[0].title} (pid {schedulers[0].pid}) is {_place(schedulers[0])}"
            )
    return ""


def _with_open_calls(evidence: Evidence) -> list[WorkerEvidence]:
    """Those that are waited for and answer that they are in a call."""
    awaited = evidence.awaited
    return [worker for worker in awaited if worker.condition and worker.condition.open_calls]


def _last_of_its_group(evidence: Evidence) -> str:
    """A worker that is waited for, while all others of its group have finished."""
    busy = _with_open_calls(evidence)
    for worker in busy:
        group = [other for other in evidence.workers if other.group == worker.group]
        if len(group) > 1 and [other for other in group if other in busy] == [worker]:
            others = [other.name for other in group if other is not worker]
            have = "has" if len(others) == 1 else "have"
            return f"{worker.name} is the last: {_listed(others)} {have} finished; {_activity(worker, evidence)}"
    return ""


def _still_worker(evidence: Evidence) -> str:
    busy = _with_open_calls(evidence)
    still = [worker for worker in busy if _is_still(worker, evidence)]
    if still:
        return f"{still[0].name} stands still; {_activity(still[0], evidence)}"
    return ""


def _is_still(worker: WorkerEvidence, evidence: Evidence) -> bool:
    """Whether none of its processes uses a processor; one that was not seen is not judged."""
    own = [process for process in evidence.processes if process.worker == worker.name]
    return bool(own) and all(process.is_still for process in own)


def _certain_verdict(evidence: Evidence) -> str:
    return evidence.verdict if evidence.is_certain else ""


def _verdict(evidence: Evidence) -> str:
    return evidence.verdict


_RULES: Sequence[Callable[[Evidence], str]] = (
    _certain_verdict,
    _dead_node,
    _stopped,
    _full_store,
    _missing_from_collective,
    _long_job,
    _silent_worker,
    _still_engine,
    _last_of_its_group,
    _still_worker,
    _verdict,
)


def _who_works(evidence: Evidence) -> str:
    names = [worker.name for worker in evidence.awaited]
    if not names:
        return "no call of a worker is waited for: the controller itself is at work, see its stack"
    return f"every process computes: {_listed(names)}"


def _activity(worker: WorkerEvidence, evidence: Evidence) -> str:
    """What a worker is at, by its open call, its last call and its stack."""
    parts = []
    condition = worker.condition
    if condition and condition.open_calls:
        call = condition.open_calls[0]
        parts.append(f"in {call.method} for {call.seconds:.0f} s")
    elif condition and condition.last:
        parts.append(
            f"has no call open, has finished {condition.last.method} {condition.last.seconds:.0f} s ago"
        )
    process = evidence.own_processes.get(worker.name)
    if process and (collective := collective_of(process)):
        parts.append(f"in the {collective}")
    elif process:
        parts.append(_place(process))
    return f"{worker.name} " + ", ".join(parts or ["is not known to do anything"])


def _place(process: ProcessEvidence) -> str:
    """Where in its program a process is."""
    if not process.threads:
        return f"somewhere ({process.problem or 'it has no Python thread'})"
    frame = busy_frame(process)
    if frame is None:
        return "idle"
    return f"at {frame}, {'without' if process.is_still else 'using'} a processor"


def busy_frame(process: ProcessEvidence) -> Frame | None:
    """The innermost function of its busiest thread that is not itself a wait for other threads; None: all are idle."""
    busy = [thread for thread in process.threads if not is_idle(thread.frames)]
    if not busy:
        return None
    # threads that a library keeps beside the work are shallow
    deepest = max(busy, key=lambda thread: len(thread.frames))
    return next(frame for frame in deepest.frames if not _waits_for_work(frame))


def is_idle(frames: Sequence[Frame]) -> bool:
    """Whether a thread waits for work, with no function of anybody's on its stack but those that wait."""
    return all(_waits_for_work(frame) for frame in frames)


def _waits_for_work(frame: Frame) -> bool:
    return frame.file.endswith(_IDLE_FILES) or frame.file.startswith(_RAYS_OWN)


def _listed(names: Sequence[str]) -> str:
    """Names in words; of many the first ones."""
    shown = [*names[:_MOST_NAMED]]
    if len(names) > _MOST_NAMED:
        return f"{', '.join(shown)} and {len(names) - _MOST_NAMED} more"
    if len(shown) > 1:
        return f"{', '.join(shown[:-1])} and {shown[-1]}"
    return shown[0] if shown else "nobody"
