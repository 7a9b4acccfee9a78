"""A copy of weights between processes with a GPU each: the target and two sources, one of which dies.

Unverified on a GPU.

resharding/peer_copy.py CopyMember: NCCL between schedulers of several engines, straight out of and into parameters, in
a group that is made and closed for each copy. To check first: fp8 parameters as bytes; whether an abort of the group
leaves NCCL's other communicators of a source alone; the memory of the group while an engine's KV cache is full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from megarl.device import DEVICE, address_of, host_store
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding.peer_copy import PeerCopy, abandon
from tests.gpu.child import Child, Failed
from tests.gpu.conftest import Record
from tests.gpu.peers import TIMEOUT_S

ON_GPU = DEVICE == "cuda"
ENGINES = 3
ROWS = 1 << (16 if ON_GPU else 8)
pytestmark = pytest.mark.skipif(
    ON_GPU and torch.cuda.device_count() < ENGINES, reason=f"needs {ENGINES} GPUs"
)


class Peers:
    """The target, which has nothing, and its sources, which have the weights of seed 7."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children
        self.store = host_store(TIMEOUT_S)
        self.copy = PeerCopy(
            meet=address_of(self.store), run_id="peers", attempt=0, version=7, target=0, sources=(1, 2),
            layout=EngineLayout(1, 1, 1), verify="checksum", round_bytes=64 << 20 if ON_GPU else 64 << 10,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        for child in children[1:]:
            child.ask("fill", seed=7)

    def begin(self, **changes: Any) -> None:
        self.copy = replace(self.copy, attempt=self.copy.attempt + 1, **changes)
        for engine in self.copy.engines:
            self.children[engine].request("copy", content=asdict(self.copy), version=7)


@pytest.fixture(scope="function" if ON_GPU else "module")
def peers() -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(
            [
                stack.enter_context(Child("tests.gpu.peers:Peer", engine=engine, rows=ROWS))
                for engine in range(ENGINES)
            ]
        )


def test_weights_arrive_from_two_sources(peers: Peers, record: Record) -> None:
    for name in ("first copy", "second copy"):
        peers.children[0].ask("fill", seed=3)
        peers.begin()
        seconds = [child.reply() for child in peers.children]
        assert peers.children[0].ask("wrong", seed=7) == []
        record(name, 4 * ROWS * 4096 / max(seconds) / 1e9, "GB/s")
    peers.begin(verify="full")
    for child in peers.children:
        child.reply()


def test_a_source_that_is_killed_is_told_of_and_the_other_one_does(peers: Peers) -> None:
    """NCCL does not notice a death; the engine's host does, and abandons the copy."""
    peers.children[1].ask("rest_in_round", number=2, seconds=10 * TIMEOUT_S)
    peers.begin()
    while not peers.store.check([f"copy/peers/{peers.copy.attempt}/0/ready/outcome"]):
        time.sleep(0.01)
    peers.children[1].kill()
    abandon(peers.copy, 1, "its scheduler was killed")
    for child in (peers.children[0], peers.children[2]):
        with pytest.raises(Failed):
            child.reply(TIMEOUT_S / 2)
    peers.begin(sources=(2,))
    for engine in peers.copy.engines:
        peers.children[engine].reply()
    assert peers.children[0].ask("wrong", seed=7) == []
    assert peers.children[2].ask("wrong", seed=7) == []
