"""The calls to a run's workers: waiting for them, and what becomes of a wait when a worker dies or hangs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
import ray
import ray.exceptions

from megarl.cluster import processes
from megarl.cluster.actor import Background, Ref, Worker, answers, failure, is_loss
from megarl.cluster.failures import (
    OTHER,
    BeforeHang,
    WorkerFailed,
    hang_of,
    is_hang,
    is_of_disk,
    reported,
    severity,
)
from megarl.cluster.fetching import fetch
from megarl.cluster.pulses import Pulses
from megarl.cluster.stillness import GroupStillness
from megarl.device import LOOPBACK
from megarl.types import UserError

# a dead process first breaks its peers' collectives: wait this long for the cause to show
_GRACE_S = 3.0
_OWN_NODE_ENDS = "Owner's node has crashed"  # Ray's word to the processes that this one has started
_LOOK_S = 1.0  # between two checks of Ray's servers and of heartbeats
_QUICK_PERIOD_S = 1.0
_ENDING_S = 5.0  # for processes that Ray kills
_KILLING_S = 30.0  # for a process that kills another on its node

# What the owner of a replaceable worker is told when the worker is lost: the cause. It may raise, which ends the wait.
OnLoss = Callable[[Exception], None]


class Calls:
    """Waits for calls to workers.

    The calls of background work (`begin_background`) are attended to while any others are waited for. The death of a
    worker ends every wait with WorkerFailed, unless the worker is replaceable: then its owner is told, and calls to
    it that the background work has made count as ended.
    """

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long a worker may leave a heartbeat unanswered."""
        self._timeout_s = timeout_s
        self._pulses = Pulses(timeout_s)
        # of the workers that can be replaced, whose hanging costs less when it is noticed soon
        self._quick_pulses = Pulses(timeout_s, period_s=_QUICK_PERIOD_S)
        self._stillness = GroupStillness(timeout_s)  # of the workers that compute
        self._workers: list[Worker] = []
        self._fetch = partial(fetch, timeout_s=timeout_s, look=self._look)
        self._owners: dict[Worker, OnLoss] = {}  # of the workers whose loss does not end the run
        self._causes: dict[str, Exception] = {}  # why owners have ended workers, by their names
        self._servers: processes.RayServers | None = None
        self._background: Background | None = None
        # what is waited for now; another thread reads it
        self._awaited: Sequence[Mapping[Ref, str]] = ()
        # called before the run ends because a process of it hangs
        self._before_hang: BeforeHang = lambda problem, *, is_certain: None
        self.host = LOOPBACK

    def _is_here(self, worker: Worker) -> bool:
        """Whether a worker is on this node."""
        raise NotImplementedError

    def _is_out_of_reach(self, worker: Worker) -> bool:
        """Whether a worker's node has died, or another one has its slots."""
        raise NotImplementedError

    def _is_displaced(self, worker: Worker) -> bool:
        """Whether another node has the worker's slot."""
        raise NotImplementedError

    def _strategy(self, slot: int) -> object:
        """Where Ray starts the worker of a slot."""
        raise NotImplementedError

    def gather(self, labels: Mapping[Ref, str], among: Sequence[Worker] | None = None) -> list[Any]:
        """The results in order; raises WorkerFailed, or the worker's own UserError, as soon as any worker fails.

        among: the workers whose failures count; by default all.
        """
        self.await_all(labels, among)
        try:
            return self._fetch(list(labels))
        except ray.exceptions.RayError as error:  # a node has died, with results that it stored
            failures = self._failures(labels) or [("a worker's result", error)]
            raise reported(*min(failures, key=severity)) from None

    @staticmethod
    def _failures(labels: Mapping[Ref, str]) -> list[tuple[str, Exception]]:
        """(label, what it has raised) of the calls that have raised something."""
        causes = [(label, failure(ref)) for ref, label in labels.items()]
        return [(label, cause) for label, cause in causes if cause is not None]

    def await_all(self, labels: Mapping[Ref, str], among: Sequence[Worker] | None = None) -> None:
        """`gather` without fetching the results."""
        pending = dict(labels)
        while pending:
            for ref in self.await_any(pending, among):
                del pending[ref]

    def await_any(
        self,
        labels: Mapping[Ref, str],
        among: Sequence[Worker] | None = None,
        *,
        may_lose: bool = False,
        patience_s: float = math.inf,
    ) -> list[Ref]:
        """Wait until one of the calls, or more, have ended; these, or [] after patience_s. Raises as `gather` does.

        may_lose: calls of workers that were lost meanwhile are among them, see `losses`.
        """
        began_s = time.monotonic()
        try:
            while True:
                asked = [ref for ref in self._attend(labels, among, may_lose) if ref in labels]
                if asked or time.monotonic() - began_s >= patience_s:
                    return asked
        finally:
            # what hangs from now on is the controller; results live no longer than their other references
            self._awaited = ()

    def _attend(
        self, labels: Mapping[Ref, str], among: Sequence[Worker] | None, may_lose: bool
    ) -> list[Ref]:
        """Wait a moment; what has ended, after the background work has taken its own of it."""
        watched = self._workers if among is None else among
        background = self._background if among is None else None
        of_background = background.labels() if background else {}
        self._awaited = (labels, of_background)
        watches = {ref: worker for worker in watched for ref in worker.watch_refs}
        names = {ref: worker.name for ref, worker in watches.items()}
        done = self._ended([*labels, *of_background, *watches], watched)
        # several of one worker, which end together
        lost = {ref: watches[ref] for ref in done if watches.get(ref) in self._owners}
        # whoever made these calls looks at their failures
        examined_later = {*lost, *of_background, *(labels if may_lose else ())}
        self._raise_failure(
            [ref for ref in done if ref not in examined_later],
            {**labels, **of_background, **names},
        )
        for ref, worker in lost.items():
            self._lose(worker, _watch_error(worker, ref))
        if len(done) < len(labels) + len(of_background):
            self._judge_silence(watched)
            self._judge_stillness(labels, watched)
        ended = [ref for ref in done if ref in of_background]
        if background and ended:
            # while it takes these, what it waits for itself hands it no further ones
            self._background = None
            background.take(ended)
            self._background = background
        return done

    def _lose(self, worker: Worker, cause: Exception) -> None:
        """Tell the owner of a replaceable worker that it is lost, unless the owner has ended it with another one."""
        on_loss = self._owners.get(worker)
        if on_loss is None:
            return
        self._refuse_own_end(cause)
        before = {worker.name for worker in self._workers}
        self._forget(worker)
        on_loss(cause)
        ended = before - {worker.name for worker in self._workers}
        self._causes |= dict.fromkeys(ended, cause)

    def _refuse_own_end(self, cause: Exception) -> None:
        """Raises WorkerFailed where a worker is lost because this node's raylet ends, as it does after its agents.

        That takes the raylet a moment, in which a call of Ray's would end this process.
        """
        evidence = getattr(cause, "evidence", "")
        if self._servers and _OWN_NODE_ENDS in evidence:
            problem = (
                self._servers.await_error(_GRACE_S)
                or "Ray takes this node for dead, its raylet lives"
            )
            raise WorkerFailed(problem, evidence)

    def _judge_silence(self, watched: Sequence[Worker]) -> None:
        """Give up the workers that have not answered for too long; raises WorkerFailed for one not replaceable."""
        for worker in list(watched):
            if worker in self._owners:
                is_overdue = self._quick_pulses.is_overdue(worker)
                # also while it starts, when it may be silent for longer
                if is_overdue or self._has_been_stopped(worker):
                    silence = self._silence_of(worker, self._quick_pulses)
                    self._lose(worker, hang_of(worker.name, silence))
                elif self._is_displaced(worker):
                    # its node seemed dead, or is at fault: what it shared memory with is elsewhere
                    problem = f"{self._described(worker)} is on a node that was replaced"
                    self._lose(worker, WorkerFailed(problem, problem, worker.name))
            elif worker in self._workers and self._pulses.silence_s(worker) >= self._timeout_s:
                hang = hang_of(worker.name, self._silence_of(worker, self._pulses))
                self.tell_hang(hang)
                raise hang

    def _judge_stillness(self, labels: Mapping[Ref, str], watched: Sequence[Worker]) -> None:
        """Give up one of the workers that compute where all that are waited for stand still: they would for ever.

        Raises as `_judge_silence`. Nothing is known of them while others are waited for, too.
        """
        names = {*labels.values()}
        alive = [worker for worker in watched if worker in self._workers]
        waited_for = [worker for worker in alive if worker.computes and worker.name in names]
        if len(waited_for) < len(names):
            return
        still_s = {worker: self._still_s(worker) for worker in waited_for}
        if not self._stillness.is_overdue(time.monotonic(), [*still_s.values()]):
            return
        worker = max(waited_for, key=still_s.__getitem__)
        others = f", as {len(waited_for) - 1} that compute with it do" if waited_for[1:] else ""
        problem = (
            f"{self._described(worker)} stands still: it has used no processor and moved no bytes for "
            f"{still_s[worker]:.0f} s{others}"
        )
        hang = hang_of(worker.name, problem)
        if worker not in self._owners:
            self.tell_hang(hang)
            raise hang
        self._lose(worker, hang)

    def _still_s(self, worker: Worker) -> float:
        """By its last answer, of the heartbeats that it is sent."""
        pulses = self._quick_pulses if worker in self._owners else self._pulses
        return pulses.still_s.get(worker, 0.0)

    def losses(self, ended: Mapping[Ref, str]) -> dict[Ref, Exception]:
        """Those of these calls that have failed because a replaceable worker is lost, with the causes.

        Raises as `gather` does for a call that has failed otherwise. ended: calls with their workers' names.
        """
        failures = {ref: failure(ref) for ref in ended}
        lost = {
            ref: reported(ended[ref], error)
            for ref, error in failures.items()
            if error and is_loss(error)
        }
        for cause in lost.values():
            self._refuse_own_end(cause)
        self._raise_failure([ref for ref in ended if ref not in lost], ended)
        return lost

    def outcomes(self, labels: Mapping[Ref, str]) -> list[Any]:
        """In order the result of each call, or the exception by which its replaceable worker or its result was lost.

        Raises as `gather` does for other failures.
        """
        pending = dict(labels)
        while pending:
            for ref in self.await_any(pending, may_lose=True):
                del pending[ref]
        lost = self.losses(labels)
        return [lost.get(ref) or self._fetched(ref, name) for ref, name in labels.items()]

    def _fetched(self, ref: Ref, name: str) -> Any:
        """The result of a worker's call, or the exception by which it was lost with its node."""
        try:
            return self._fetch(ref)
        except ray.exceptions.RayError as error:
            return reported(name, error)

    def begin_background(self, work: Background) -> None:
        """Let work go on from now on, whenever the controller waits for any call; one at a time."""
        assert self._background is None, "the work before it has not been ended"
        self._background = work

    def end_background(self, work: Background) -> None:
        """The opposite; work that has not begun is ended, too."""
        assert self._background in (work, None)
        self._background = None

    def _raise_failure(self, done: Sequence[Ref], labels: Mapping[Ref, str]) -> None:
        """Raise what the most telling of these calls has raised, if any has: a user's error, else the likeliest cause.

        labels: of all calls that are open.
        """
        failures = self._failures({ref: labels[ref] for ref in done})
        for _, cause in failures:
            if isinstance(cause, UserError):
                raise cause
        if failures:
            alive = {worker.name for worker in self._workers}
            if all(name not in alive and is_loss(error) for name, error in failures):
                # their owner has ended them, and was told why: nothing more is to show
                cause = self._causes.get(failures[0][0]) or reported(*failures[0])
            else:
                cause = self._cause(labels)
            self._refuse_own_end(cause)
            owned = {worker.name for worker in self._owners}
            if any(name not in owned for name, _ in failures):
                # owners tell it of their workers, where they do not start them anew
                self.tell_hang(cause)
            raise cause

    def tell_hang(self, cause: Exception) -> None:
        """Before a failure ends the run, or the processes that it is seen in: write the page, where it is a hang."""
        if is_hang(cause):
            self._before_hang(str(cause), is_certain=is_of_disk(cause))

    def settle(self, calls: Mapping[Ref, str]) -> bool:
        """Wait until every call has returned or raised; False as soon as a worker that is not replaceable is gone."""
        pending = set(calls)
        # until now they waited for what has failed
        self._stillness.forget(time.monotonic())
        while pending:
            watches = {ref: worker for worker in self._workers for ref in worker.watch_refs}
            done = {*self._ended([*pending, *watches], self._workers)}
            gone = {watches[ref]: ref for ref in done if ref in watches}
            if not gone.keys() <= self._owners.keys():
                return False
            for worker, ref in gone.items():
                self._lose(worker, _watch_error(worker, ref))
            pending -= done
            try:
                self._judge_silence(self._workers)
                if pending:
                    # of those that stood still together one was given up, and perhaps not the one that held them up
                    self._judge_stillness({ref: calls[ref] for ref in pending}, self._workers)
            except WorkerFailed:
                return False
        for ref, name in calls.items():
            error = failure(ref)
            if error and is_loss(error):
                self._lose_if_ended(name, reported(name, error))
        return True

    def _lose_if_ended(self, name: str, cause: Exception) -> None:
        """After a call has failed, which may end before the watch of its process does; another may have its place."""
        for worker in [worker for worker in self._owners if worker.name == name]:
            ended, _ = ray.wait(worker.watch_refs, timeout=_LOOK_S)
            if ended:
                self._lose(worker, cause)

    def call_all(self, workers: Sequence[Worker], method: str) -> list[Any]:
        """Call the same method of each worker; the results are in the workers' order. Raises as `gather` does."""
        return self.gather({worker.call(method): worker.name for worker in workers})

    def _cause(self, labels: Mapping[Ref, str]) -> Exception:
        """The failure to report, waiting a moment for a more telling one; see `severity`."""
        self._pulses.ask(self._workers)
        done, _ = ray.wait(list(labels), num_returns=len(labels), timeout=_GRACE_S)
        failures = self._failures({ref: labels[ref] for ref in done})
        name, cause = min(failures, key=severity)
        # A process that waited for a hanging one may time out before the hanging one has been silent for long enough.
        if severity((name, cause)) == OTHER and (silent := self._silent_now()):
            silence = self._silence_of(silent, self._pulses)
            return hang_of(silent.name, silence, str(cause))
        return reported(name, cause)

    def _ended(self, refs: list[Ref], watched: Sequence[Worker]) -> list[Ref]:
        """The calls that have ended, as soon as one has; [] after _LOOK_S. Also sends the heartbeats.

        Returns all ended calls at once: the cost of each `ray.wait` grows with the references. Results stay where they
        are. Raises WorkerFailed when a server of Ray has died.
        """
        self._send_heartbeats(watched)
        ray.wait(refs, num_returns=1, timeout=_LOOK_S, fetch_local=False)
        self._check_servers()
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return done

    def _send_heartbeats(self, workers: Sequence[Worker]) -> None:
        self._pulses.look(workers)
        self._quick_pulses.look([worker for worker in workers if worker in self._owners])

    def run_beside(self, work: Callable[[], None]) -> None:
        """Do work of this process in a thread, and send the heartbeats meanwhile. Raises what the work raises.

        The next wait for calls judges the workers.
        """
        with ThreadPoolExecutor(1, "work") as pool:
            done = pool.submit(work)
            while not futures.wait([done], _LOOK_S).done:
                self._send_heartbeats(self._workers)
        done.result()

    def _look(self) -> None:
        """Judge the workers while a result is fetched, as while calls are waited for."""
        self._send_heartbeats(self._workers)
        self._check_servers()
        self._judge_silence(self._workers)

    def _check_servers(self) -> None:
        """Raises WorkerFailed when a server of Ray has died: Ray itself would report it late, or end this process."""
        if self._servers and (error := self._servers.error()):
            raise WorkerFailed(error, error)

    def _silent_now(self) -> Worker | None:
        """A worker that has been silent for half as long, or that a signal has stopped."""
        for worker in self._pulses.unanswered():
            if self._pulses.silence_s(worker) >= self._timeout_s / 2 or self.is_stopped(worker):
                return worker
        return None

    def _silence_of(self, worker: Worker, pulses: Pulses) -> str:
        silence = f"{self._described(worker)} has not answered for {pulses.silence_s(worker):.0f} s"
        if self.is_stopped(worker):
            silence += ": a signal stopped it"
        return silence

    def _described(self, worker: Worker) -> str:
        if pid := self._pid_of(worker):
            return f"{worker.name} (pid {pid})"
        return worker.name

    def is_stopped(self, worker: Worker) -> bool:
        """Whether a signal has stopped the worker; False for workers of other nodes."""
        pid = self._pid_here(worker)
        return pid is not None and processes.is_stopped(pid)

    def _has_been_stopped(self, worker: Worker) -> bool:
        """Whether a signal has stopped a replaceable worker, and it has been silent since, for too long."""
        silence_s = self._quick_pulses.silence_s(worker)
        return silence_s >= processes.STOPPED_S and self.is_stopped(worker)

    def _pid_of(self, worker: Worker) -> int | None:
        """The worker's process id, if it has ever answered."""
        return self._quick_pulses.pids.get(worker) or self._pulses.pids.get(worker)

    def _pid_here(self, worker: Worker) -> int | None:
        """The worker's process id, if the worker is on this node and has ever answered."""
        if self._is_here(worker):
            return self._pid_of(worker)
        return None

    def _pids_here(self) -> set[int]:
        """The process ids of all workers that this node has ever had."""
        workers = self._quick_pulses.pids.keys() | self._pulses.pids.keys()
        pids = {self._pid_here(worker) for worker in workers}
        return {pid for pid in pids if pid is not None}

    def end(self, worker: Worker) -> None:
        """Kill a worker with its child processes, on whichever node it is, and watch it no longer."""
        self._forget(worker)
        pid = self._pid_of(worker)
        worker.kill()
        if pid is None:
            return
        if self._is_here(worker):
            processes.kill_tree(pid)
            return
        if self._is_out_of_reach(worker):
            return  # a process of that number on the other node is another one
        # a process that a signal has stopped does not answer Ray
        killer = Worker("killer", worker.slot, self.host, self._strategy(worker.slot), gpus=0)
        answers({killer.compute("megarl.cluster.processes:kill_tree", pid): "killer"}, _KILLING_S)
        killer.kill()

    def end_all(self, workers: Sequence[Worker]) -> None:
        """Kill workers that have no child processes, all at once; returns when they are gone."""
        watches = {worker.watch_refs[0]: worker for worker in workers}
        for worker in workers:
            self._forget(worker)
            worker.kill()
        for worker in workers:
            # what does not answer heartbeats does not do what Ray says either
            if self.is_stopped(worker) or self._quick_pulses.is_overdue(worker):
                self.end(worker)
        ended, _ = ray.wait([*watches], num_returns=len(watches), timeout=_ENDING_S)
        for ref in watches.keys() - {*ended}:
            self.end(watches[ref])

    def has_ended(self, worker: Worker) -> bool:
        """Whether the worker's process is gone, or goes at this moment."""
        return bool(self.ended([worker]))

    def ended(self, workers: Sequence[Worker]) -> list[Worker]:
        """The workers whose processes are gone, or go at this moment, for which it waits once for all."""
        watches = [worker.watch_refs[0] for worker in workers]
        ray.wait(watches, num_returns=len(watches), timeout=_LOOK_S)
        return [worker for worker in workers if failure(worker.watch_refs[0]) is not None]

    def _forget(self, worker: Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        self._owners.pop(worker, None)
        self._stillness.forget(time.monotonic())


def _watch_error(worker: Worker, ref: Ref) -> Exception:
    """By what a call that does not return has ended."""
    return reported(worker.name, failure(ref) or RuntimeError("the process has ended"))
