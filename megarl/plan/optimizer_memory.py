"""The bytes of a trained element: its gradient, and what AdamW keeps of it."""

from __future__ import annotations

from megarl.config import TrainConfig
from megarl.parallel.option_values import PRECISION_AWARE, STATE_DTYPES

GRADIENT_BYTES = 4  # DistributedDataParallelConfig(grad_reduce_in_fp32=True)
MOMENTS_BYTES = 8  # AdamW's two, float32
# float32 copies of weights in another type; with optimizer_offload on the host alone, and not pinned
MASTER_BYTES = 4


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
