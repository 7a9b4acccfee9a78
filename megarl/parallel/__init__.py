"""Megatron-Core: process groups, the model, pipeline passes, the optimizer and its checkpoints."""

import os
import warnings

from megarl.device import DEVICE
from megarl.parallel import optional_imports

optional_imports.install()

if DEVICE == "cpu":
    # Megatron's jit_fuser is torch.compile, which looks for a C++ compiler in the first step of every rank.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Megatron's modules warn at import about every optional library that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\.")
# Megatron calls collectives by names that torch 2.13 deprecates, at every step.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
