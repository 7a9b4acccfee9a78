"""The patches reach Megatron and nothing else; in a process of its own, since they last as long as it does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from megatron.core import optimizer as chosen
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from megarl.cpu.megatron_patches import step_without_engine
from megarl.parallel.local_spec import use_local_layers

PROGRAM = """
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megarl.cpu.megatron_patches import patch_megatron

plain_zeros, plain_cuda = torch.zeros, torch.cuda
patch_megatron()
patch_megatron()
assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
assert utils.torch.ones(2, device=utils.torch.cuda.current_device()).device.type == "cpu"
assert clip_grads.torch.tensor([1.0], device="cuda").type() == "torch.cuda.FloatTensor"
assert schedules.torch.arange(3, dtype=torch.int64).tolist() == [0, 1, 2]
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


def test_packages_for_gpus_are_not_stepped_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's modules as they are where TransformerEngine is installed, on a machine whose CPU is asked for."""
    tensors = ("multi_tensor_applier", "multi_tensor_scale_impl")
    for module in (megatron_optimizer, clip_grads):
        for name in tensors:
            monkeypatch.setattr(module, name, None)
    for module, names in (
        (clip_grads, ("l2_norm_impl",)),
        (chosen, ("Adam", "SGD", "USING_PYTORCH_OPTIMIZER")),
        (distrib_optimizer, ("Adam",)),
        (moe_utils, ("te_general_gemm",)),
        (multi_latent_attention, ("TELinear",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, "TransformerEngine's", raising=False)
    for name in ("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER"):
        monkeypatch.setattr(distrib_optimizer, name, True)
    step_without_engine()
    use_local_layers()
    assert (chosen.Adam, chosen.SGD, chosen.USING_PYTORCH_OPTIMIZER) == (
        torch.optim.AdamW,
        torch.optim.SGD,
        True,
    )
    assert distrib_optimizer.Adam is torch.optim.Adam
    assert not distrib_optimizer.HAVE_APEX_OR_TE
    assert not (distrib_optimizer.USING_TE_OPTIMIZER or distrib_optimizer.USING_APEX_OPTIMIZER)
    for module in (megatron_optimizer, clip_grads):
        assert module.multi_tensor_applier is utils.local_multi_tensor_applier
        assert module.multi_tensor_scale_impl is utils.local_multi_tensor_scale
    assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm
    assert moe_utils.te_general_gemm is None


@pytest.mark.slow
def test_patches() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch itself still refuses"
