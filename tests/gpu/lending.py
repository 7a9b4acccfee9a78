"""Two ends of lent memory: a training rank that publishes its parameters, and an engine that maps them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch

from megarl.device import DEVICE
from megarl.resharding.memory_handles import map_params, share_params
from megarl.resharding.transport import settle

TIMEOUT_S = 60.0


class Lender:
    """Parameters in one flat buffer, as Megatron's are: `left` its first half, `right` the second, transposed."""

    def __init__(self, num_bytes: int) -> None:
        self._flat = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
        left, right = self._flat.view(2, -1, 1024)
        self._handles = share_params({"left": left, "right": right.T})

    def handles(self) -> str:
        """Pickled, because the children of these tests talk in JSON."""
        return pickle.dumps(self._handles).hex()

    def fill(self, value: float) -> None:
        self._flat.fill_(value)
        settle(TIMEOUT_S)

    def read(self) -> list[float]:
        """The smallest and the largest value."""
        return ends([self._flat.view(-1, 1024)])


class Borrower:
    """An engine's process, which has nothing mapped yet."""

    def __init__(self) -> None:
        self._params: dict[str, torch.Tensor] = {}
        torch.zeros(1, device=DEVICE)  # the context, which an engine has anyway

    def attach(self, handles: str) -> float:
        """Map what is published in place of what was mapped before; the seconds that it takes."""
        self._params = {}
        started = time.perf_counter()
        self._params = map_params(pickle.loads(bytes.fromhex(handles)))
        settle(TIMEOUT_S)
        return time.perf_counter() - started

    def read(self) -> dict[str, Any]:
        """The smallest and the largest value of both parameters, and the seconds that reading takes."""
        started = time.perf_counter()
        extremes = ends(list(self._params.values()))
        return {"ends": extremes, "seconds": time.perf_counter() - started}

    def write(self, value: float) -> None:
        for param in self._params.values():
            param.fill_(value)
        settle(TIMEOUT_S)

    def free_bytes(self) -> int:
        """Of the GPU; without one, 0."""
        return torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0

    def is_alive(self) -> bool:
        return True


def ends(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The smallest and the largest value, by parts whose elements 32 bits can count."""
    parts = [
        part
        for tensor in tensors
        for part in tensor.chunk(8, int(tensor.shape[1] > tensor.shape[0]))
    ]
    return [float(min(part.min() for part in parts)), float(max(part.max() for part in parts))]
