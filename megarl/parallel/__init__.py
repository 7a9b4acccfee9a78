"""Megatron-Core: layouts, process groups, the model, pipeline passes, the optimizer and its checkpoints."""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

from megarl.device import DEVICE


class _NoTrackerInMegatron(MetaPathFinder):
    """Megatron imports wandb for its inference engine, which megarl does not use: a third of a rank's start."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        megatron = sys.modules.get("megatron.core")
        if fullname == "wandb" and getattr(megatron and megatron.__spec__, "_initializing", False):
            raise ModuleNotFoundError("not needed while Megatron is imported", name=fullname)


sys.meta_path.insert(0, _NoTrackerInMegatron())

if DEVICE == "cpu":
    # Megatron's jit_fuser is torch.compile, which looks for a C++ compiler in the first step of every rank.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Megatron's modules warn at import about every optional library that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\.")
# Megatron calls collectives by names that torch 2.13 deprecates, at every step.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
