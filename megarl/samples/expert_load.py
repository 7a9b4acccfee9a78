"""How many tokens chose each expert of each layer, from the routed experts of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class ExpertLoad:
    """Counts tokens by layer and expert; it grows with the largest expert's number that it has seen.

    every: one of so many tokens is counted. Numbers of tokens that are shown to users need all of them; shares of
    the load do not, and a step of a large model has billions of choices.
    """

    def __init__(self, every: int = 1) -> None:
        self.counts_LE: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._every = every

    def add(self, experts_TMK: npt.NDArray[Any]) -> None:
        """experts_TMK: the K experts that each of T tokens chose in each of M layers with experts."""
        experts_TMK = experts_TMK[:: self._every]
        if not experts_TMK.size:
            return
        num_layers = experts_TMK.shape[1]
        num_experts = max(int(experts_TMK.max()) + 1, self.counts_LE.shape[1])
        self._grow(num_layers, num_experts)
        for layer in range(num_layers):
            chosen = experts_TMK[:, layer].ravel().astype(np.int64)
            self.counts_LE[layer] += np.bincount(chosen, minlength=num_experts)

    def merge(self, counts_LE: npt.NDArray[np.int64]) -> None:
        """Add the counts of another one."""
        (num_layers, num_experts) = counts_LE.shape
        self._grow(num_layers, num_experts)
        self.counts_LE[:num_layers, :num_experts] += counts_LE

    def take(self) -> npt.NDArray[np.int64]:
        """The counts up to now, [layers, experts]; it then begins anew."""
        counts_LE = self.counts_LE
        self.counts_LE = np.zeros((0, 0), np.int64)
        return counts_LE

    def _grow(self, num_layers: int, num_experts: int) -> None:
        (old_layers, old_experts) = self.counts_LE.shape
        sizes = max(num_layers, old_layers), max(num_experts, old_experts)
        if sizes != self.counts_LE.shape:
            more = ((0, sizes[0] - old_layers), (0, sizes[1] - old_experts))
            self.counts_LE = np.pad(self.counts_LE, more)
