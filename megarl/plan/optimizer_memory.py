"""The bytes of a trained element, its gradient's and AdamW's, and the `train.optimizer` options that lower them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config import Recipe, TrainConfig
from megarl.parallel.option_values import (
    BFLOAT16_MOMENTS,
    HALF_MOMENTS_BETA,
    PRECISION_AWARE,
    STATE_DTYPES,
    has_bfloat16_moments,
)

GRADIENT_BYTES = 4  # DistributedDataParallelConfig(grad_reduce_in_fp32=True)
MOMENTS_BYTES = 8  # AdamW's two, float32
# float32 copies of weights in another type; with optimizer_offload on the host alone, and not pinned
MASTER_BYTES = 4
_HALVES_BETA2 = 0.95  # with moments in bfloat16: DeepSeek-V3's


def state_bytes(train: TrainConfig, item: int) -> int:
    """Bytes of the GPU that AdamW keeps of a weight of `item` bytes: its master in another type and two moments."""
    options = train.optimizer
    if not options.get(PRECISION_AWARE):
        return MASTER_BYTES * (item == 2) + MOMENTS_BYTES
    master, *moments = (
        STATE_DTYPES.get(str(options.get(key)), STATE_DTYPES["float32"]).itemsize
        for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    )
    # lower halves alone
    keeps_remainders = item == 2 and master == 4 and options.get("store_param_remainders", True)
    return (2 if keeps_remainders else master) + sum(moments)


def smaller_states(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """`train.optimizer` with masters as remainders, which is exact, and with moments in bfloat16 besides.

    Each where it is allowed: remainders are those of bfloat16 weights. With these moments beta2 may have to change; a
    beta1 that does not allow them is left as it is. Muon's state has one type.
    """
    options = recipe.train.optimizer
    if recipe.model.dtype != "bfloat16" or recipe.train.optimizer_name == "muon":
        return
    precise = options | {PRECISION_AWARE: True}
    yield precise
    if has_bfloat16_moments(options) or options.get("adam_beta1", 0.9) > HALF_MOMENTS_BETA:
        return
    halves = precise | BFLOAT16_MOMENTS
    if options.get("adam_beta2", 1.0) > HALF_MOMENTS_BETA:
        halves["adam_beta2"] = _HALVES_BETA2
    yield halves
