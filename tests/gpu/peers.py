"""One rank of an engine in a copy of weights to another one, each in a process, and on a GPU, of its own."""

from __future__ import annotations

import time
from typing import Any

import torch

from megarl.device import DEVICE
from megarl.resharding import peer_copy
from megarl.resharding.fp8 import FP8
from megarl.resharding.peer_copy import CopyMember, PeerCopy
from megarl.resharding.transport import settle

TIMEOUT_S = 60.0


class Peer:
    """Weights as an fp8 engine has them. engine: its index, and with GPUs the number of its own."""

    def __init__(self, engine: int, rows: int) -> None:
        self._engine = engine
        if DEVICE == "cuda":
            torch.cuda.set_device(engine)
        self._params = {
            "experts": torch.zeros(4, rows, 4096, dtype=FP8, device=DEVICE),
            "scales": torch.zeros(4, rows // 128, 32, device=DEVICE),
            "norm": torch.zeros(4097, dtype=torch.bfloat16, device=DEVICE),
        }

    def fill(self, seed: int) -> None:
        """Bytes that depend on the seed."""
        for param in self._params.values():
            content = param.view(torch.uint8).flatten()
            content.copy_(torch.arange(len(content), device=DEVICE).mul(seed).remainder(251))
        settle(TIMEOUT_S)

    def wrong(self, seed: int) -> list[str]:
        """The parameters that are not those of the seed."""
        before = {name: param.clone() for name, param in self._params.items()}
        self.fill(seed)
        return [
            name
            for name, param in self._params.items()
            if not torch.equal(param.view(torch.uint8), before[name].view(torch.uint8))
        ]

    def copy(self, content: Any, version: int) -> float:
        """Take part in a copy; the seconds that it takes."""
        copy = PeerCopy.from_json(content)
        started = time.perf_counter()
        member = CopyMember(copy, copy.engines.index(self._engine), tp_rank=0)
        member.run(self._params, version)
        return time.perf_counter() - started

    def rest_in_round(self, number: int, seconds: float) -> None:
        """In the next copy, wait before the messages of a round are posted."""
        original = CopyMember._post
        left = [number]

        def resting(member: CopyMember, *arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                time.sleep(seconds)
            return original(member, *arguments)

        peer_copy.CopyMember._post = resting  # type: ignore[method-assign]
