"""Adapters (LoRA) in the policy's own weights, rounded as engines get them: both then compute with the same numbers.

In a 16-bit type most of a small delta is lost where it is added to a weight and rounded. The trainer computes with the
rounded sums W' = round(W + (alpha / rank) B A), so that its probabilities are the engine's; the factors get the
gradient of W' as if nothing had been rounded (a straight-through estimate, arXiv 1308.3432). The frozen W waits in
host memory, from which the sums are made anew after each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.parallel import host_offload
from megarl.parallel.layout import TrainLayout
from megarl.parallel.lora_pairs import LoraSize
from megarl.resharding import lora_map, megatron_map
from megarl.resharding.lora_merge import Merge
from megarl.resharding.shards import cells
from megarl.types import ModelShape

Params = dict[str, torch.Tensor]


class MergedWeights:
    """The weights of one rank that have adapters, which are made the sums; call it while they are the frozen ones."""

    def __init__(
        self,
        size: LoraSize,
        shape: ModelShape,
        layout: TrainLayout,
        rank: int,
        transformer_engine: bool,
        params: Params,
        factors: Params,
    ) -> None:
        """params, factors: of the rank, by the maps' names; the weights are written in place from now on."""
        of_rank = shape, layout, rank
        shards = megatron_map.shards(*of_rank, transformer_engine)
        of_factors = lora_map.shards(*of_rank, size, transformer_engine)
        self._merge = Merge.of(size, shards, of_factors, factors)
        boxes = [self._merge.boxes(one.name, params, one.param, one.at, one.size) for one in shards]
        self._boxes = [box for found in boxes for box in found or ()]
        adapted = {name for one in shards if one.name in self._merge.weights for name, _ in cells(one)}
        self._params = {name: param for name, param in params.items() if name in adapted}
        self._frozen = host_offload.host_buffers_like(self._params)
        for name, param in self._params.items():
            self._frozen[name].copy_(param)
        self._rounding, self._kept_share = size.rounding, None
        self.write()

    @torch.no_grad()
    def write(self, version: int | None = None) -> None:
        """Write the sums with the factors as they are now.

        version: of the weights, for stochastic rounding; None: to the nearest number.
        """
        for name, param in self._params.items():
            param.copy_(self._frozen[name])
        self._merge.begin(version)
        for box in self._boxes:
            box.write(box.weight)  # tile by tile: a tile is read before it is written
        self._kept_share = self._merge.kept_share()

    def publish(self, version: int) -> float | None:
        """Have the weights as engines get this version; returns the part of the deltas that rounding has kept.

        They were written since the factors have changed. Returns None where all deltas are 0.
        """
        if self._rounding == "stochastic":
            self.write(version)
        return self._kept_share

    def after(self, load: Callable[[Path], None]) -> Callable[[Path], None]:
        """What loads factors, and then writes the sums."""

        def loaded(folder: Path) -> None:
            load(folder)
            self.write()

        return loaded

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Have the frozen weights in their place inside the block."""
        with host_offload.swapped_in(self._params, self._frozen):
            yield
