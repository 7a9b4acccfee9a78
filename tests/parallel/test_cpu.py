"""The patches reach Megatron and nothing else; in a process of its own, since they last as long as it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megarl.parallel.cpu import patch_megatron

plain_zeros, plain_cuda = torch.zeros, torch.cuda
patch_megatron()
patch_megatron()
assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
assert utils.torch.ones(2, device=utils.torch.cuda.current_device()).device.type == "cpu"
assert clip_grads.torch.tensor([1.0], device="cuda").type() == "torch.cuda.FloatTensor"
assert schedules.torch.arange(3, dtype=torch.int64).tolist() == [0, 1, 2]
assert moe_utils.te_general_gemm is None
splits = moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
assert type(splits).__name__ == "ndarray" and splits.tolist() == [1, 2]
state = megatron_random._get_cuda_rng_state()
first = torch.rand(1)
megatron_random._set_cuda_rng_state(state)
assert torch.rand(1) == first

assert torch.zeros is plain_zeros and torch.cuda is plain_cuda
try:
    torch.zeros(1, device="cuda")
except (RuntimeError, AssertionError):
    print("torch itself still refuses")
"""


@pytest.mark.slow
def test_patches() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch itself still refuses"
