"""Calls of services: what they ask for is done at chosen times, which nobody waits for."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megarl.isolation import service as service_module
from megarl.isolation.child import SERVICE, tell_service_events_in_order
from megarl.isolation.service import (
    Clock,
    Service,
    ServiceError,
    TryAgain,
    Unavailable,
    limit_job,
    listen,
)


class Time:
    """Passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)
        await asyncio.sleep(0)

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep, self.sleep_async)


@pytest.fixture
def passing() -> Time:
    random.seed(7)
    return Time()


@pytest.fixture
def events() -> Iterator[list[tuple[str, str, str]]]:
    heard: list[tuple[str, str, str]] = []
    before = list(service_module._listeners)
    listen(lambda *event: heard.append(event))
    yield heard
    service_module._listeners[:] = before


class Scripted:
    """A service that does what a list says, and then its last word for ever. An exception is raised."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.asked = 0

    def answer(self) -> Any:
        self.asked += 1
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(said, BaseException):
            raise said
        return said

    async def answer_later(self) -> Any:
        return self.answer()


Ask = Callable[[Service, Scripted], Any]


def plainly(service: Service, scripted: Scripted) -> Any:
    return service.call_plain(lambda _: scripted.answer())


def in_loop(service: Service, scripted: Scripted) -> Any:
    async def send() -> Any:
        return scripted.answer()

    return asyncio.run(service.call(send))


both = pytest.mark.parametrize("ask", [plainly, in_loop])
DOWN = ConnectionRefusedError("secret")


@both
def test_an_answer_at_once_is_all_there_is(ask: Ask, passing: Time, events: list[Any]) -> None:
    assert ask(Service("a", clock=passing.clock()), Scripted("yes")) == "yes"
    assert (passing.waits, events) == ([], [])


@both
def test_tries_that_fail_are_repeated_after_longer_and_longer(
    ask: Ask, passing: Time, events: list[Any]
) -> None:
    for _ in range(200):  # the waits are random, and below these bounds
        scripted = Scripted(Unavailable("busy"), TryAgain("odd"), DOWN, "yes")
        passing.waits.clear()
        assert ask(Service("a", clock=passing.clock()), scripted) == "yes"
        assert scripted.asked == 4 and len(passing.waits) in (3, 4)
        assert passing.waits[0] <= 0.5 and passing.waits[1] <= 1.0
    assert {event for event in events if event[1] == "retry"} == {("a", "retry", "")}
    assert sum(event[1] == "retry" for event in events) == 600


@both
def test_all_tries_that_fail_are_no_answer(ask: Ask, passing: Time, events: list[Any]) -> None:
    """The words are the service's own; those of others' exceptions may have a secret."""
    scripted = Scripted(TryAgain("odd reply"), DOWN)
    with pytest.raises(ServiceError) as caught:
        ask(Service("a", tries=2, clock=passing.clock()), scripted)
    assert str(caught.value) == "a gave no usable answer in 2 tries: ConnectionRefusedError"
    assert caught.value.__suppress_context__
    assert [event for _, event, _ in events] == ["retry", "lost"]


@both
def test_what_else_goes_wrong_is_the_callers(ask: Ask, passing: Time, events: list[Any]) -> None:
    with pytest.raises(KeyError, match="mine"):
        ask(Service("a", clock=passing.clock()), Scripted(KeyError("mine")))
    assert (passing.waits, events) == ([], [])


@both
def test_a_wish_beyond_the_time_there_is_is_no_answer_at_once(ask: Ask, passing: Time) -> None:
    scripted = Scripted(Unavailable("status 429", after_s=3.0), Unavailable("status 429", 600.0))
    with pytest.raises(ServiceError, match="a gave no usable answer within 60 s: status 429"):
        ask(Service("a", clock=passing.clock()), scripted)
    assert passing.waits == [3.0]


@both
def test_an_outage_that_is_shorter_than_a_call_costs_none(
    ask: Ask, passing: Time, events: list[Any]
) -> None:
    """Probes are no tries: the call waits until there is an answer."""

    class Restarting(Scripted):
        def answer(self) -> Any:
            if passing.now < 45.0:
                self.asked += 1
                raise DOWN
            return "yes"

    restarting = Restarting(None)
    service = Service("a", clock=passing.clock())
    assert ask(service, restarting) == "yes"
    assert 45.0 <= passing.now < 60.0
    assert restarting.asked < 15
    told = [(event, words) for _, event, words in events if event in ("down", "up")]
    assert told == [("down", "ConnectionRefusedError"), ("up", "")]


@both
def test_a_thousand_calls_do_not_wait_for_a_thousand_timeouts(
    ask: Ask, passing: Time, events: list[Any]
) -> None:
    """One after the other, each of which would wait a minute."""

    class Silent(Scripted):
        def answer(self) -> Any:
            self.asked += 1
            passing.now += 60.0
            raise TimeoutError

    silent = Silent(None)
    service = Service("a", tries=1, clock=passing.clock())
    words = set()
    for _ in range(1000):
        with pytest.raises(ServiceError) as caught:
            ask(service, silent)
        words.add(str(caught.value))
    assert "a gave no usable answer in 1 try: TimeoutError" in words
    assert "a has not answered for 120 s (TimeoutError)" in words
    assert passing.now < 300.0 and silent.asked < 5
    assert sum(event == "lost" for _, event, _ in events) == 1000
    # it is back: the first call that is due is the probe
    passing.now += 31.0
    assert ask(service, Scripted("yes")) == "yes"
    assert events[-1] == ("a", "up", "")


def test_who_asks_together_waits_for_the_probe_of_one(passing: Time) -> None:
    """A service that was down and is back costs none of the calls that come at once."""
    service = Service("a", tries=1, clock=passing.clock())
    for _ in range(3):
        with pytest.raises(ServiceError):
            plainly(service, Scripted(DOWN))
        passing.now += 1.0
    with pytest.raises(ServiceError):
        plainly(service, Scripted(DOWN))
    passing.now += 1000.0
    held = asyncio.Event()
    in_flight = 0

    async def send() -> str:
        nonlocal in_flight
        in_flight += 1
        await held.wait()
        return "yes"

    async def together() -> list[str]:
        calls = [asyncio.ensure_future(service.call(send)) for _ in range(64)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert in_flight == 1
        held.set()
        return await asyncio.gather(*calls)

    assert asyncio.run(together()) == ["yes"] * 64
    assert in_flight == 64


def test_a_call_is_cut_at_its_time_and_counts_as_silence() -> None:
    """With the real clock: the server hangs."""
    service = Service("a", timeout_s=0.05)

    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ServiceError, match=r"a gave no usable answer within 0\.05 s$"):
        asyncio.run(service.call(hang))
    assert service._breaker.reason == "nothing within 0.05 s"


def test_a_call_that_its_caller_gives_up_says_nothing_of_the_service() -> None:
    service = Service("a")

    async def scenario() -> None:
        begun = asyncio.Event()

        async def hang() -> None:
            begun.set()
            await asyncio.Event().wait()

        call = asyncio.ensure_future(service.call(hang))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(scenario())
    assert service._breaker.reason == ""


def test_a_call_ends_before_its_job() -> None:
    """So that the job's process is not ended, and the breaker learns of the outage."""
    seen: list[float] = []

    def job() -> None:
        limit_job(10.0)
        with pytest.raises(ServiceError, match=r"within 9\.5 s: busy"):
            Service("a").call_plain(send)

    def send(left_s: float) -> None:
        seen.append(left_s)
        raise Unavailable("busy", after_s=9.6)

    thread = threading.Thread(target=job)  # the limit is that of one thread or task
    thread.start()
    thread.join()
    assert len(seen) == 1 and 9.0 < seen[0] <= 9.5

    began = time.monotonic()
    assert Service("a").call_plain(lambda left_s: left_s) == pytest.approx(60.0, abs=0.1)
    assert time.monotonic() - began < 60


def test_what_a_call_met_is_written_before_the_reply_that_it_is_a_part_of() -> None:
    """Else a group's counts would lack what its last calls met; from another thread it comes by the loop."""
    lines: list[Any] = []
    service = Service("a", tries=1)

    async def job() -> None:
        tell_service_events_in_order(lines.append)
        with pytest.raises(ServiceError):
            await service.call(Scripted(DOWN).answer_later)
        lines.append("reply")
        with pytest.raises(ServiceError):
            await asyncio.to_thread(plainly, service, Scripted(DOWN))
        await asyncio.sleep(0)

    before = list(service_module._listeners)
    asyncio.run(job())
    service_module._listeners[:] = before
    lost = [SERVICE, "a", "lost", ""]
    assert lines == [lost, "reply", lost]
