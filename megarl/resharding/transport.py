"""The process group of an exchange: creating it, waiting for messages with a timeout, and closing it (gloo or NCCL)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megarl.device import BACKEND, DEVICE, use_loopback

POLL_S = 0.001  # between two polls of the device
PEER_CHECK_S = 1.0  # between two queries of the store whether a peer has failed

PeerCheck = Callable[[], None]  # raises RuntimeError with the message of a peer that has failed
PostedWork = tuple[int, dist.Work]  # a message, and the member at its other end
_ALL_PEERS = -1


class PeerSilent(RuntimeError):
    """The connection to a peer is broken, or nothing comes; neither end knows which of them is at fault."""

    def __init__(self, error: str, peer: int) -> None:
        super().__init__(error, peer)
        self.error = error
        self.peer = peer

    def __str__(self) -> str:
        return self.error


@contextmanager
def batch(group: Any) -> Iterator[list[PostedWork]]:
    """Collect the works that are posted inside; NCCL starts them together at the end, so that none blocks another.

    An error inside also closes the NCCL group: an open group would swallow everything that is posted later.
    """
    works: list[PostedWork] = []
    if BACKEND != "nccl":
        yield works
        return
    group._start_coalescing()
    try:
        yield works
    finally:
        coalesced = group._end_coalescing()  # None where nothing was posted
        works[:] = [(_ALL_PEERS, coalesced)] if coalesced else []


def wait(works: Sequence[PostedWork], timeout_s: float, ask: PeerCheck) -> None:
    """Return when posted messages are done. Raises RuntimeError when a peer ends, or after timeout_s.

    Over gloo that is PeerSilent; NCCL has one work for all messages of a round, and does not notice that a peer has
    failed. `ask` is called about once a second. Over gloo a peer that fails closes its connections, which ends most
    waits; but gloo forgets a send that it was about to write when the connection broke (Pair::handleRemotePendingRecv).
    """
    bound = timedelta(seconds=timeout_s)
    if BACKEND == "nccl":
        for _, work in works:
            poll(work.is_completed, timeout_s, ask)
            work.wait(bound)  # raises the error, if any, and orders the device's streams
    elif works:
        bounded(lambda: [_await(peer, work, bound) for peer, work in works], math.inf, ask)


def _await(peer: int, work: dist.Work, bound: timedelta) -> None:
    """Raises PeerSilent."""
    try:
        work.wait(bound)
    except RuntimeError as error:
        raise PeerSilent(str(error), peer) from error


def poll(is_done: Callable[[], bool], timeout_s: float, ask: PeerCheck) -> None:
    """Return when is_done() is true. Raises RuntimeError after timeout_s, or what `ask` raises."""
    started = asked = time.monotonic()
    while not is_done():
        now = time.monotonic()
        if now - started > timeout_s:
            raise RuntimeError(f"the exchange did not end within {timeout_s} s")
        if now - asked > PEER_CHECK_S:
            ask()
            asked = now
        time.sleep(POLL_S)


def settle(timeout_s: float) -> None:
    """Return when the device has finished all queued work. Raises RuntimeError after timeout_s."""
    if DEVICE != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    poll(done.query, timeout_s, lambda: None)


def bounded(call: Callable[[], object], timeout_s: float, ask: PeerCheck) -> None:
    """Run a call that may block forever in a thread. Raises what it raises, or as `poll`, which abandons the thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()

    def is_done() -> bool:
        thread.join(min(PEER_CHECK_S, timeout_s))
        return not thread.is_alive()

    poll(is_done, timeout_s, ask)
    if errors:
        raise errors.pop()  # left in the list it would be in a cycle, and keep the process group


def make_group(
    store: Store, member: int, num_members: int, timeout_s: float, ask: PeerCheck = lambda: None
) -> Any:
    """A process group of the members; the default groups belong to Megatron and to SGLang.

    Every member must call this with a prefix store that no other group uses. Raises RuntimeError when the group does
    not connect within timeout_s, or what `ask` raises.
    """
    timeout = timedelta(seconds=timeout_s)
    # a connection of its own: one on which the group waits for a member answers nobody else, `ask` included
    store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    if BACKEND == "gloo":
        use_loopback()
        groups: list[Any] = []
        # gloo keeps its own limit, and does not see either that a member has failed on its way
        bounded(
            lambda: groups.append(dist.ProcessGroupGloo(store, member, num_members, timeout)),
            math.inf,
            ask,
        )
        return groups.pop()
    options = dist.ProcessGroupNCCL.Options()
    # of NCCL's watchdog, which ends the process: our own timeout comes first
    options._timeout = 2 * timeout
    group = dist.ProcessGroupNCCL(store, member, num_members, options)
    here = torch.device(DEVICE, torch.cuda.current_device())

    def connect() -> None:
        """Open the communicator now: at the first message, a member without one in that round would never join."""
        torch.cuda.set_device(here)  # of this thread
        group.eager_connect_single_device(here)

    bounded(connect, timeout_s, ask)
    return group


def close_group(group: Any) -> None:
    """End a group; the caller must keep no reference to it.

    NCCL aborts the waiting works of this process, and peers do not notice: see `wait`. Gloo ignores an abort, and
    closes its connections with the last reference, which fails the waiting works of peers.
    """
    group.abort()
