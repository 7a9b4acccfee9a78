"""The reshard's messages on a device: coalesced self-sends over NCCL, two members in one process over gloo.

Unverified on a GPU.

resharding/transport.py batch, wait, settle: sends and receives inside one coalescing block; polling works and events.
To check first: the host's cost of about 100,000 operations an exchange for DeepSeek-V3 on 512 GPUs; `DIRECT_BYTES` of 4
MiB.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.device import DEVICE
from tests.gpu.child import Child
from tests.gpu.conftest import Record

ON_GPU = DEVICE == "cuda"


@pytest.fixture(scope="function" if ON_GPU else "module")
def exchange() -> Iterator[Child]:
    with Child("tests.gpu.exchange:Exchange") as child:
        yield child


def check_exchange(exchange: Child) -> None:
    assert exchange.ask("send", messages=3, message_bytes=1024)["right"]


def test_a_round_without_messages(exchange: Child) -> None:
    assert exchange.ask("empty") == 0
    check_exchange(exchange)
    assert exchange.ask("empty") == 0
    check_exchange(exchange)


def test_an_exception_inside_a_round(exchange: Child) -> None:
    """The group stays as it was: what is posted later arrives."""
    assert exchange.ask("fail_inside", with_send=True) == "ZeroDivisionError"
    check_exchange(exchange)


def test_an_exception_behind_half_a_message(exchange: Child, record: Record) -> None:
    """NCCL may refuse the receive that has no send. Whatever it does, another group works."""
    raised = exchange.ask("fail_inside", with_send=False)
    assert raised == "ZeroDivisionError" or ON_GPU, raised
    record("its own exception came out", raised == "ZeroDivisionError", "")
    exchange.ask("connect")
    check_exchange(exchange)


@pytest.mark.parametrize("messages", [28_000, 100_000] if ON_GPU else [300])
def test_many_messages_in_one_round(exchange: Child, record: Record, messages: int) -> None:
    check_exchange(exchange)  # what only the first one takes
    num_bytes = 64 << 10 if ON_GPU else 4096
    outcome = exchange.ask("send", messages=messages, message_bytes=num_bytes)
    assert outcome["right"]
    record("host time", outcome["posted_s"], "s")
    record("whole time", outcome["done_s"], "s")
    record("rate", messages * num_bytes / outcome["done_s"] / 1e9, "GB/s")


def test_abort_with_a_message_on_its_way_and_another_group(exchange: Child, record: Record) -> None:
    """Unverified on a GPU.

    resharding/transport.py make_group, close_group: `ProcessGroupNCCL` built on a store; `abort()` with operations
    in flight, and another group afterwards in the same process. To check first: one communicator member a GPU; the
    time-out option; whether NCCL's error handling ends the process first.
    """
    check_exchange(exchange)
    outcome = exchange.ask("abort", num_bytes=1 << (32 if ON_GPU else 20))
    assert outcome["was_in_flight"]
    record("abort", outcome["abort_s"], "s")
    record("the message was lost", outcome["ended"] == "failed", "")
    record("another group", exchange.ask("connect"), "s")
    check_exchange(exchange)


def test_a_plan_is_carried_out(exchange: Child, record: Record) -> None:
    """Straight from and into parameters, packed, and quantised while packing, in more rounds than there are buffers."""
    rows = 1 << (18 if ON_GPU else 8)
    outcome = exchange.ask("carry_out", rows=rows)
    assert outcome["wrong"] == []
    record("rate", rows * 8192 / outcome["seconds"] / 1e9, "GB/s")
    record("extra memory", outcome["extra_bytes"] / 2**20, "MiB")
    assert exchange.ask("carry_out", rows=rows)["wrong"] == []
