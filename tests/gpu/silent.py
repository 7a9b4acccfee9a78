"""A member of an exchange of three, each in a process, and on a GPU, of its own; one of them may send nothing."""

from __future__ import annotations

import math
from typing import Any

import torch

from megarl.device import DEVICE, Address, join_store
from megarl.resharding import transport
from megarl.resharding.transport import PeerCheck, batch, poll, settle, wait
from tests.resharding.bare_members import BarePlan, bare_member

NUM_MEMBERS = 3
SILENCE_S = 5.0
TIMEOUT_S = 60.0


class Plan(BarePlan):
    """Each member sends its number to both others."""

    def __init__(self, number: int) -> None:
        super().__init__(number, NUM_MEMBERS)
        self._number = number
        self.is_silent = False
        self.received: dict[int, float] = {}

    def run(self, group: Any, timeout_s: float, ask: PeerCheck) -> int:
        if self.is_silent:
            transport.PEER_CHECK_S = 0.1
            poll(lambda: False, timeout_s, ask)
        own = torch.full((1,), float(self._number), device=DEVICE)
        peers = [peer for peer in range(NUM_MEMBERS) if peer != self._number]
        targets = {peer: torch.full((1,), math.nan, device=DEVICE) for peer in peers}
        with batch(group) as works:
            for peer, target in targets.items():
                works.append((peer, group.recv([target], peer, 0)))
                works.append((peer, group.send([own], peer, 0)))
        wait(works, SILENCE_S, ask)
        settle(SILENCE_S)
        self.received = {peer: target.item() for peer, target in targets.items()}
        return 0


class Exchanging:
    """number: of the member, and with GPUs of its own GPU."""

    def __init__(self, number: int, meet: Address) -> None:
        if DEVICE == "cuda":
            torch.cuda.set_device(number)
        # the others wait for themselves, and are not told by the first that has waited in vain
        transport.PEER_CHECK_S = 2 * SILENCE_S
        self._plan = Plan(number)
        store = join_store(meet, TIMEOUT_S)
        self._member = bare_member(store, number, NUM_MEMBERS, self._plan)

    def run(self, attempt: int, is_silent: bool) -> dict[int, float]:
        """Take part in an exchange; what was received of each other member."""
        self._plan.is_silent = is_silent
        self._member.run(1, attempt)
        return self._plan.received
