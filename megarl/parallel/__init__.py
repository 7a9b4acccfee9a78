"""The training side: Megatron-Core ranks, from rank arithmetic to one optimizer step."""

import os
import warnings

from megarl.device import DEVICE

if DEVICE == "cpu":
    # Megatron's jit_fuser is torch.compile, which would look for a C++ compiler in the first step of every rank.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# At import Megatron warns, module by module, of every optional library that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\.")
# It calls collectives by the names that torch 2.13 deprecates, at every step.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
