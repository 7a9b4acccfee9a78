"""The file: lanes in which nothing overlaps, names, arrows, aligned times; read by Perfetto's own trace processor."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megarl.timeline.chrome_trace import CONTROLLER, ProcessTrace, shared_out, trace
from megarl.timeline.clocks import SAME_CLOCK, Alignment, Offset
from megarl.timeline.recorder import (
    FIRST_TOKENS,
    REQUESTS,
    REWARDS,
    TOOLS,
    Identity,
    Level,
    Recording,
    Span,
)
from tests.timeline.trace_processor import ARROWS, PROBLEMS, SPANS, ask, needs_trace_processor

HERE = Identity("node-a", 100, "clock a")
THERE = Identity("node-b", 200, "clock b")
# the clock of node b is 1 s ahead, to within 4 us
FROM_B = Alignment(Offset(0, -1_000_000_000, 4000), Offset(9, -1_000_000_000, 3000))


def concurrent(track: str, name: str, begin: int, end: int, number: int, cause: int = 0) -> Span:
    facts = {"request": name} if track == REQUESTS else {}
    return Span(name, track, begin, end, facts, True, number, cause)


def a_step() -> dict[str, Any]:
    """A controller, and an engine on another node with requests, rewards, tools and a scheduler; microseconds."""
    us = 1000
    second = 1_000_000_000
    own = Recording(
        HERE,
        [
            Span("rollout", "main", 10 * us, 500 * us, {}),
            Span("step 3", "main", 0, 900 * us, {"step": 3}),
            Span("train", "main", 500 * us, 900 * us, {}),
        ],
        [],
    )
    scheduler = Recording(
        THERE,
        [
            Span("extend", "main", second + 70 * us, second + 90 * us, {"requests": 2}),
            Span("r1", FIRST_TOKENS, second + 90 * us, second + 90 * us, {}, True),
            Span("unknown", FIRST_TOKENS, second + 90 * us, second + 90 * us, {}, True),
        ],
        [],
    )
    spans = [
        concurrent("groups", "prompt 7", second + 20 * us, second + 400 * us, 1),
        concurrent(REQUESTS, "r1", second + 30 * us, second + 200 * us, 2, cause=1),
        concurrent(REQUESTS, "r2", second + 30 * us, second + 250 * us, 3, cause=1),
        concurrent(REWARDS, "score", second + 260 * us, second + 300 * us, 4, cause=1),
        concurrent(REWARDS, "score", second + 260 * us, second + 260 * us, 5, cause=1),
        concurrent(TOOLS, "search", second + 210 * us, second + 240 * us, 6, cause=99),
    ]
    levels = [Level("requests", second + 30 * us, 2), Level("requests", second + 250 * us, 0)]
    engine = Recording(THERE, spans, levels, 0, {"scheduler 0": scheduler})
    processes = [
        ProcessTrace(CONTROLLER, own, SAME_CLOCK),
        ProcessTrace("engine 0", engine, FROM_B),
    ]
    return json.loads("".join(trace(processes, {"step": 3, "missing": []})))


def write(content: dict[str, Any], folder: Path) -> Path:
    file = folder / "step_3.json.gz"
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    return file


def test_the_error_of_the_clocks_stands_in_the_file() -> None:
    content = a_step()
    facts = content["otherData"]
    assert (facts["step"], facts["missing"]) == (3, [])
    assert facts["clock_error_us"]["controller"] == 0
    assert facts["clock_error_us"]["engine 0"] == 4.0, "the worse of the two measurements"
    names = [
        event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"
    ]
    assert names == [
        "controller",
        "engine 0 (node-b, clock +-4 us)",
        "engine 0: reward workers (node-b, clock +-4 us)",
        "engine 0: environments (node-b, clock +-4 us)",
        "engine 0: scheduler 0 (node-b, clock +-4 us)",
    ]


@pytest.mark.slow
@needs_trace_processor
def test_perfetto_reads_every_span_where_and_when_it_was(tmp_path: Path) -> None:
    queries = [SPANS, ARROWS, PROBLEMS, "select ts, value from counter order by ts"]
    spans, arrows, problems, levels = ask(write(a_step(), tmp_path), queries)
    assert problems == []
    found = {
        (span["process"].partition(" (")[0], span["name"]): (span["ts"], span["dur"], span["depth"])
        for span in spans
        if span["dur"]
    }
    assert found == {
        ("controller", "step 3"): (0, 900_000, 0),
        ("controller", "rollout"): (10_000, 490_000, 1),
        ("controller", "train"): (500_000, 400_000, 1),
        ("engine 0", "prompt 7"): (20_000, 380_000, 0),
        ("engine 0", "r1"): (30_000, 170_000, 0),
        ("engine 0", "to the first token"): (30_000, 60_000, 1),
        ("engine 0", "further tokens"): (90_000, 110_000, 1),
        ("engine 0", "r2"): (30_000, 220_000, 0),
        ("engine 0: reward workers", "score"): (260_000, 40_000, 0),
        ("engine 0: environments", "search"): (210_000, 30_000, 0),
        ("engine 0: scheduler 0", "extend"): (70_000, 20_000, 0),
    }
    pairs = sorted((arrow["first"], arrow["second"]) for arrow in arrows)
    of_requests = ("r2", "score", "score", "to the first token")
    assert pairs == [("prompt 7", name) for name in of_requests], "to the innermost span"
    assert [(level["ts"], level["value"]) for level in levels] == [(30_000, 2), (250_000, 0)]


def test_lanes_are_as_few_as_there_are_spans_at_the_same_time() -> None:
    chosen = random.Random(3)
    begins = sorted(chosen.randrange(1000) for _ in range(300))
    spans = [
        concurrent("groups", f"{number}", begin, begin + chosen.randrange(60), number)
        for number, begin in enumerate(begins, start=1)
    ]
    lanes = shared_out(spans)
    assert sorted(span.number for lane in lanes for span in lane) == list(range(1, 301))
    for lane in lanes:
        for before, after in zip(lane, lane[1:], strict=False):
            assert before.end_ns <= after.begin_ns
    most = max(
        sum(span.begin_ns <= moment < max(span.end_ns, span.begin_ns + 1) for span in spans)
        for moment in begins
    )
    assert len(lanes) <= most


@pytest.mark.slow
@needs_trace_processor
def test_nothing_is_lost_of_many_spans_of_threads_and_coroutines(tmp_path: Path) -> None:
    """Random ones, of threads nested to some depth, all to the nanosecond."""
    chosen = random.Random(5)
    spans: list[Span] = []

    def nest(track: str, begin: int, end: int, depth: int) -> None:
        spans.append(Span(f"{track} {begin} {end}", track, begin, end, {}))
        at = begin
        while depth and at < end:
            first = chosen.randint(at, end)
            last = chosen.randint(first, end)
            if last > first and (first, last) != (begin, end):
                nest(track, first, last, depth - 1)
            at = last + chosen.randint(1, (end - begin) // 2 + 1)

    for track in ("a", "b"):
        for part in range(20):
            nest(track, part * 10_007, (part + 1) * 10_007 - 3, 3)
    for number in range(1, 200):
        begin = chosen.randrange(200_000)
        end = begin + chosen.randrange(1, 20_000)
        spans.append(concurrent("groups", f"groups {begin} {end}", begin, end, number))
    chosen.shuffle(spans)
    processes = [ProcessTrace(CONTROLLER, Recording(HERE, spans, []), SAME_CLOCK)]
    content = json.loads("".join(trace(processes, {})))
    found, problems = ask(write(content, tmp_path), [SPANS, PROBLEMS])
    assert problems == []
    read = [(f"{span['name']}", span["ts"], span["dur"]) for span in found]
    origin = min(span.begin_ns for span in spans)
    assert sorted(read) == sorted(
        (span.name, span.begin_ns - origin, span.end_ns - span.begin_ns) for span in spans
    )
    ends = {span["id"]: span["ts"] + span["dur"] for span in found}
    depths: defaultdict[int, int] = defaultdict(int)
    for span in found:
        depths[span["depth"]] += 1
        if span["parent"] is not None:
            assert ends[span["id"]] <= ends[span["parent"]]
    assert len(depths) >= 3
