"""The process group of an exchange: made, waited for and ended, over gloo or NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megarl.device import BACKEND, DEVICE, use_loopback

POLL_S = 0.001  # between two looks at the device
ASK_S = 1.0  # between two questions to the store whether a peer has failed

Ask = Callable[[], None]  # raises RuntimeError with the words of a peer that has failed


@contextmanager
def batch(group: Any) -> Iterator[list[dist.Work]]:
    """Collects the works posted inside; NCCL starts them all together at the end, so that they cannot block another.

    An error inside ends the block too: an NCCL group that stays open would swallow everything that is posted later.
    """
    works: list[dist.Work] = []
    if BACKEND != "nccl":
        yield works
        return
    group._start_coalescing()
    try:
        yield works
    finally:
        together = group._end_coalescing()  # None where nothing was posted
        works[:] = [together] if together else []


def wait(works: Sequence[dist.Work], timeout_s: float, ask: Ask) -> None:
    """Return when posted messages are done. Raises RuntimeError when a peer ends, or after timeout_s.

    Over gloo a peer that gives up closes its connections, which ends the wait. Over NCCL nothing is heard of it: there
    the messages are polled, and `ask` is called about once a second.
    """
    for work in works:
        if BACKEND == "nccl":
            poll(work.is_completed, timeout_s, ask)
        work.wait(timedelta(seconds=timeout_s))  # raises what went wrong, and orders the device's streams


def poll(is_done: Callable[[], bool], timeout_s: float, ask: Ask) -> None:
    """Return when something is done. Raises RuntimeError after timeout_s, or what `ask` raises."""
    started = asked = time.monotonic()
    while not is_done():
        now = time.monotonic()
        if now - started > timeout_s:
            raise RuntimeError(f"the exchange did not end within {timeout_s} s")
        if now - asked > ASK_S:
            ask()
            asked = now
        time.sleep(POLL_S)


def settle(timeout_s: float) -> None:
    """Return when the device has done everything that was queued. Raises RuntimeError after timeout_s."""
    if DEVICE != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    poll(done.query, timeout_s, lambda: None)


def bounded(call: Callable[[], object], timeout_s: float, ask: Ask) -> None:
    """Run in a thread what may block for ever. Raises what it raises, or as `poll`: the thread is then left behind."""
    ended: Future[object] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    Thread(target=run, daemon=True).start()
    poll(ended.done, timeout_s, ask)
    ended.result()


def make_group(store: Store, member: int, num_members: int, timeout_s: float, ask: Ask = lambda: None) -> Any:
    """A process group of the members alone; the default group belongs to Megatron in one process, to SGLang in another.

    Every member must call this with a store (prefix) that no other group uses. Raises RuntimeError when it is not made
    within timeout_s, or what `ask` raises.
    """
    timeout = timedelta(seconds=timeout_s)
    if BACKEND == "gloo":
        use_loopback()
        return dist.ProcessGroupGloo(store, member, num_members, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # of NCCL's watchdog, which ends the process: a wait of ours gives up before
    group = dist.ProcessGroupNCCL(store, member, num_members, options)
    here = torch.device(DEVICE, torch.cuda.current_device())

    def connect() -> None:
        """Otherwise the first message makes the communicator, and a member that has none in that round never joins."""
        torch.cuda.set_device(here)  # of this thread
        group.eager_connect_single_device(here)

    bounded(connect, timeout_s, ask)
    return group


def close_group(group: Any) -> None:
    """End a group; whoever calls this keeps no reference to it.

    NCCL aborts what waits on it in this process, and a peer hears nothing of it: see `wait`. For gloo an abort means
    nothing: its connections are closed with the last reference, and what waits on them fails at the peers.
    """
    group.abort()
