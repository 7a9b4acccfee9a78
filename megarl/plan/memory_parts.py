"""The parts of a GPU's memory, in the order in which the report, the picture and the JSON show them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Parts:
    """Bytes of one GPU in one phase, of all processes there."""

    weights_bytes: int = 0
    grads_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    logits_bytes: int = 0
    engine_weights_bytes: int = 0
    kv_cache_bytes: int = 0
    reshard_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(vars(self).values())

    def by_name(self) -> dict[str, int]:
        """Bytes by the names of `PARTS`."""
        return dict(zip(PARTS, vars(self).values(), strict=True))

    def __add__(self, other: Parts) -> Parts:
        return Parts(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))


PARTS = tuple(field.name.removesuffix("_bytes") for field in fields(Parts))
