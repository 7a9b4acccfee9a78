"""The page of a run that hangs: the culprit on the first line, then the evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.diagnosis.culprit import culprit, described, is_idle, running_jobs
from megarl.diagnosis.evidence import Evidence, NodeEvidence, ProcessEvidence, WorkerEvidence
from megarl.printable import one_line

_MOST_JOBS = 10


def hang_page(evidence: Evidence) -> str:
    """The whole page; each line is printable, whatever a user's function is called or has been given."""
    return "".join(f"{one_line(line)}\n" for line in _lines(evidence))


def _lines(evidence: Evidence) -> Iterator[str]:
    yield culprit(evidence)
    yield ""
    where = "between two phases"
    if evidence.phase:
        where = f"in {evidence.phase}, which has lasted for {evidence.seconds:.0f} s"
    yield f"{where}; this page was made because {evidence.reason}"
    yield ""
    yield "WHO IS WAITED FOR"
    for worker in evidence.workers:
        yield f"  {'-> ' if worker.is_awaited else '   '}{_worker_line(worker)}"
    yield ""
    yield "REWARD FUNCTIONS, TOOLS AND AGENTS THAT RUN, THE SLOWEST FIRST"
    jobs = running_jobs(evidence)
    for worker, job in jobs[:_MOST_JOBS]:
        yield f"  {described(job)}, for {worker}"
    if len(jobs) > _MOST_JOBS:
        yield f"  and {len(jobs) - _MOST_JOBS} more"
    if not jobs:
        yield "  none"
    yield ""
    yield "NODES"
    for node in evidence.nodes:
        yield f"  {_node_line(node)}"
    yield ""
    yield "PROCESSES AND THEIR PYTHON STACKS, THE INNERMOST FUNCTION FIRST"
    for process in evidence.processes:
        yield from _process_lines(process)


def _worker_line(worker: WorkerEvidence) -> str:
    pid = f" (pid {worker.pid})" if worker.pid else ""
    head = f"{worker.name}{pid} on {worker.node}:"
    condition = worker.condition
    if condition is None:
        return f"{head} does not answer"
    parts = []
    if condition.open_calls:
        longest = condition.open_calls[0]
        parts.append(
            f"{len(condition.open_calls)} open calls, the longest {longest.method} for {longest.seconds:.1f} s"
        )
    else:
        parts.append("no open call")
    if condition.last:
        parts.append(
            f"the last that has finished {condition.last.method}, {condition.last.seconds:.1f} s ago"
        )
    load = condition.load
    if load.num_running or load.num_queued:
        parts.append(f"{load.num_running} requests run, {load.num_queued} wait")
    return f"{head} {'; '.join(parts)}"


def _node_line(node: NodeEvidence) -> str:
    parts = []
    if node.is_dead:
        parts.append("its raylet does not answer")
    if node.store_share is not None:
        parts.append(f"object store {node.store_share:.0%} full")
    if node.problem:
        parts.append(node.problem)
    return f"{node.address}: {'; '.join(parts) or 'answers'}"


def _process_lines(process: ProcessEvidence) -> Iterator[str]:
    whose = process.worker if process.is_own else f"{process.title} of {process.worker}"
    share = f"{process.cpu_share:.0%} of a processor"
    yield f"  {whose} on {process.node} (pid {process.pid}, state {process.state}, {share})"
    if process.problem:
        yield f"    no stacks: {process.problem}"
    num_idle = 0
    for thread in process.threads:
        if is_idle(thread.frames):
            num_idle += 1
            continue
        yield f"    {thread.name}"
        for frame in thread.frames:
            yield f"      {frame}"
    if num_idle:
        yield f"    and {num_idle} threads that wait for work"
