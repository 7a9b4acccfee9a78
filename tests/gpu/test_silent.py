"""An exchange in which one of three members sends nothing: whom the others suspect, and whether all exchange then.

Unverified on a GPU.

resharding/transport.py wait, resharding/member.py _suspects: over NCCL one work stands for all messages of a round, and
peers do not notice that a group is aborted. To check first: that a wait in vain ends at its own limit, before NCCL's
watchdog ends the process; that an abort while the peer has posted nothing returns.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from megarl.device import DEVICE, address_of, host_store
from megarl.resharding.member import exchange_suspects
from tests.gpu.child import Child, Failed
from tests.gpu.silent import NUM_MEMBERS, TIMEOUT_S

SILENT = 2


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < NUM_MEMBERS, reason=f"needs {NUM_MEMBERS} GPUs"
)
def test_a_member_that_sends_nothing_is_suspected_and_all_exchange_afterwards() -> None:
    """Over NCCL each of the others suspects both of its peers, over gloo the silent one: most suspect that one."""
    store = host_store(TIMEOUT_S)
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child("tests.gpu.silent:Exchanging", number=number, meet=address_of(store))
            )
            for number in range(NUM_MEMBERS)
        ]
        for number, child in enumerate(children):
            child.request("run", attempt=1, is_silent=number == SILENT)
        kinds = []
        for child in children:
            with pytest.raises(Failed) as raised:
                child.reply(TIMEOUT_S)
            kinds.append(raised.value.kind)
        assert exchange_suspects(store, "run", 1, NUM_MEMBERS, ["weights"]) == [SILENT], kinds
        for child in children:
            child.request("run", attempt=2, is_silent=False)
        for number, child in enumerate(children):
            received = child.reply(TIMEOUT_S)
            others = [peer for peer in range(NUM_MEMBERS) if peer != number]
            assert received == {str(peer): float(peer) for peer in others}
