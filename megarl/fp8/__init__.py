"""The numbers of float8 (E4M3): codes with scales of tiles and groups, and what linear layers compute with them.

One rule for training ranks, resharding and engines, so that all have the same bits (DeepSeek-V3, section 3.3.2).
"""

from __future__ import annotations

from typing import Literal

# rows and columns of a weight, and neighbouring values of an activation, that share one scale
TILE = 128
# a scale: the largest magnitude / 448, or that rounded up to a power of two
ScaleRule = Literal["exact", "powers_of_two"]
# with what a linear layer's gradients are computed: its operands themselves, their codes times scales, or codes
# of the gradient too
Fp8Backward = Literal["high_precision", "dequantised", "fp8"]
