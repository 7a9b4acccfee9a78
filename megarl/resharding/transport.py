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
from megarl.resharding.agreement import StageFailed

POLL_S = 0.001  # between two polls of the device
PEER_CHECK_S = 1.0  # between two queries of the store whether a peer has failed

PeerCheck = Callable[[], None]  # raises StageFailed with the message of a peer that has failed
PostedWork = tuple[int, dist.Work]  # a message, and the member at its other end


class PeersSilent(RuntimeError):
    """Nothing comes from one of these peers, or does not reach it; nobody knows which end is at fault."""

    def __init__(self, error: str, peers: Sequence[int]) -> None:
        super().__init__(error, peers)
        self.error = error
        self.peers = peers

    def __str__(self) -> str:
        return self.error


class ConnectionBroken(PeersSilent):
    """The connection to a peer is broken, perhaps because the peer has left the exchange."""


@contextmanager
def batch(group: Any) -> Iterator[list[PostedWork]]:
    """Collect the works that are posted inside; NCCL starts them together at the end, so that none blocks another.

    NCCL makes one work of them, which is collected once for each peer.
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
        peers = dict.fromkeys(peer for peer, _ in works)
        works[:] = [(peer, coalesced) for peer in peers] if coalesced else []


def wait(works: Sequence[PostedWork], timeout_s: float, ask: PeerCheck) -> None:
    """Return when posted messages are done. Raises PeersSilent when a peer ends, or after timeout_s.

    Over gloo it has one peer, and is ConnectionBroken before timeout_s. NCCL has one work for all messages of a round,
    of whose peers any may be silent, and does not notice that one has failed. Raises what `ask` raises, which is called
    about once a second. Over gloo a peer that fails closes its connections, which ends most waits; but gloo forgets a
    send that it was about to write when the connection broke (Pair::handleRemotePendingRecv).
    """
    bound = timedelta(seconds=timeout_s)
    if BACKEND == "nccl":
        with _silence_of([peer for peer, _ in works]):
            for work in dict.fromkeys(work for _, work in works):
                poll(work.is_completed, timeout_s, ask)
                work.wait(bound)  # raises the error, if any, and orders the device's streams
    elif works:
        bounded(lambda: [_await(peer, work, bound) for peer, work in works], math.inf, ask)


def _await(peer: int, work: dist.Work, bound: timedelta) -> None:
    """Raises PeersSilent after the bound, and ConnectionBroken before it."""
    began_s = time.monotonic()
    try:
        work.wait(bound)
    except RuntimeError as error:
        is_late = time.monotonic() - began_s >= bound.total_seconds()
        kind = PeersSilent if is_late else ConnectionBroken
        raise kind(str(error), [peer]) from error


@contextmanager
def _silence_of(peers: Sequence[int]) -> Iterator[None]:
    """Raise the errors of waits inside as PeersSilent, except the messages of peers that have failed."""
    try:
        yield
    except StageFailed:
        raise
    except RuntimeError as error:
        raise PeersSilent(str(error), peers) from error


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

    Every member must call this with a prefix store that no other group uses. Raises PeersSilent when the group does
    not connect within timeout_s, or what `ask` raises.
    """
    timeout = timedelta(seconds=timeout_s)
    # a connection of its own: one on which the group waits for a member answers nobody else, `ask` included
    own_store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    store.set(_came(member), "")
    try:
        if BACKEND == "gloo":
            return _gloo_group(own_store, member, num_members, timeout, ask)
        return _nccl_group(own_store, member, num_members, timeout, ask)
    except StageFailed:
        raise
    except RuntimeError as error:
        others = [peer for peer in range(num_members) if peer != member]
        absent = [peer for peer in others if not store.check([_came(peer)])]
        raise PeersSilent(f"no group of all members: {error}", absent or others) from error


def _came(member: int) -> str:
    """The key by which others know that a member has come to a group."""
    return f"came/{member}"


def _gloo_group(
    store: Store, member: int, num_members: int, timeout: timedelta, ask: PeerCheck
) -> Any:
    use_loopback()
    groups: list[Any] = []
    # gloo keeps its own limit, and does not see either that a member has failed on its way
    bounded(
        lambda: groups.append(dist.ProcessGroupGloo(store, member, num_members, timeout)),
        math.inf,
        ask,
    )
    return groups.pop()


def _nccl_group(
    store: Store, member: int, num_members: int, timeout: timedelta, ask: PeerCheck
) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # of NCCL's watchdog, which ends the process: our own timeout comes first
    options._timeout = 2 * timeout
    group = dist.ProcessGroupNCCL(store, member, num_members, options)
    here = torch.device(DEVICE, torch.cuda.current_device())

    def connect() -> None:
        """Open the communicator now: at the first message, a member without one in that round would never join."""
        torch.cuda.set_device(here)  # of this thread
        group.eager_connect_single_device(here)

    bounded(connect, timeout.total_seconds(), ask)
    return group


def close_group(group: Any) -> None:
    """End a group; the caller must keep no reference to it.

    NCCL aborts the waiting works of this process, and peers do not notice: see `wait`. Gloo ignores an abort, and
    closes its connections with the last reference, which fails the waiting works of peers.
    """
    group.abort()
