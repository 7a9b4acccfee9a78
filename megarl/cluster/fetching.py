"""Fetching the results of calls that have ended, from nodes that may be cut off meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from megarl.cluster import ray_environment  # noqa: F401  # isort: skip  (before Ray)
import ray
import ray.exceptions

_LOOK_S = 1.0  # between two looks at the workers


def fetch(refs: Any, timeout_s: float, look: Callable[[], object]) -> Any:
    """`ray.get`; look: called every second while the results are not here, and what it raises ends the wait.

    A thread waits meanwhile: a fetch that is begun again every second would never end where it takes longer.
    """
    with suppress(ray.exceptions.GetTimeoutError):
        return ray.get(refs, timeout=_LOOK_S)
    fetched: Future[Any] = Future()
    threading.Thread(
        target=_fetch, args=(refs, timeout_s, fetched), name="fetch", daemon=True
    ).start()
    while not futures.wait([fetched], _LOOK_S).done:
        look()
    return fetched.result()


def is_of_lost_result(error: object) -> bool:
    """Whether an error, or the one that it comes from, is that of an argument or a result that is nowhere any more."""
    while error is not None:
        if isinstance(error, ray.exceptions.ObjectLostError):
            return True
        error = getattr(error, "cause", None)
    return False


def _fetch(refs: Any, timeout_s: float, fetched: Future[Any]) -> None:
    try:
        fetched.set_result(ray.get(refs, timeout=timeout_s))
    except BaseException as error:  # raised by whoever waits
        fetched.set_exception(error)
