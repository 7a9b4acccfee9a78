"""What worker processes tell of calls, counted at chosen times."""

from __future__ import annotations

import pytest

from megarl.isolation.service_log import ServiceLog
from megarl.types.worker_faults import ServiceFaults


class Heard:
    """A log, its time and its lines."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.log = ServiceLog("reward.function", lambda: self.now, self.lines.append)

    def tell(self, process: object, event: str, words: str = "", name: str = "judge") -> None:
        assert self.log.take_in(process, ["service", name, event, words])


def test_an_outage_is_told_once_however_many_processes_find_it() -> None:
    heard = Heard()
    heard.tell(1, "down", "status 503")
    heard.now = 103.0
    heard.tell(2, "down", "ConnectError")
    heard.tell(1, "up")
    heard.now = 110.0
    heard.tell(2, "up")
    assert heard.lines == [
        "reward.function: judge does not answer (status 503); calls wait for it, and fail at once when it has been "
        "down for as long as a call may take",
        "reward.function: judge answers again, after 10 s",
    ]
    expected = ServiceFaults("judge", outages=1, recoveries=1, down_s=10.0, reason="status 503")
    assert heard.log.take() == (expected,)
    assert heard.log.take() == ()


def test_an_outage_that_lasts_counts_in_each_step() -> None:
    heard = Heard()
    heard.tell(1, "retry")
    heard.tell(1, "down", "status 503")
    heard.tell(1, "lost")
    heard.now = 104.0
    first = ServiceFaults("judge", retries=1, lost=1, outages=1, down_s=4.0, reason="status 503")
    assert heard.log.take() == (first,)
    heard.now = 109.0
    assert heard.log.take() == (ServiceFaults("judge", down_s=5.0, reason="status 503"),)
    heard.now = 110.0
    heard.tell(1, "up")
    last = ServiceFaults("judge", recoveries=1, down_s=1.0, reason="status 503")
    assert heard.log.take() == (last,)


def test_services_are_counted_apart() -> None:
    heard = Heard()
    heard.tell(1, "retry", name="a")
    heard.tell(1, "retry", name="b")
    heard.tell(2, "retry", name="a")
    assert heard.log.take() == (ServiceFaults("a", retries=2), ServiceFaults("b", retries=1))


def test_a_process_that_ends_holds_no_call_back() -> None:
    heard = Heard()
    heard.tell(1, "down", "status 503")
    heard.now = 102.0
    heard.log.forget(1)
    heard.log.forget(2)
    heard.now = 200.0
    (faults,) = heard.log.take()
    assert (faults.down_s, faults.recoveries) == (2.0, 1)
    assert len(heard.lines) == 1, "nobody knows whether it answers"


@pytest.mark.parametrize(
    "message",
    [
        ["service", "judge", "up"],
        ["service", "judge", "sideways", ""],
        ["service", 1, "up", ""],
        [1, "judge", "up", ""],
        ["ready"],
    ],
)
def test_other_messages_are_not_its_own(message: list[object]) -> None:
    assert not Heard().log.take_in(1, message)
