"""AdamW, or Muon with it, over a rank's model chunks, and moving its state between GPU and host."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megarl.cpu.megatron_patches import stepping_with
from megarl.device import DEVICE
from megarl.parallel import groups
from megarl.parallel.fused_adam import FusedAdam
from megarl.parallel.matrix_exchange import MatrixPart
from megarl.parallel.muon import use_muon
from megarl.parallel.option_values import PRECISION_AWARE, state_dtype
from megarl.parallel.options import make_config
from megarl.parallel.param_names import named_parameters
from megarl.types import UserError
from megarl.types.tensors import ModelChunks

if TYPE_CHECKING:
    from megarl.config import TrainConfig


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    train: TrainConfig,
    dtype: torch.dtype,
    matrices: Sequence[MatrixPart] = (),
) -> ChainedOptimizer:
    """AdamW with its state sharded over the data-parallel ranks; call it after the weights are loaded.

    With `train.optimizer_name: muon` it is Muon for the matrices of which this rank has the parts `matrices`, and the
    call is collective. Betas are 0.9 and 0.999 unless train.optimizer sets them. Norm weights are not decayed. Raises
    UserError where TransformerEngine is missing and the recipe asks for its optimizer.
    """
    error = transformer_engine_error(train, offloads(train))
    if error:
        raise error
    config = optimizer_config(train, dtype, offloads(train))
    own_class = contextlib.nullcontext()
    if DEVICE == "cpu" and train.optimizer.get(PRECISION_AWARE) and not offloads(train):
        own_class = stepping_with(FusedAdam)
    with own_class:
        optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    if config.optimizer_cpu_offload:
        # Megatron first builds an optimizer of all weights, and leaves it in a cycle: 4 B an element
        gc.collect()
    for group in optimizer.param_groups:
        group["weight_decay"] = train.weight_decay * group["wd_mult"]
    assert isinstance(optimizer, ChainedOptimizer)  # one for the dense weights, one for the experts
    if train.optimizer_name == "muon":
        params = dict(named_parameters([chunk.module for chunk in chunks]))
        for chained in stepping(optimizer):
            use_muon(chained, params, matrices, groups.stage_group(), dtype)
    return optimizer


def optimizer_config(train: TrainConfig, dtype: torch.dtype, offloaded: bool) -> OptimizerConfig:
    """Megatron's configuration; offloaded: the optimizer runs on the host, with weights and gradients on the GPU.

    Raises UserError where that is not possible, or where Megatron refuses the recipe's options.
    """
    if offloaded and dtype is torch.float32:
        problem = "Megatron's optimizer on the host steps on copies in float32, and model.dtype is float32 itself"
        raise UserError(
            "train.optimizer_offload", problem, "set it to false, or model.dtype to bfloat16"
        )
    if dtype is torch.float32 and train.optimizer.get(PRECISION_AWARE):
        problem = "this optimizer would keep a second copy of float32 weights, and step on the first one alone"
        raise UserError(
            f"train.optimizer.{PRECISION_AWARE}",
            problem,
            "remove it, or set model.dtype to bfloat16",
        )
    fixed = {
        "optimizer": "adam",
        "lr": train.lr,
        "weight_decay": train.weight_decay,
        "clip_grad": train.grad_clip,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": True,
        "optimizer_cpu_offload": offloaded,
        "optimizer_offload_fraction": 1.0 if offloaded else 0.0,
        "overlap_cpu_optimizer_d2h_h2d": offloaded,
    }
    named = {
        key: state_dtype(key, value) if key.endswith("_dtype") else value
        for key, value in train.optimizer.items()
    }
    late: dict[str, Any] = {}
    # the constructor fails without TransformerEngine's version
    if named.get(PRECISION_AWARE) and not HAVE_TE:
        late = {
            key: named.pop(key)
            for key in [*named]
            if key == PRECISION_AWARE or key.endswith("_dtype")
        }
    config = make_config("train.optimizer", OptimizerConfig, named | fixed)
    for key, value in late.items():
        setattr(config, key, value)
    if offloaded or late:
        # Otherwise DistributedOptimizer would make float32 master weights on the GPU for an optimizer on the host. Set
        # after construction, because the constructor asks for TransformerEngine, whose optimizer is not used here.
        config.use_precision_aware_optimizer = (
            config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        ) = True
    return config


def transformer_engine_error(train: TrainConfig, offloaded: bool) -> UserError | None:
    """The error of a recipe that asks for TransformerEngine's optimizer on GPUs where it is not installed."""
    if HAVE_TE or DEVICE == "cpu" or offloaded or not train.optimizer.get(PRECISION_AWARE):
        return None
    problem = "true, but this optimizer comes with TransformerEngine, which is not installed"
    return UserError(
        f"train.optimizer.{PRECISION_AWARE}",
        problem,
        "install transformer-engine[pytorch], or remove it",
    )


def stepping(optimizer: ChainedOptimizer) -> list[Any]:
    """Megatron's DistributedOptimizers of the dense weights and of the experts, without its stubs."""
    chained: list[Any] = optimizer.chained_optimizers
    return [distributed for distributed in chained if not distributed.is_stub_optimizer]


def offloads(train: TrainConfig) -> bool:
    """Whether the optimizer runs on the host, with weights and gradients on a GPU."""
    return train.optimizer_offload and DEVICE == "cuda"


def move_optimizer(optimizer: ChainedOptimizer, chunks: ModelChunks, device: str) -> None:
    """Move the optimizer's state and master weights to a device; shards that are views of parameters stay.

    Host memory is pinned, for fast copies. Step counts stay on the host, where torch's AdamW reads them.
    """
    in_model = {
        param.untyped_storage().data_ptr() for chunk in chunks for param in chunk.parameters()
    }
    for group in optimizer.param_groups:
        for shard in group["params"]:
            if shard.untyped_storage().data_ptr() not in in_model:
                shard.data = _moved(shard.data, device)
    for chained in stepping(optimizer):
        for state in chained.optimizer.state.values():
            arrays = {
                key: value for key, value in state.items() if torch.is_tensor(value) and value.dim()
            }
            state.update({key: _moved(value, device) for key, value in arrays.items()})


def _moved(tensor: Tensor, device: str) -> Tensor:
    if device != "cpu" or tensor.is_cpu:
        return tensor.to(device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
