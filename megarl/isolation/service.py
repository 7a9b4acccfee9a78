"""Calls of a service of others, such as a judge or a search engine: repeated, held back while it is down, and counted.

Users import `Service`, `Unavailable` and `TryAgain` from `megarl.environments` or `megarl.rollout.rewards`. What calls
meet is told to the listener of the process (`listen`): in a worker process to its host, which tells its parent.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception_type,
    wait_random_exponential,
)

from megarl.isolation.breaker import Admission, Breaker, BreakerOpen

# the most that a call waits before its second try; twice as much before each further one
_FIRST_WAIT_S = 0.5
_MOST_WAIT_S = 20.0
# of the time of the job that a call is a part of, and which would else end together with the call
_SPARE_S = 0.5
_SPARE_SHARE = 0.25
_back_off = wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_MOST_WAIT_S)

Result = TypeVar("Result")
# a try that is repeated; a call without an answer; the begin and the end of an outage
Event = Literal["retry", "lost", "down", "up"]
EVENTS = get_args(Event)
Listener = Callable[[str, Event, str], object]

_job_ends_at: ContextVar[float] = ContextVar("job_ends_at", default=math.inf)
_listeners: list[Listener] = []


class TryAgain(Exception):
    """The service has answered, and a further try may have a better answer. after_s: no sooner than then."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Unavailable(TryAgain):
    """The service has given no answer, or is too busy for one."""


class ServiceError(Exception):
    """A call has no answer. The text is a sentence that begins with the name of the service."""


@dataclass(frozen=True)
class Clock:
    """How a service reads the time, and waits."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass
class _ServiceCall:
    """The time that a call has, and when it is over; its tries without probes; about the last try, why it failed."""

    limit_s: float
    ends_at: float
    tries: int = 0
    was_probe: bool = False
    reason: str = ""


class _CallOverdue(Exception):
    """The time of a plain call is over while it waits for an outage to end."""


def listen(listener: Listener) -> None:
    """Have it called as listener(service, event, words), in any thread, in place of the one before."""
    _listeners[:] = [listener]


def limit_job(timeout_s: float) -> None:
    """Let the calls of the current task or thread end before its job has taken this long from now on."""
    _job_ends_at.set(time.monotonic() + timeout_s)


class Service:
    """A service that is asked by many calls of one process. Made once, and used in any thread and event loop.

    A call makes up to `tries` tries within timeout_s, with a random time between them that doubles. While no try has
    an answer the breaker holds calls back, but for a probe from time to time, which counts as no try; when the service
    has been down for timeout_s, calls end at once until a probe has an answer. In a worker process a call ends before
    the limit of its job.
    """

    def __init__(
        self,
        name: str,
        *,
        faults: tuple[type[Exception], ...] = (OSError,),
        tries: int = 5,
        timeout_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        """name: for messages and counts. faults: exceptions of a try without an answer, beside Unavailable."""
        self.name = name
        self._faults = (Unavailable, *faults)
        self._tries = tries
        self._timeout_s = timeout_s
        self._clock = clock or Clock()
        self._breaker = Breaker()
        self._lock = threading.Lock()

    async def call(
        self, send: Callable[[], Awaitable[Result]], *, timeout_s: float | None = None
    ) -> Result:
        """The answer. send: makes one try, and is cancelled when the time is over. timeout_s: in place of the usual.

        Raises ServiceError where there is no answer, and what `send` raises beside faults and TryAgain.
        """
        call = self._new_call(timeout_s)
        bound = asyncio.timeout(call.limit_s)
        retrying = AsyncRetrying(
            sleep=self._clock.sleep_async,
            stop=self._stops_at(call),
            wait=lambda state: _wait_s(state, call),
            retry=retry_if_exception_type((TryAgain, *self._faults)),
            before_sleep=self._tell_retry,
        )
        try:
            async with bound:
                return await retrying(self._try, send, call, bound)
        except (BreakerOpen, RetryError) as error:
            raise self._lost(error, call) from None
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise self._lost(error, call) from None

    def call_plain(
        self, send: Callable[[float], Result], *, timeout_s: float | None = None
    ) -> Result:
        """`call` of a plain function. send: gets the seconds that are left, and ends by itself before they are over."""
        call = self._new_call(timeout_s)
        retrying = Retrying(
            sleep=self._clock.sleep,
            stop=self._stops_at(call),
            wait=lambda state: _wait_s(state, call),
            retry=retry_if_exception_type((TryAgain, *self._faults)),
            before_sleep=self._tell_retry,
        )
        try:
            return retrying(self._try_plain, send, call)
        except (BreakerOpen, RetryError, _CallOverdue) as error:
            raise self._lost(error, call) from None

    async def _try(
        self, send: Callable[[], Awaitable[Result]], call: _ServiceCall, bound: asyncio.Timeout
    ) -> Result:
        while (admission := self._admission(call)).wait_s:
            await self._clock.sleep_async(admission.wait_s)
        with self._watched(admission, call, bound.expired):
            return await send()

    def _try_plain(self, send: Callable[[float], Result], call: _ServiceCall) -> Result:
        while (admission := self._admission(call)).wait_s:
            if self._left_s(call) <= admission.wait_s:
                raise _CallOverdue
            self._clock.sleep(admission.wait_s)
        with self._watched(admission, call, lambda: False):
            return send(self._left_s(call))

    def _new_call(self, timeout_s: float | None) -> _ServiceCall:
        job_s = max(0.0, _job_ends_at.get() - time.monotonic())
        spare_s = min(_SPARE_S, _SPARE_SHARE * job_s)
        limit_s = min(timeout_s or self._timeout_s, job_s - spare_s)
        return _ServiceCall(limit_s, self._clock.now() + limit_s)

    def _left_s(self, call: _ServiceCall) -> float:
        return call.ends_at - self._clock.now()

    def _stops_at(self, call: _ServiceCall) -> Callable[[RetryCallState], bool]:
        """Whether a call makes no further try: it has made them all, or the next would begin after its time."""

        def stops(state: RetryCallState) -> bool:
            return call.tries >= self._tries or state.upcoming_sleep >= self._left_s(call)

        return stops

    def _admission(self, call: _ServiceCall) -> Admission:
        with self._lock:
            return self._breaker.admit(self._clock.now(), call.limit_s)

    @contextmanager
    def _watched(
        self, admission: Admission, call: _ServiceCall, is_late: Callable[[], bool]
    ) -> Iterator[None]:
        """Tell the breaker how a try ends. is_late: whether it is cancelled because the call's time is over."""
        call.tries += not admission.is_probe
        call.was_probe = admission.is_probe
        try:
            yield
        except self._faults as error:
            call.reason = _reason(error)
            self._fail(admission, call.reason, getattr(error, "after_s", 0.0))
            raise
        except Exception as error:  # whatever it is about, the service has answered
            call.reason = _reason(error)
            self._answer()
            raise
        except BaseException:
            if is_late():
                self._fail(admission, f"nothing within {call.limit_s:.3g} s")
            else:
                self._drop(admission)
            raise
        self._answer()

    def _answer(self) -> None:
        with self._lock:
            was_open = self._breaker.is_open
            self._breaker.answered()
        if was_open:
            self._tell("up")

    def _fail(self, admission: Admission, reason: str, after_s: float = 0.0) -> None:
        with self._lock:
            was_open = self._breaker.is_open
            self._breaker.failed(admission, self._clock.now(), reason, after_s)
            is_open = self._breaker.is_open
        if is_open and not was_open:
            self._tell("down", reason)

    def _drop(self, admission: Admission) -> None:
        with self._lock:
            self._breaker.dropped(admission)

    def _lost(self, error: Exception, call: _ServiceCall) -> ServiceError:
        """The error of a call without an answer."""
        self._tell("lost")
        if isinstance(error, BreakerOpen):
            return ServiceError(f"{self.name} {error}")
        within = f"within {call.limit_s:.3g} s"
        if call.tries >= self._tries and isinstance(error, RetryError):
            within = f"in {self._tries} {'try' if self._tries == 1 else 'tries'}"
        because = f": {call.reason}" if call.reason else ""
        return ServiceError(f"{self.name} gave no usable answer {within}{because}")

    def _tell_retry(self, state: RetryCallState) -> None:
        self._tell("retry")

    def _tell(self, event: Event, words: str = "") -> None:
        for listener in _listeners:
            listener(self.name, event, words)


def _wait_s(state: RetryCallState, call: _ServiceCall) -> float:
    """The seconds before the next try: random ones, and no fewer than the service wishes.

    After a probe there are none of its own: the breaker holds the call back.
    """
    error = state.outcome.exception() if state.outcome else None
    back_off_s = 0.0 if call.was_probe else _back_off(state)
    return max(back_off_s, getattr(error, "after_s", 0.0))


def _reason(error: BaseException) -> str:
    """Why a try failed, in a few words: of others' exceptions the name alone, because their text may have secrets."""
    if isinstance(error, TryAgain):
        return str(error)
    return type(error).__name__
