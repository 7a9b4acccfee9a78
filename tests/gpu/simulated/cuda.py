"""A GPU that is not there: `install()` gives this process a torch.cuda whose memory and streams are the CPU's.

What it shows: wrong calls, names, devices, shapes, types and attributes of the lines that only a GPU executes, in the
order in which Megatron, TransformerEngine's Python and megarl call them. What it cannot show: kernels' own numbers and
speed, NCCL (gloo carries the messages), memory, IPC, and whether one stream waits for another: everything is in order
here.

Installed before megarl is imported, because `megarl.device` decides then. It lasts as long as the process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.simulated.tensors import CUDA, Placing

NAME, TOTAL_BYTES, FREE_BYTES = "NVIDIA H200", 140 << 30, 100 << 30
TYPES = {
    "FloatTensor": torch.float32,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ByteTensor": torch.uint8,
}


class Stream:
    """A stream or an event: all work is done when it is given."""

    cuda_stream = 0
    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def install() -> None:
    """Put the GPU into torch, gloo in place of NCCL, and the mode that places tensors into every thread."""
    _replace_cuda()
    _replace_nccl()
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    torch.nn.Module.to = _keeping_attributes(torch.nn.Module.to)  # type: ignore[method-assign]
    Placing().__enter__()
    run = threading.Thread.run

    def run_placed(self: threading.Thread) -> None:
        with Placing():
            run(self)

    threading.Thread.run = run_placed  # type: ignore[method-assign]


def _replace_cuda() -> None:
    stream, generator = Stream(), torch.default_generator
    facts = SimpleNamespace(
        major=9, minor=0, name=NAME, total_memory=TOTAL_BYTES, multi_processor_count=132,
        pci_domain_id=0, pci_bus_id=24, pci_device_id=0,
    )  # fmt: skip
    random: dict[str, Any] = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "current_device": lambda: 0,
        "_lazy_init": _always(None),
        "_lazy_call": lambda call, **_: call(),
    }
    fixed = {
        "is_available": True, "is_initialized": True, "device_count": 1, "get_device_name": NAME,
        "get_device_properties": facts, "get_device_capability": (9, 0), "mem_get_info": (FREE_BYTES, TOTAL_BYTES),
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "is_bf16_supported": True,
        "is_current_stream_capturing": False, "current_stream": stream, "default_stream": stream,
    }  # fmt: skip
    silent = (
        "init",
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "seed_all",
    )
    torch.cuda.__dict__.update(
        random,
        _initialized=True,
        Stream=Stream,
        Event=Stream,
        stream=_inside,
        device=_inside,
        default_generators=(generator,),
        **{name: _always(value) for name, value in fixed.items()},
        **{name: _always(None) for name in silent},
        **{name: functools.partial(_tensor, kind) for name, kind in TYPES.items()},
    )
    torch.cuda.random.__dict__.update(random)
    torch.accelerator.__dict__.update(
        current_stream=_always(stream),
        current_device_index=_always(0),
        is_available=_always(True),
        device_count=_always(1),
        synchronize=_always(None),
    )


def _always(value: Any) -> Any:
    """A function of its own for each name: torch's compiler refuses one under two."""
    return lambda *_, **__: value


@contextlib.contextmanager
def _inside(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _tensor(kind: torch.dtype, *args: Any) -> torch.Tensor:
    """torch.cuda.FloatTensor and its like: of values, or of a size."""
    is_of_values = bool(args) and not isinstance(args[0], int)
    return (torch.tensor if is_of_values else torch.empty)(*args, dtype=kind, device="cuda")


def _replace_nccl() -> None:
    for name in ("init_process_group", "new_group"):
        of_gloo = _over_gloo(getattr(dist, name))
        setattr(dist, name, of_gloo)
        setattr(dist.distributed_c10d, name, of_gloo)
    dist.all_gather = _gathering_uneven_lists(dist.all_gather)
    dist.reduce_scatter = _scattering_uneven_lists(dist.reduce_scatter)


def _gathering_uneven_lists(all_gather: Any) -> Any:
    """NCCL gathers tensors of different sizes by broadcasts (ProcessGroupNCCL::allgather); gloo refuses them."""

    @functools.wraps(all_gather)
    def gathered(
        parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.shape for part in parts}) == 1:
            return all_gather(parts, own, group=group, async_op=async_op)
        parts[dist.get_rank(group)].copy_(own)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group_src=rank, group=group)
        return None

    return gathered


def _scattering_uneven_lists(reduce_scatter: Any) -> Any:
    """NCCL reduces tensors of different sizes one by one (ProcessGroupNCCL::reduce_scatter); gloo refuses them."""

    @functools.wraps(reduce_scatter)
    def scattered(
        own: torch.Tensor, parts: list[torch.Tensor], *args: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        if len({part.shape for part in parts}) == 1:
            return reduce_scatter(own, parts, *args, group=group, **kwargs)
        for rank, part in enumerate(parts):
            total = part.clone()
            dist.all_reduce(total, group=group)
            if rank == dist.get_rank(group):
                own.copy_(total)
        return None

    return scattered


def _over_gloo(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return make(*("gloo" if arg == "nccl" else arg for arg in args), **kwargs)

    return made


def _keeping_attributes(to: Any) -> Any:
    """On a real GPU a module's parameters stay the same objects when they move, with their attributes."""

    @functools.wraps(to)
    def moved(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        before = {name: vars(param).copy() for name, param in self.named_parameters()}
        result = to(self, *args, **kwargs)
        for name, param in self.named_parameters():
            vars(param).update(
                {key: value for key, value in before[name].items() if key not in vars(param)}
            )
        return result

    return moved
