"""The factors of adapters (LoRA) on their way to engines: B is multiplied by alpha / rank, in float32, rounded once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megarl.model.lora_pairs import LoraSize
from megarl.model.tensors import STACK, Size
from megarl.resharding.shards import Cell, views
from megarl.types.tensors import NamedTensors

_FACTOR_B = ".lora_B.weight"


class ScaledBox(NamedTuple):
    """A box of a rank's factor, [1, rows, cols], which is multiplied when it is read."""

    elements: Tensor
    scale: float

    @property
    def scratch_bytes(self) -> int:
        """The temporary memory of `write`."""
        return 4 * self.elements.numel()

    def write(self, target: Tensor) -> None:
        """Write the products to a tensor of the box's shape."""
        target.copy_(self.elements.float() * self.scale)


@dataclass(frozen=True)
class Scaling:
    """How the factors of these adapters are sent."""

    size: LoraSize

    def boxes(
        self, name: str, params: NamedTensors, param: str, at: Cell, size: Size
    ) -> list[ScaledBox] | None:
        """As `shards.views`, for a box of the factor `name`; None where it is sent as it is."""
        if not name.endswith(_FACTOR_B):
            return None
        scale = self.size.scale_of(STACK in name)
        items = range(at[0], at[0] + size[0])
        item_views = [views(params, param, (item, *at[1:]), (1, *size[1:])) for item in items]
        return [ScaledBox(elements, scale) for (elements,) in item_views]
