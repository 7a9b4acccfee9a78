"""Megatron-Core 0.16.1 on a machine without CUDA: patches where it calls torch.cuda unconditionally.

The patches replace the name `torch` inside Megatron's own modules; torch itself, and every other library, keeps its
behaviour. The exceptions are methods of tensors (`type`, `cuda`, `record_stream`), which no module-level name can
redirect.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import optimizer, utils
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import fused_a2a, moe_utils, token_dispatcher
from torch import Tensor

from megarl.cpu import deepep

_CPU = torch.device("cpu")
_IMPORTED_LATE = (
    "megatron.core.models.gpt.fine_grained_callables"  # by the first pass of combined 1F1B
)
_LIKE = ("empty", "full", "ones", "zeros")
_FACTORIES = ("arange", "tensor", *_LIKE, *(f"{name}_like" for name in _LIKE))


class _Stream:
    """A CUDA stream or event on a CPU, where all operations are in order."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def record_event(self) -> _Stream:
        return self


@contextlib.contextmanager
def _in_order(stream: object) -> Iterator[None]:
    yield


def _torch_without_cuda(device: torch.device) -> ModuleType:
    """A copy of the torch namespace whose `cuda` is the CPU and whose factories replace device="cuda" by `device`."""
    cuda = ModuleType("torch.cuda")
    cuda.__dict__.update(torch.cuda.__dict__)
    stream = _Stream()
    cuda.__dict__.update(
        current_device=lambda: device,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *_: stream,
        default_stream=lambda *_: stream,
        stream=_in_order,
        nvtx=SimpleNamespace(range_push=lambda _: None, range_pop=lambda: None),
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    namespace = ModuleType("torch")
    namespace.__dict__.update(torch.__dict__)
    namespace.__dict__.update(
        {name: _on_device(device, getattr(torch, name)) for name in _FACTORIES}, cuda=cuda
    )
    return namespace


def _on_device(device: torch.device, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def on_device(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = device
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_device


def replace_torch_cuda(device: torch.device) -> None:
    """Give every loaded Megatron module a torch whose CUDA is the CPU; buffers, schedules and clipping need it."""
    namespace = _torch_without_cuda(device)
    importlib.import_module(_IMPORTED_LATE)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = namespace


def name_tensor_types_as_cuda() -> None:
    """Let `Tensor.type()` return torch.cuda.* names, which distrib_optimizer and clip_grads compare."""
    plain = Tensor.type

    def type_as_cuda(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = plain(self, *args, **kwargs)
        if isinstance(named, str):
            return named.replace("torch.", "torch.cuda.", 1)
        return named

    Tensor.type = type_as_cuda  # type: ignore[method-assign]


def leave_tensors_where_they_are() -> None:
    """Let `Tensor.cuda()` return the tensor; Megatron calls it on the output layer's weight and position embeddings."""
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def use_tensors_in_order() -> None:
    """Let `Tensor.record_stream()` do nothing; combined 1F1B calls it on what another stream is to use."""
    Tensor.record_stream = lambda self, *_: None  # type: ignore[method-assign]


def keep_rng_states_on_cpu() -> None:
    """Give Megatron's RNG tracker the CPU's generator in place of the CUDA generator.

    Its warnings, for every weight, that the CPU's generator changed are suppressed.
    """
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def split_by_numbers() -> None:
    """Convert the split sizes of all_to_all to NumPy: on CPU Megatron leaves them tensors, which gloo refuses."""

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return tensor

    moe_utils.maybe_move_tensor_to_cpu = to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def exchange_uneven_lists() -> None:
    """Gather and reduce lists of tensors of different sizes, as expert tensor parallelism does and gloo does not."""
    gather = mappings._gather_along_first_dim
    reduce_scatter = mappings._reduce_scatter_along_first_dim

    def gather_any(
        input_: Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        parts = [input_.new_empty(size, *input_.shape[1:]) for size in output_split_sizes]
        parts[group.rank()] = input_.contiguous()
        for rank, part in enumerate(parts):
            torch.distributed.broadcast(part, group_src=rank, group=group)
        return torch.cat(parts)

    def reduce_any(
        input_: Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, *args, **kwargs)
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gather_any
    mappings._reduce_scatter_along_first_dim = reduce_any


def step_without_engine() -> None:
    """Give Megatron torch's optimizers and its own loops over lists of tensors, as if no fused ones were installed.

    TransformerEngine and apex may be installed where MEGARL_DEVICE=cpu asks for the CPU. Megatron uses their fused
    optimizers and kernels, which need a GPU, as soon as it can import them.
    """
    chosen: Any = optimizer
    chosen.Adam = torch.optim.AdamW
    chosen.SGD = torch.optim.SGD
    chosen.USING_PYTORCH_OPTIMIZER = True
    distributed: Any = distrib_optimizer
    distributed.Adam = torch.optim.Adam
    distributed.HAVE_APEX_OR_TE = False
    distributed.USING_TE_OPTIMIZER = distributed.USING_APEX_OPTIMIZER = False
    loops: tuple[Any, ...] = megatron_optimizer, clip_grads
    for module in loops:
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm


@contextlib.contextmanager
def stepping_with(adam: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, Megatron makes precision-aware optimizers of this class, as if it were TransformerEngine's FusedAdam."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (optimizer, "Adam", adam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        # else it would not say store_param_remainders
        (optimizer, "is_te_min_version", lambda *_, **__: True),
        (distrib_optimizer, "Adam", adam),
    )
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)


def send_to_experts_without_deepep() -> None:
    """Give Megatron's flex dispatcher the stand-in of DeepEP, which Megatron looks for as it imports the module."""
    stand_ins = deepep.stand_in_modules()
    installed = {name: sys.modules.pop(name) for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        importlib.reload(fused_a2a)
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(installed)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


@functools.cache
def patch_megatron(device: torch.device = _CPU) -> None:
    """Apply all patches, once per process, after the Megatron modules that are used have been imported.

    device: in place of the GPU; `meta` for modules that have shapes and no contents.
    """
    send_to_experts_without_deepep()
    replace_torch_cuda(device)
    name_tensor_types_as_cuda()
    leave_tensors_where_they_are()
    use_tensors_in_order()
    keep_rng_states_on_cpu()
    split_by_numbers()
    exchange_uneven_lists()
    step_without_engine()
