"""What a timeline costs: the time of a span, of the check where nothing is recorded, of the write; shares of a step.

Given timelines of runs (`runs/NAME/timeline/step_N.json.gz`), it counts the spans that each process recorded in its
step, and tells which share of the step their recording takes in the busiest process: scripts/bench/timeline.py FILES
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.fleet.step_timeline import write
from megarl.timeline import recorder
from megarl.timeline.chrome_trace import CONTROLLER, ProcessTrace, trace
from megarl.timeline.clocks import SAME_CLOCK

_REPEATS = 5
_CALLS = 20_000
_WRITTEN = 200_000


def thread_span() -> None:
    with recorder.span("forward", tokens=4096):
        pass


def concurrent_span() -> None:
    with recorder.concurrent("groups", "prompt 7"):
        pass


def added_span() -> None:
    recorder.add("rewards", "score", 1.0, cause=3, sample=1)


def counter_level() -> None:
    recorder.level("requests", 7)


KINDS = (thread_span, concurrent_span, added_span, counter_level)


def seconds_of(function: Callable[[], None]) -> float:
    """Of one call: the quickest of some repetitions, because other processes can only slow it down."""
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for _ in range(_CALLS):
            function()
        best = min(best, (time.perf_counter() - began) / _CALLS)
    return best


def seconds_of_write(num_spans: int) -> tuple[float, int]:
    """(seconds, bytes) of the file of one process's spans, half of which have the others as causes."""
    recorder.begin(num_spans)
    for _ in range(num_spans // 2):
        with recorder.concurrent("groups", "prompt 7"):
            recorder.add("rewards", "score", time.monotonic(), cause=recorder.cause(), sample=1)
    recording = recorder.end()
    assert recording is not None
    process = ProcessTrace(CONTROLLER, recording, SAME_CLOCK)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step_1.json.gz"
        began = time.perf_counter()
        write(trace([process], {}), file)
        return time.perf_counter() - began, file.stat().st_size


def spans_in(file: Path) -> tuple[dict[str, int], float]:
    """(spans by process, seconds of the step). The halves of a request are no spans of their own."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    halves = ("to the first token", "further tokens")
    spans = [event for event in events if event["ph"] == "X" and event["name"] not in halves]
    # rewards and tools are recorded by the engine's own process
    counts = Counter(names[span["pid"]].partition(":")[0] for span in spans if _is_own(span, names))
    counts += Counter(names[span["pid"]] for span in spans if not _is_own(span, names))
    (step,) = [event for event in spans if event["name"].startswith("step ")]
    return dict(counts), step["dur"] / 1e6


def _is_own(span: dict[str, int], names: dict[int, str]) -> bool:
    """Whether a span was not recorded by a scheduler, a process of its own."""
    return ": scheduler" not in names[span["pid"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files
    dearest_s = 0.0
    print("| call | not recording, us | recording, us |\n|---|---|---|")
    for kind in KINDS:
        off_s = seconds_of(kind)
        recorder.begin()
        on_s = seconds_of(kind)
        recorder.end()
        dearest_s = max(dearest_s, on_s)
        print(f"| {kind.__name__} | {1e6 * off_s:.2f} | {1e6 * on_s:.2f} |")
    write_s, num_bytes = seconds_of_write(_WRITTEN)
    print(f"the write of {_WRITTEN} spans takes {write_s:.2f} s, {num_bytes / 1e6:.1f} MB")
    for file in files:
        counts, step_s = spans_in(file)
        name, most = max(counts.items(), key=lambda item: item[1])
        share = most * dearest_s / step_s
        print(
            f"{file}: {sum(counts.values())} spans in a step of {step_s:.2f} s, most of them ({most}) of {name}: "
            f"their recording takes {share:.3%} of the step"
        )


if __name__ == "__main__":
    main()
