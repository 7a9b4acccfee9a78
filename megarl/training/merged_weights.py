"""Adapters (LoRA) in the policy's own weights, rounded as engines get them: both then compute with the same numbers.

In a 16-bit type most of a small delta is lost where it is added to a weight and rounded. The trainer computes with the
rounded sums W' = round(W + (alpha / rank) B A), so that its probabilities are the engine's; the factors get the
gradient of W' as if nothing had been rounded (a straight-through estimate, arXiv 1308.3432). The frozen W waits in
host memory, from which the sums are made anew after each update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.parallel import host_offload
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.lora_merge import Merge
from megarl.resharding.shards import cells

Params = dict[str, torch.Tensor]


class MergedWeights:
    """Keeps W of one rank's adapted weights in host memory, and writes W' into the parameters.

    Construct it while the parameters still hold W.
    """

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
        """params, factors: of the rank, by the maps' names."""
        self._merge = Merge.of_rank(size, shape, layout, rank, transformer_engine, factors)
        self._boxes = self._merge.all_boxes(params)
        adapted = {
            name
            for shards in self._merge.weights.values()
            for shard in shards
            for name, _ in cells(shard)
        }
        self._params = {name: param for name, param in params.items() if name in adapted}
        self._frozen = host_offload.host_buffers_like(self._params)
        for name, param in self._params.items():
            self._frozen[name].copy_(param)
        self._rounding = size.rounding
        self.write()

    @torch.no_grad()
    def write(self, version: int | None = None) -> None:
        """Write W' of the factors as they are now.

        version: of the weights, for stochastic rounding; None: to the nearest number.
        """
        for name, param in self._params.items():
            param.copy_(self._frozen[name])
        self._merge.begin(version)
        for box in self._boxes:
            box.write(box.weight)  # tile by tile: a tile is read before it is written

    def round_weights(self, version: int) -> float | None:
        """Round W' as engines get this version; returns the part of the deltas that rounding has kept.

        None where all are 0. With rounding to the nearest number W' is so already, since the last update.
        """
        if self._rounding == "stochastic":
            self.write(version)
        return self._merge.kept_share()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Put W back into the parameters inside the block; W' returns after it."""
        with host_offload.swapped_in(self._params, self._frozen):
            yield
