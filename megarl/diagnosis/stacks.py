"""The Python stacks of a node's processes, read from outside by py-spy, or written by the processes on a signal. Linux.

py-spy reads the memory of a process without stopping it. Where the kernel forbids that (ptrace, as in many containers),
a process that has called `answer_with_stacks` writes its stacks itself: Python's own handler of the signal, in C, does
it also while a thread holds the interpreter.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megarl.diagnosis.evidence import RAYLET, SCHEDULER, Frame, ProcessEvidence, ThreadStack

_SIGNAL = signal.SIGRTMIN + 11
_FILE_NAME = "megarl-stacks"  # of memory that only this process and /proc have a name for
_SPY_S = 2.0  # for one process
_ALL_S = 4.0  # for all processes of a node
_AT_ONCE = 4
_WRITING_S = 1.0
_POLL_S = 0.05
_LEAST_S = 1.0  # in which the processor time of a process is measured
_TRIES = 2  # a stack that changes while it is read cannot be
_MOST_THREADS = 16
_MOST_FRAMES = 40
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_SERVERS = (RAYLET, "gcs_server")
_USERS_CODE = "megarl.isolation.entry"  # in the command of what users' functions run in
_SCHEDULER_FILE = "rollout/sglang/scheduler.py"  # on the stack of every scheduler of an engine
_answers: list[int] = []  # the descriptor, once there is one


def answer_with_stacks() -> None:
    """From now on this process writes its stacks when it gets the signal, into memory that `_answered` reads."""
    if not _answers:
        _answers.append(os.memfd_create(_FILE_NAME))
        faulthandler.register(_SIGNAL, file=_answers[0], all_threads=True)
        os.register_at_fork(after_in_child=_answer_apart)


def _answer_apart() -> None:
    """In a fork: it would write into the memory of the process that it comes from."""
    of_parent = _answers.pop()
    with suppress(OSError):
        _answers.append(os.memfd_create(_FILE_NAME))
        faulthandler.register(_SIGNAL, file=_answers[0], all_threads=True)
    os.close(of_parent)


@dataclass(frozen=True)
class _Process:
    """A process that is looked at. runs_users_code: or belongs to one that does. cpu_s: until now."""

    process: psutil.Process
    title: str
    worker: str
    is_own: bool
    cpu_s: float
    runs_users_code: bool = False


def processes_of(workers: Mapping[int, str]) -> list[ProcessEvidence]:
    """The processes of this node's workers, with all that these have started. workers: names by process id.

    It takes some seconds, and never longer than `_ALL_S` by much, whatever the processes do.
    """
    began_s = time.monotonic()
    found = [*_raylets([*workers])]
    children = _children()
    for pid, name in workers.items():
        found += _tree(pid, name, workers, children)
    pool = ThreadPoolExecutor(_AT_ONCE)
    # ranks, engines, their schedulers, and then what users' functions run in, of which there may be hundreds
    in_turn = sorted(found, key=lambda each: (not each.is_own, each.runs_users_code))
    dumps = {each: pool.submit(_stacks, each) for each in in_turn}
    results: list[tuple[Sequence[ThreadStack], str]] = []
    for each in found:
        left_s = began_s + _ALL_S - time.monotonic()
        try:
            results.append(dumps[each].result(max(0.0, left_s)))
        except TimeoutError:
            results.append(((), "there was no time left to read its stacks"))
    pool.shutdown(wait=False, cancel_futures=True)
    time.sleep(max(0.0, began_s + _LEAST_S - time.monotonic()))
    seconds = time.monotonic() - began_s
    return [
        _evidence(each, seconds, threads, problem)
        for each, (threads, problem) in zip(found, results, strict=True)
    ]


def packed_processes_of(workers: Mapping[int, str]) -> bytes:
    """The same for the journey from another node: Ray keeps what is larger in a store, which may be full."""
    return zlib.compress(
        json.dumps([asdict(process) for process in processes_of(workers)]).encode()
    )


def unpacked(packed: bytes) -> list[ProcessEvidence]:
    """The opposite of the packing."""
    evidence = []
    for fields in json.loads(zlib.decompress(packed)):
        threads = [
            ThreadStack(thread["name"], [Frame(**frame) for frame in thread["frames"]])
            for thread in fields.pop("threads")
        ]
        evidence.append(ProcessEvidence(**fields, threads=threads))
    return evidence


def _raylets(pids: Sequence[int]) -> Iterator[_Process]:
    """The raylet that has started these processes, on a machine with several nodes all of them."""
    parents: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.Error):
            parent = psutil.Process(pid).parent()
            if parent and parent.name() == RAYLET:
                parents[parent.pid] = parent
    for parent in parents.values():
        with suppress(psutil.Error):
            yield _Process(parent, RAYLET, RAYLET, True, _cpu_s(parent))


def _stacks(process: _Process) -> tuple[Sequence[ThreadStack], str]:
    if process.title == RAYLET:
        return (), "it is no Python program"
    return stacks_of(process.process.pid)


def _children() -> Mapping[int, Sequence[int]]:
    """The processes of this node by their parents: psutil itself would read all of /proc for each of them."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in psutil.pids():
        with suppress(psutil.Error):
            children[psutil.Process(pid).ppid()].append(pid)
    return children


def _tree(
    pid: int, worker: str, others: Collection[int], children: Mapping[int, Sequence[int]]
) -> Iterator[_Process]:
    """A worker and what it has started, without other workers and the servers of Ray."""
    waiting = [(pid, False)]
    while waiting:
        number, runs_users_code = waiting.pop(0)
        with suppress(psutil.Error):
            process = psutil.Process(number)
            if number != pid and (number in others or process.name() in _SERVERS):
                continue
            runs_users_code = runs_users_code or _USERS_CODE in process.cmdline()
            waiting += [(child, runs_users_code) for child in children.get(number, ())]
            cpu_s = _cpu_s(process)
            yield _Process(process, _title(process), worker, number == pid, cpu_s, runs_users_code)


def _title(process: psutil.Process) -> str:
    """The name that it has given itself, or the module that it runs."""
    command = process.cmdline()
    modules = [word for word in command if word.startswith("megarl.")]
    if modules:
        return modules[-1].rpartition(".")[2]
    return Path(command[0].split()[0]).name if command and command[0].split() else process.name()


def _title_by_stacks(title: str, threads: Sequence[ThreadStack]) -> str:
    """That of a fork, which has the command of the process that was forked."""
    files = {frame.file for thread in threads for frame in thread.frames}
    return SCHEDULER if any(file.endswith(_SCHEDULER_FILE) for file in files) else title


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _evidence(
    looked_at: _Process, seconds: float, threads: Sequence[ThreadStack], problem: str
) -> ProcessEvidence:
    state = "X"
    cpu_share = 0.0
    with suppress(psutil.Error, OSError):
        stat = Path(f"/proc/{looked_at.process.pid}/stat").read_text(errors="replace")
        state = stat.rpartition(")")[2].split()[0]
        cpu_share = (_cpu_s(looked_at.process) - looked_at.cpu_s) / seconds
    return ProcessEvidence(
        pid=looked_at.process.pid,
        title=_title_by_stacks(looked_at.title, threads),
        worker=looked_at.worker,
        is_own=looked_at.is_own,
        state=state,
        cpu_share=cpu_share,
        threads=threads,
        problem=problem,
    )


def stacks_of(pid: int) -> tuple[Sequence[ThreadStack], str]:
    """The stacks of a process's threads; or none, and why there are none."""
    problem = "py-spy is not installed: pip install py-spy (megarl's extra `hangs`)"
    spy = _spy()
    if spy:
        for _ in range(_TRIES):
            threads, problem = _spied(spy, pid)
            if threads:
                return threads, ""
    threads = _answered(pid)
    if threads:
        return threads, ""
    return (), problem


def _spy() -> str | None:
    """The program, of this environment or of the system."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _spied(spy: str, pid: int) -> tuple[Sequence[ThreadStack], str]:
    command = [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"py-spy has not read its stacks within {_SPY_S:g} s"
    except OSError as error:
        return (), f"py-spy cannot be started ({error})"
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if "ermission" in words:
            return (), f"the kernel does not let py-spy read it (ptrace): {words}"
        return (), f"py-spy cannot read it: {words}"
    threads = [
        ThreadStack(
            thread["thread_name"] or str(thread["os_thread_id"]),
            [
                Frame(frame["name"], short_file(frame["filename"]), frame["line"])
                for frame in thread["frames"][:_MOST_FRAMES]
            ],
        )
        for thread in json.loads(done.stdout)
    ]
    return threads[:_MOST_THREADS], "py-spy found no thread"


def short_file(path: str) -> str:
    """A file from its package on, or with its last folders."""
    for root in ("/site-packages/", "/dist-packages/"):
        if root in path:
            return path.rpartition(root)[2]
    if match := re.search(r"/lib/python3\.\d+/(.*)", path):
        return match.group(1)
    return "/".join(Path(path).parts[-3:])


def _answered(pid: int) -> Sequence[ThreadStack]:
    """The stacks that a process writes itself; [] where it does not."""
    memory = _memory_of(pid)
    if memory is None or not _catches(pid):
        return []
    with suppress(OSError), memory.open("rb") as file:
        before = file.seek(0, os.SEEK_END)
        os.kill(pid, _SIGNAL)
        size = before
        until_s = time.monotonic() + _WRITING_S
        while time.monotonic() < until_s:
            time.sleep(_POLL_S)
            now = os.fstat(file.fileno()).st_size
            if now == size > before:
                break
            size = now
        file.seek(before)
        return _written(file.read().decode(errors="replace"))
    return []


def _memory_of(pid: int) -> Path | None:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if f"memfd:{_FILE_NAME}" in os.readlink(descriptor):
                    return descriptor
    return None


def _catches(pid: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False


def _written(text: str) -> Sequence[ThreadStack]:
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append((f"thread {len(threads) + 1}", []))
        elif threads and (match := _FRAME.match(line)):
            file, number, function = match.groups()
            threads[-1][1].append(Frame(function, short_file(file), int(number)))
    return [ThreadStack(name, frames[:_MOST_FRAMES]) for name, frames in threads[:_MOST_THREADS]]
