"""The type of the worlds that tests build on this machine, and how far two of them may be from each other in it."""

from __future__ import annotations

from megarl.device import DEVICE

# layouts round differently, and a router's choice may tip; not measured on a GPU yet
IN_BFLOAT16 = 0.1
ROUNDING_OF_BFLOAT16 = 2.0**-8  # of a weight that is compared with one in float32


def dtype() -> str:
    """`model.dtype`: float32, but where TransformerEngine runs, whose attention takes no packed rows in it."""
    if DEVICE == "cpu":
        return "float32"
    from megarl.parallel.model import TRANSFORMER_ENGINE

    return "bfloat16" if TRANSFORMER_ENGINE else "float32"


def within(tolerance: float, wider: float = IN_BFLOAT16) -> float:
    """A tolerance of float32, or the wider one where worlds are in bfloat16."""
    return tolerance if dtype() == "float32" else max(tolerance, wider)
