"""The schedulers' spans as an engine's process fetches them, and what is told of those that do not answer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.sglang import engine
from megarl.rollout.sglang.engine import Engine
from megarl.rollout.sglang.scheduler_spans import BEGIN, END, SchedulerSpans, write_spans
from megarl.timeline import recorder


def test_a_scheduler_without_spans_says_why(tmp_path: Path) -> None:
    file = tmp_path / "spans"
    problems: dict[str, str] = {}

    def call(method: str) -> str | None:
        if method in problems:
            return problems[method]
        if method == BEGIN:
            recorder.begin()
        else:
            write_spans(file)
        return None

    spans = SchedulerSpans(call, {"scheduler 0": file, "scheduler 1": tmp_path / "none"})
    spans.begin()
    ended = spans.end()
    assert ended["scheduler 0"].problem == ""
    assert ended["scheduler 1"].problem == "it wrote no spans"

    problems[BEGIN] = "no answer"
    spans.begin()
    assert spans.end()["scheduler 0"].problem == "no answer"
    del problems[BEGIN]

    problems[END] = "the disk is full"
    spans.begin()
    assert spans.end()["scheduler 0"].problem == "the disk is full"
    recorder.end()


def test_a_hanging_scheduler_keeps_the_caller_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question itself goes on, so that its late answer is not taken for that of the next one."""
    monkeypatch.setattr(engine, "_CALL_S", 0.2)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asked: list[asyncio.Task[Any]] = []

    async def hang(*_: Any) -> str | None:
        asked.append(asyncio.current_task())  # type: ignore[arg-type]
        await asyncio.Event().wait()

    async def run(work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    hanging: Any = Engine.__new__(Engine)
    hanging._host = SimpleNamespace(run=run)
    hanging._sglang_call = hang
    assert hanging._call_schedulers(END) == "no answer within 0.2 s"
    (question,) = asked
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result()
    assert not question.done()
    loop.call_soon_threadsafe(question.cancel)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
