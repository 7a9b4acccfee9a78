"""What went wrong in worker processes and in the services that they call, and perhaps cost samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServiceFaults:
    """What calls of a service have met in the worker processes of an engine, within some time.

    retries: tries that were made again. lost: calls without an answer. outages: how often it was found down, and
    recoveries: how often such an outage ended. down_s: seconds in which a process held calls back. reason: why the
    first outage began.
    """

    service: str
    retries: int = 0
    lost: int = 0
    outages: int = 0
    recoveries: int = 0
    down_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class WorkerFaults:
    """Faults of an engine's worker processes of one kind. ended: processes that were ended, and replaced."""

    ended: int = 0
    services: tuple[ServiceFaults, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ended or self.services)


def all_faults(faults: Sequence[WorkerFaults]) -> WorkerFaults:
    """The faults of several engines or functions together."""
    services = tuple(service for part in faults for service in part.services)
    return WorkerFaults(sum(part.ended for part in faults), services)
