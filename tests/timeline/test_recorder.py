"""The recorder of a process: threads, coroutines, the flag, and the bound of its memory."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest

from megarl.isolation.loop_thread import LoopThread
from megarl.timeline import recorder
from megarl.timeline.recorder import Children, Recording, Span


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    recorder.end()


def recorded() -> Recording:
    recording = recorder.end()
    assert recording is not None
    return recording


def test_nothing_is_recorded_unless_it_was_begun() -> None:
    with recorder.span("a"), recorder.concurrent("requests", "b"):
        recorder.add("rewards", "c", time.monotonic())
        recorder.mark("first tokens", "d")
        recorder.level("running", 1)
    assert recorder.end() is None
    recorder.begin()
    recording = recorded()
    assert (recording.spans, recording.levels, recording.num_dropped) == ([], [], 0)


def test_a_span_that_was_open_at_the_end_belongs_to_no_recording() -> None:
    recorder.begin()
    with recorder.span("too long"):
        assert recorded().spans == []
        recorder.begin()
    assert recorded().spans == []


def test_blocks_of_a_thread_nest_and_have_their_facts() -> None:
    recorder.begin()
    with recorder.span("outer", tokens=3), recorder.span("inner"):
        time.sleep(0.001)
    with pytest.raises(KeyError), recorder.span("failed"):
        raise KeyError
    inner, outer, failed = recorded().spans
    assert (inner.name, outer.name, failed.name) == ("inner", "outer", "failed")
    assert outer.begin_ns <= inner.begin_ns < inner.end_ns <= outer.end_ns <= failed.begin_ns
    assert (outer.facts, inner.facts) == ({"tokens": 3}, {})
    assert inner.track == outer.track and not outer.is_concurrent


def test_threads_record_at_the_same_time_and_lose_nothing() -> None:
    recorder.begin()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(500):
            with recorder.span("work"):
                pass

    threads = [threading.Thread(target=work, name="same name") for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording = recorded()
    by_track: dict[str, list[Span]] = {}
    for span in recording.spans:
        by_track.setdefault(span.track, []).append(span)
    assert [len(spans) for spans in by_track.values()] == [500] * 4, "threads of one name are apart"
    assert recording.num_dropped == 0


@pytest.mark.parametrize(
    "record",
    [
        lambda: run_in(recorder.span("a")),
        lambda: run_in(recorder.concurrent("requests", "a")),
        lambda: recorder.add("rewards", "a", 1.0),
        lambda: recorder.mark("first tokens", "a"),
        lambda: recorder.level("running", 1),
    ],
)
def test_a_recording_may_end_at_any_line_of_another_thread(record: Callable[[], object]) -> None:
    """It is ended one line later in each call."""
    for num_lines in range(12):
        recorder.begin()
        trace_before = sys.gettrace()
        sys.settrace(ending_after(num_lines))
        try:
            record()
        finally:
            sys.settrace(trace_before)


def run_in(block: AbstractContextManager[None]) -> None:
    with block:
        pass


def ending_after(num_lines: int) -> Callable[..., Any]:
    """A trace function that ends the recording before a line of the recorder, the first ones left out."""
    left = iter([False] * num_lines + [True])

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_globals is not vars(recorder):
            return None
        if event == "line" and next(left, False):
            # from here on nothing is traced
            sys.settrace(None)
            recorder.end()
        return trace

    return trace


def test_coroutines_know_what_they_come_from_in_the_loop_of_another_thread_too() -> None:
    """As an engine's requests, in SGLang's thread, and its rewards, in the thread of their workers."""
    thread = LoopThread("scorers")

    async def reward(began_s: float) -> None:
        await asyncio.sleep(0.001)
        recorder.add("rewards", "score", began_s, cause=recorder.cause(), sample=1)

    async def group(name: str) -> None:
        with recorder.concurrent("groups", name):
            await asyncio.sleep(0.001)
            await thread.run(reward(time.monotonic()))

    async def groups() -> None:
        await asyncio.gather(group("a"), group("b"))

    recorder.begin()
    try:
        asyncio.run(groups())
    finally:
        thread.end(asyncio.sleep(0))
    spans = recorded().spans
    numbers = {span.name: span.number for span in spans if span.track == "groups"}
    assert numbers.keys() == {"a", "b"} and numbers["a"] != numbers["b"]
    rewards = [span for span in spans if span.track == "rewards"]
    assert sorted(span.cause for span in rewards) == sorted(numbers.values())
    assert all(span.begin_ns < span.end_ns and span.facts == {"sample": 1} for span in rewards)
    assert recorder.cause() == 0


def test_a_concurrent_call_is_a_span_also_where_it_fails() -> None:
    class Engine:
        @recorder.concurrent_call
        async def reshard(self, version: int) -> int:
            if version < 0:
                raise ValueError
            return version + 1

    recorder.begin()
    assert asyncio.run(Engine().reshard(1)) == 2
    with pytest.raises(ValueError):
        asyncio.run(Engine().reshard(-1))
    assert [(span.track, span.name) for span in recorded().spans] == [("calls", "reshard")] * 2


def test_of_too_many_spans_the_oldest_are_dropped_and_counted() -> None:
    recorder.begin(most_spans=10)
    for number in range(25):
        with recorder.span(f"{number}"):
            pass
        recorder.level("running", number)
    recording = recorded()
    assert [span.name for span in recording.spans] == [f"{number}" for number in range(15, 25)]
    assert (len(recording.levels), recording.num_dropped) == (10, 15)


def test_child_processes_record_with_their_parent() -> None:
    told = []

    class Scheduler(Children):
        def begin(self) -> None:
            told.append("begin")

        def end(self) -> Mapping[str, Recording]:
            told.append("end")
            return {"scheduler 0": Recording(recorder.identity(), [], [])}

    children = Scheduler()
    recorder.attach(children)
    try:
        recorder.begin()
        assert (recorded().children or {}).keys() == {"scheduler 0"}
    finally:
        recorder.detach(children)
    recorder.begin()
    assert recorded().children == {}
    recorder.detach(children)
    assert told == ["begin", "end"]


def test_a_recording_comes_through_json_as_it_was() -> None:
    recorder.begin()
    with recorder.span("decode", requests=3):
        recorder.mark("first tokens", "request 1")
        recorder.level("requests", 2)
    recording = recorded()

    read = recorder.from_json(json.loads(json.dumps(recorder.as_json(recording))))
    assert read.spans == recording.spans and read.levels == recording.levels
    assert read.identity == recorder.identity() == recording.identity
