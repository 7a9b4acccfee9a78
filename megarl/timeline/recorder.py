"""The spans of this process: recorded between `begin` and `end`, otherwise not at all.

A process has one recorder, which all of its threads fill. Outside of a recording `span` and the other functions check
one flag and do nothing else. Times are nanoseconds of the node's monotonic clock (CLOCK_MONOTONIC), which all processes
of a node share.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")
Fact = str | int | float | bool | None
# tracks of concurrent spans that the file shows in ways of their own, see `chrome_trace`
REWARDS = "rewards"
TOOLS = "tools"
REQUESTS = "requests"
FIRST_TOKENS = "first tokens"
MOST_SPANS = 200_000  # of a process: some 50 MB
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")
_NOTHING = nullcontext()
_NO_CAUSE = 0


class Span(NamedTuple):
    """What a process did from begin_ns to end_ns.

    track: the thread, or the name of what goes on at the same time (`concurrent`): requests, rewards. is_concurrent:
    which of the two. number: of this process, from 1. cause: the number of the concurrent span from which it came; 0:
    none.
    """

    name: str
    track: str
    begin_ns: int
    end_ns: int
    facts: Mapping[str, Fact]
    is_concurrent: bool = False
    number: int = _NO_CAUSE
    cause: int = _NO_CAUSE
    # of a request, when its first token was there; 0: unknown
    first_token_ns: int = 0


class Level(NamedTuple):
    """The value of a counter from at_ns on."""

    name: str
    at_ns: int
    value: float


@dataclass(frozen=True)
class Identity:
    """A process and its clock. clock: equal for processes that share one."""

    host: str
    pid: int
    clock: str


@dataclass(frozen=True)
class Recording:
    """What a process recorded. num_dropped: of the oldest spans, for which there was no room."""

    identity: Identity
    spans: Sequence[Span]
    levels: Sequence[Level]
    num_dropped: int = 0
    # of its child processes, by names
    children: Mapping[str, Recording] | None = None
    # why nothing was recorded
    problem: str = ""


class _Recorder:
    """The spans since `begin`; of too many the oldest are dropped."""

    def __init__(self, most_spans: int) -> None:
        self.spans: deque[Span] = deque(maxlen=most_spans)
        self.levels: deque[Level] = deque(maxlen=most_spans)
        self._num_added = count()

    def add(self, span: Span) -> None:
        next(self._num_added)
        self.spans.append(span)

    def recording(self, children: Mapping[str, Recording]) -> Recording:
        spans = list(self.spans)
        num_dropped = next(self._num_added) - len(spans)
        return Recording(identity(), spans, list(self.levels), num_dropped, children)


class Children:
    """Child processes that record too. `begin` and `end` are called with those of their parent."""

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> Mapping[str, Recording]:
        """The recordings, by the names of the processes; of a process without one, why."""
        raise NotImplementedError


# the flag: None while nothing is recorded
_recorder: _Recorder | None = None
_children: list[Children] = []
# of concurrent spans, over all recordings: code that outlives one still has its own as a cause
_numbers = count(1)
# the number of the concurrent span around the running code
_cause: ContextVar[int] = ContextVar("cause", default=_NO_CAUSE)


def begin(most_spans: int = MOST_SPANS) -> Identity:
    """Record from now on; what was recorded before is forgotten."""
    global _recorder
    _recorder = _Recorder(most_spans)
    for children in _children:
        children.begin()
    return identity()


def end() -> Recording | None:
    """Stop, and return what was recorded; None where nothing is recorded, as in a process that was started since."""
    global _recorder
    recorder = _recorder
    _recorder = None
    if recorder is None:
        return None
    of_children: dict[str, Recording] = {}
    for children in _children:
        of_children |= children.end()
    return recorder.recording(of_children)


def attach(children: Children) -> None:
    """Let child processes record whenever this one does, until `detach`."""
    _children.append(children)


def detach(children: Children) -> None:
    """The opposite of `attach`; may be called again."""
    if children in _children:
        _children.remove(children)


def is_recording() -> bool:
    return _recorder is not None


def span(name: str, **facts: Fact) -> AbstractContextManager[None]:
    """A span of the running thread while the block runs; blocks may contain others."""
    recorder = _recorder  # another thread may end the recording meanwhile
    if recorder is None:
        return _NOTHING
    return _ThreadSpan(recorder, name, facts)


def spanned(name: str) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Let each call of a function be a span of the running thread, as of `span`; of coroutines `concurrent_call`."""

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        @wraps(function)
        def run(*args: Params.args, **keywords: Params.kwargs) -> Result:
            with span(name):
                return function(*args, **keywords)

        return run

    return decorate


def concurrent(track: str, name: str, **facts: Fact) -> AbstractContextManager[None]:
    """A span of work beside which other work of the same track goes on, as of coroutines.

    It is the cause of the concurrent spans that begin inside the block, in other threads too where a loop runs them.
    """
    recorder = _recorder
    if recorder is None:
        return _NOTHING
    return _ConcurrentSpan(recorder, track, name, facts)


def concurrent_call(
    method: Callable[Params, Coroutine[Any, Any, Result]],
) -> Callable[Params, Coroutine[Any, Any, Result]]:
    """Let each call of a coroutine method be a concurrent span of the track `calls`, under the method's name."""

    @wraps(method)
    async def run(*args: Params.args, **keywords: Params.kwargs) -> Result:
        with concurrent("calls", method.__name__):
            return await method(*args, **keywords)

    return run


def add(
    track: str, name: str, begin_s: float, end_s: float | None = None, cause: int = 0, **facts: Fact
) -> None:
    """Add a concurrent span that is over. begin_s, end_s: of `time.monotonic`; end_s None: now."""
    recorder = _recorder
    if recorder is None:
        return
    end_ns = time.monotonic_ns() if end_s is None else round(end_s * 1e9)
    begin_ns = min(round(begin_s * 1e9), end_ns)
    recorder.add(Span(name, track, begin_ns, end_ns, facts, True, next(_numbers), cause))


def mark(track: str, name: str) -> None:
    """Add a moment of a track."""
    recorder = _recorder
    if recorder is not None:
        now_ns = time.monotonic_ns()
        recorder.add(Span(name, track, now_ns, now_ns, {}, is_concurrent=True))


def level(name: str, value: float) -> None:
    """Set a counter, as the number of running requests."""
    recorder = _recorder
    if recorder is not None:
        recorder.levels.append(Level(name, time.monotonic_ns(), value))


def cause() -> int:
    """The number of the concurrent span around the running code, for `add`; 0: none."""
    return _cause.get()


def identity() -> Identity:
    """This process and its clock."""
    return Identity(socket.gethostname(), os.getpid(), _clock())


def now_ns() -> int:
    return time.monotonic_ns()


def _clock() -> str:
    """The boot of the node and the time namespace of the process: where both are equal CLOCK_MONOTONIC is.

    Without them, as in some sandboxes, the host's name has to do.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {_TIME_NAMESPACE.readlink()}"
    except OSError:
        return socket.gethostname()


class _ThreadSpan:
    def __init__(self, recorder: _Recorder, name: str, facts: Mapping[str, Fact]) -> None:
        self._recorder = recorder
        self._name = name
        self._facts = facts

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        end_ns = time.monotonic_ns()
        thread = threading.current_thread()
        track = f"{thread.name} ({thread.native_id})"
        self._recorder.add(Span(self._name, track, self._begin_ns, end_ns, self._facts))


class _ConcurrentSpan:
    def __init__(
        self, recorder: _Recorder, track: str, name: str, facts: Mapping[str, Fact]
    ) -> None:
        self._recorder = recorder
        self._track = track
        self._name = name
        self._facts = facts
        self._number = next(_numbers)

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()
        self._outer: Token[int] = _cause.set(self._number)

    def __exit__(self, *_: object) -> None:
        _cause.reset(self._outer)
        self._recorder.add(
            Span(
                name=self._name,
                track=self._track,
                begin_ns=self._begin_ns,
                end_ns=time.monotonic_ns(),
                facts=self._facts,
                is_concurrent=True,
                number=self._number,
                cause=_cause.get(),
            )
        )


def as_json(recording: Recording) -> dict[str, Any]:
    """For a process that cannot send objects; without children."""
    return {
        "identity": vars(recording.identity),
        "spans": recording.spans,
        "levels": recording.levels,
        "num_dropped": recording.num_dropped,
    }


def from_json(content: Mapping[str, Any]) -> Recording:
    """The opposite of `as_json`."""
    return Recording(
        Identity(**content["identity"]),
        [Span(*values) for values in content["spans"]],
        [Level(*values) for values in content["levels"]],
        content["num_dropped"],
    )
