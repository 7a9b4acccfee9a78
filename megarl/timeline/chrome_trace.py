"""Recordings of several processes as one trace in the Trace Event Format, which Perfetto and Chrome open.

The format's complete events ("X") of one thread must nest. Spans of a thread do; concurrent ones are shared out among
lanes, each of which is a thread of the trace in which nothing overlaps. Arrows ("s", "f") lead from a concurrent span
to those that it has caused. Times in the file are microseconds after the first span, by the controller's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from megarl.timeline.clocks import Alignment
from megarl.timeline.recorder import FIRST_TOKENS, REQUESTS, REWARDS, TOOLS, Level, Recording, Span

Event = dict[str, Any]
CONTROLLER = "controller"
# tracks of a process whose work is done by children of it that do not record
_OF_WORKERS = {REWARDS: "reward workers", TOOLS: "environments"}
_TIDS = 100_000  # numbers of threads that a process of the trace may have


@dataclass(frozen=True)
class ProcessTrace:
    """A process of the run with what it recorded. alignment: from its clock to the controller's."""

    name: str
    recording: Recording
    alignment: Alignment


def trace(processes: Sequence[ProcessTrace], facts: Mapping[str, Any]) -> Iterator[str]:
    """The content of the file, JSON, in pieces: a step of many schedulers has millions of events.

    processes: in the order of their rows; facts: of the whole, for a reader of the file. Aligned spans, lanes and
    arrows are in memory for one process at a time.
    """
    begins = (begin_ns for process in processes for begin_ns in _aligned_begins(process))
    origin_ns = min(begins, default=0)
    yield '{"traceEvents": ['
    separator = ""
    errors: dict[str, float] = {}
    numbers = count(1)
    flows = count(1)
    for process in processes:
        for parts in _shown(process):
            numbered = [(next(numbers), part) for part in parts]
            errors |= {part.name: part.error_ns / 1000 for part in parts}
            for event in _events_of(numbered, origin_ns, flows):
                yield separator + json.dumps(event)
                separator = ",\n"
    rest = {"displayTimeUnit": "ms", "otherData": {**facts, "clock_error_us": errors}}
    yield "], " + json.dumps(rest).removeprefix("{")


@dataclass(frozen=True)
class _Lane:
    """A thread of the trace: spans that nest. place: in the process, from 0."""

    name: str
    place: int
    spans: Sequence[Span]


@dataclass(frozen=True)
class _ShownProcess:
    """A process of the trace. Times are aligned."""

    name: str
    lanes: Sequence[_Lane]
    levels: Sequence[Level]
    error_ns: int
    facts: Mapping[str, Any]


_Numbered = Sequence[tuple[int, _ShownProcess]]  # processes of the trace with their numbers, from 1


def _aligned_begins(process: ProcessTrace) -> Iterator[int]:
    """Of the spans of a process and of its child processes."""
    for span in process.recording.spans:
        if span.track != FIRST_TOKENS:
            yield process.alignment.aligned(span.begin_ns)
    for child in (process.recording.children or {}).values():
        yield from _aligned_begins(replace(process, recording=child))


def _shown(process: ProcessTrace) -> Iterator[list[_ShownProcess]]:
    """The process itself with its workers, then each of its child processes with theirs."""
    recording = process.recording
    spans = [
        _aligned(span, process.alignment)
        for span in with_first_tokens(recording)
        if span.track != FIRST_TOKENS
    ]
    levels = [
        level._replace(at_ns=process.alignment.aligned(level.at_ns)) for level in recording.levels
    ]
    of_workers = [span for span in spans if span.is_concurrent and span.track in _OF_WORKERS]
    own = [span for span in spans if not (span.is_concurrent and span.track in _OF_WORKERS)]
    facts = {
        "host": recording.identity.host,
        "pid": recording.identity.pid,
        "dropped_spans": recording.num_dropped,
        "problem": recording.problem,
    }
    of_process = _ShownProcess(
        name=process.name,
        lanes=_lanes(own),
        levels=levels,
        error_ns=process.alignment.error_ns,
        facts=facts,
    )
    shown = [of_process]
    for track, name in _OF_WORKERS.items():
        if of_track := [span for span in of_workers if span.track == track]:
            full_name = f"{process.name}: {name}"
            shown.append(replace(of_process, name=full_name, lanes=_lanes(of_track), levels=[]))
    yield shown
    for name, child in (recording.children or {}).items():
        full_name = f"{process.name}: {name}"
        yield from _shown(replace(process, name=full_name, recording=child))


def with_first_tokens(recording: Recording) -> list[Span]:
    """The spans of an engine's process, its requests with the times of their first tokens, which schedulers know."""
    times = {
        span.name: span.begin_ns
        for child in (recording.children or {}).values()
        for span in child.spans
        if span.track == FIRST_TOKENS
    }
    return [
        span._replace(first_token_ns=times.get(str(span.facts["request"]), 0))
        if span.track == REQUESTS
        else span
        for span in recording.spans
    ]


def _aligned(span: Span, alignment: Alignment) -> Span:
    begin_ns = alignment.aligned(span.begin_ns)
    return span._replace(
        begin_ns=begin_ns,
        end_ns=max(begin_ns, alignment.aligned(span.end_ns)),
        first_token_ns=alignment.aligned(span.first_token_ns) if span.first_token_ns else 0,
    )


def _lanes(spans: Sequence[Span]) -> list[_Lane]:
    """The threads in the order of their first spans, then the lanes of each concurrent track."""
    of_threads: dict[str, list[Span]] = {}
    of_tracks: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        by_name = of_tracks if span.is_concurrent else of_threads
        by_name.setdefault(span.track, []).append(span)
    named = list(of_threads.items())
    for track, of_track in sorted(of_tracks.items()):
        lanes = shared_out(of_track)
        named += [(f"{track} {number}", lane) for number, lane in enumerate(lanes, start=1)]
    return [_Lane(name, place, lane) for place, (name, lane) in enumerate(named)]


def shared_out(spans: Sequence[Span]) -> list[list[Span]]:
    """As few lanes as there are spans at the same time, in each of which no two overlap. spans: by their begins."""
    lanes: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # until when, and which lane
    for span in spans:
        while busy and busy[0][0] <= span.begin_ns:
            heappush(free, heappop(busy)[1])
        if not free:
            heappush(free, len(lanes))
            lanes.append([])
        lane = heappop(free)
        lanes[lane].append(span)
        heappush(busy, (span.end_ns, lane))
    return lanes


def _events_of(numbered: _Numbered, origin_ns: int, flows: Iterator[int]) -> Iterator[Event]:
    """Of the processes of the trace that one process has recorded. flows: numbers of arrows."""
    for number, part in numbered:
        yield from _events(part, number, origin_ns)
    yield from _arrows(numbered, origin_ns, flows)


def _events(part: _ShownProcess, number: int, origin_ns: int) -> Iterator[Event]:
    """The names of a process and its threads, then what they did. number: of the process, from 1."""
    name = part.name
    if part.error_ns:
        name = f"{name} ({part.facts['host']}, clock +-{part.error_ns / 1000:.0f} us)"
    yield _named("process_name", number, 0, {"name": name})
    yield _named("process_sort_index", number, 0, {"sort_index": number})
    yield _named("process_labels", number, 0, {"labels": ", ".join(_labels(part))})
    for lane in part.lanes:
        tid = _tid(number, lane)
        yield _named("thread_name", number, tid, {"name": lane.name})
        yield _named("thread_sort_index", number, tid, {"sort_index": lane.place})
        for span in lane.spans:
            for shown in (span, *_halves(span)):
                yield {
                    "ph": "X",
                    "name": shown.name,
                    "cat": shown.track,
                    "pid": number,
                    "tid": tid,
                    "ts": _us(shown.begin_ns - origin_ns),
                    "dur": _us(shown.end_ns - shown.begin_ns),
                    "args": dict(shown.facts),
                }
    for level in part.levels:
        yield {
            "ph": "C",
            "name": level.name,
            "pid": number,
            "ts": _us(max(0, level.at_ns - origin_ns)),
            "args": {"value": level.value},
        }


def _halves(span: Span) -> Iterator[Span]:
    """A request up to its first token, and from there on."""
    first_ns = span.first_token_ns
    if span.begin_ns < first_ns < span.end_ns:
        yield span._replace(name="to the first token", end_ns=first_ns, facts={})
        yield span._replace(name="further tokens", begin_ns=first_ns, facts={})


def _labels(part: _ShownProcess) -> Iterator[str]:
    for name, value in part.facts.items():
        if value:
            yield f"{name} {value}"


def _named(what: str, pid: int, tid: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _arrows(numbered: _Numbered, origin_ns: int, flows: Iterator[int]) -> Iterator[Event]:
    """From each cause that was recorded to what it has caused, of the same process."""
    places: dict[int, tuple[int, int, Span]] = {}
    for number, part in numbered:
        for lane in part.lanes:
            for span in lane.spans:
                if span.number:
                    places[span.number] = (number, _tid(number, lane), span)
    for number, tid, span in places.values():
        if (source := places.get(span.cause)) is None:
            continue
        from_number, from_tid, of_cause = source
        # an arrow belongs to the span around its time: that of the cause must not be over
        leaves_ns = max(of_cause.begin_ns, min(span.begin_ns, of_cause.end_ns - 1))
        flow = {"name": "causes", "cat": "cause", "id": next(flows)}
        leaves = {"ph": "s", "pid": from_number, "tid": from_tid, "ts": _us(leaves_ns - origin_ns)}
        arrives = {"ph": "f", "bp": "e", "pid": number, "tid": tid}
        yield flow | leaves
        yield flow | arrives | {"ts": _us(span.begin_ns - origin_ns)}


def _tid(number: int, lane: _Lane) -> int:
    """Of a thread in the whole trace: Perfetto takes equal ones of two processes for one thread."""
    return number * _TIDS + lane.place


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000
