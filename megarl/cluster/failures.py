"""What has become of a worker's call that failed: the exception that reports it, and which of several is the cause."""

from __future__ import annotations

from typing import Protocol

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
import ray.exceptions

from megarl.cluster.fetching import is_of_lost_result
from megarl.types import ProcessLost, Silence, SilentFault, UserError
from megarl.types.memory_use import MemoryUse, OutOfMemory

OTHER = 3  # the severity of an error that tells least


class WorkerFailed(Exception):
    """A worker died or raised; the message names the worker and the cause, `evidence` is its traceback.

    worker: its name; "" where no single worker has failed. memory: what it held, where it ran out of memory. silence:
    by which it was given up, where it was alive.
    """

    def __init__(
        self,
        message: str,
        evidence: str,
        worker: str = "",
        memory: MemoryUse | None = None,
        silence: Silence | None = None,
    ) -> None:
        super().__init__(message, evidence, worker)
        self.memory = memory
        self.silence = silence
        self.message = message
        self.evidence = evidence
        self.worker = worker

    def __str__(self) -> str:
        return self.message


class WorkerSilence(Silence, ProcessLost):
    """A worker is alive, and does not answer or stands still."""


class BeforeHang(Protocol):
    """Writes the page of a hang that ends the run. is_certain: `problem` names what is to blame."""

    def __call__(self, problem: str, *, is_certain: bool) -> None: ...


class ResultsLost(WorkerFailed):
    """A worker needs what another has made, which was on a node that has died; no call brings it back."""


def severity(failed: tuple[str, Exception]) -> int:
    """A sort key, the most telling failure first: a UserError, a dead process, a hanging process, any other error."""
    _, error = failed
    if isinstance(getattr(error, "cause", None), Silence):
        return 2
    if isinstance(error, UserError):
        return 0
    if isinstance(error, ray.exceptions.RayActorError):
        return 1
    return OTHER


def reported(name: str, cause: Exception) -> Exception:
    """The exception that reports a worker's failure."""
    if isinstance(cause, UserError | SilentFault):
        return cause
    if isinstance(cause, ray.exceptions.RayActorError):
        return WorkerFailed(f"{name}: its process died", str(cause), name)
    if is_of_lost_result(cause):
        problem = f"{name}: what another process had made for it is lost with its node"
        return ResultsLost(problem, str(cause), name)
    raised = getattr(cause, "cause", cause)
    if isinstance(raised, OutOfMemory):
        return WorkerFailed(f"{name}: {raised}", str(cause), name, raised.use)
    last_line = str(raised).strip().splitlines()[-1:] or [""]
    return WorkerFailed(
        f"{name}: {type(raised).__name__}: {last_line[0]}",
        str(cause),
        name,
        silence=raised if isinstance(raised, Silence) else None,
    )


def hang_of(worker: str, problem: str, evidence: str = "") -> WorkerFailed:
    """The failure of a worker that does not answer or stands still. evidence: what its peers have raised."""
    return WorkerFailed(problem, evidence or problem, worker, silence=WorkerSilence(problem))


def is_hang(error: BaseException | None) -> bool:
    """Whether a process that is alive, or a disk, was given up because it makes no progress."""
    return isinstance(error, Silence) or (
        isinstance(error, WorkerFailed) and error.silence is not None
    )


def is_of_disk(error: BaseException | None) -> bool:
    """Whether a disk was given up, as this process or a worker has seen it: it answers for itself."""
    silence = error.silence if isinstance(error, WorkerFailed) else error
    return isinstance(silence, Silence) and not isinstance(silence, ProcessLost)
