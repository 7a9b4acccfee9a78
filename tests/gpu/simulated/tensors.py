"""Tensors that say they are on cuda:0, refuse to be mixed with CPU tensors as CUDA's do, and compute on the CPU.

A SimulatedTensor shares its memory with an ordinary CPU tensor (`plain`). `Placing` is active in every thread: it sends
factories with device="cuda", moves between devices, and questions about a tensor's device here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
MAY_MIX = (  # CUDA's own operators take tensors of both devices here
    "aten::copy_", "aten::_to_copy", "aten::set_", "aten::index", "aten::_index_put", "aten::index_put",
    "aten::_unsafe_index", "aten::_foreach_copy", "aten::_foreach_add_.Tensor", "aten::_has_compatible",
    "aten::is_same_size", "c10d::",
)  # fmt: skip
_pinned: dict[int, StorageWeakRef] = {}


def is_cuda(device: Any) -> bool:
    """Whether a value of the argument `device` names a GPU; a plain number does."""
    if isinstance(device, bool) or device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


def plain(value: Any) -> Any:
    """A simulated tensor's memory as an ordinary CPU tensor; anything else as it is."""
    if not isinstance(value, SimulatedTensor):
        return value
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        same = torch.empty(0, dtype=value.dtype)
        return same.set_(
            value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )


def simulated(value: Any, requires_grad: bool = False) -> Any:
    """A CPU tensor's memory as a simulated tensor; anything else as it is."""
    if isinstance(value, SimulatedTensor) or not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        return Tensor._make_subclass(SimulatedTensor, value.detach(), requires_grad)


class SimulatedTensor(Tensor):
    """A tensor on cuda:0, for all that Python can ask."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return place(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        _refuse_mixture(name, args, kwargs)
        if name == "aten::copy_" and not isinstance(args[0], SimulatedTensor):
            func(args[0], *tree_map(plain, args[1:]), **tree_map(plain, kwargs))
            return args[0]
        result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        written = _written(func._schema, args, kwargs)
        if written is not None:
            return _resized(written, result)
        return result if name == "aten::_local_scalar_dense" else tree_map(simulated, result)


def _refuse_mixture(name: str, args: Any, kwargs: Any) -> None:
    """Raise as CUDA does; in a backward pass autograd itself adds numbers of the CPU."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    are_mixed = any(not isinstance(tensor, SimulatedTensor) and tensor.dim() for tensor in tensors)
    is_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
    if are_mixed and not is_backward and not name.startswith(MAY_MIX):
        sizes = [(_device(tensor).type, tuple(tensor.shape)) for tensor in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {sizes}")


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimulatedTensor | None:
    """The simulated tensor that an operator writes and returns, if that is what it does."""
    if (
        len(schema.returns) != 1
        or not (alias := schema.returns[0].alias_info)
        or not alias.is_write
    ):
        return None
    for number, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info and info.is_write and info.before_set & alias.before_set:
            value = args[number] if number < len(args) else kwargs[argument.name]
            return value if isinstance(value, SimulatedTensor) else None
    return None


def _resized(written: SimulatedTensor, result: Any) -> SimulatedTensor:
    """The tensor itself, with the size that an operator such as `set_` or `resize_` gave its memory."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        if isinstance(result, Tensor) and result.size() != written.size():
            written.set_(
                result.untyped_storage(), result.storage_offset(), result.size(), result.stride()
            )
    return written


class Placing(TorchFunctionMode):
    """Every call of torch goes by `place`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return place(func, args, kwargs or {})


def raw(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call as torch itself does it; operators still come by `__torch_dispatch__`."""
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        return func(*args, **kwargs)


def place(func: Any, args: Any, kwargs: Any) -> Any:
    """A call of torch on the device that it names, or on that of its tensors."""
    if func in ANSWERS:
        return ANSWERS[func](*args, **kwargs)
    if is_cuda(kwargs.get("device")):
        return _made_on_gpu(func, args, kwargs)
    if kwargs.get("device") is not None and any(isinstance(arg, SimulatedTensor) for arg in args):
        args = tree_map(plain, args)  # as in zeros_like(simulated, device="cpu")
    if kwargs.get("pin_memory"):
        return _pin(raw(func, *args, **{**kwargs, "pin_memory": False}))
    return raw(func, *args, **kwargs)


def _made_on_gpu(func: Any, args: Any, kwargs: Any) -> Any:
    options = {
        key: plain(value)
        for key, value in kwargs.items()
        if key not in ("pin_memory", "requires_grad")
    }
    tensor = raw(func, *tree_map(plain, args), **{**options, "device": torch.device("cpu")})
    if func in (torch.as_tensor, torch.asarray):
        tensor = tensor.clone()  # the memory of a CPU tensor is not the GPU's
    return simulated(tensor, kwargs.get("requires_grad", False))


def _pin(tensor: Tensor) -> Tensor:
    storage = raw(Tensor.untyped_storage, tensor)
    # which keeps the address from being used again
    _pinned[storage._cdata] = StorageWeakRef(storage)
    return tensor


class _Move(torch.autograd.Function):
    """A copy on the other device, whose gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_gpu: bool) -> Tensor:
        copy = plain(tensor.detach()).clone()
        return simulated(copy) if to_gpu else copy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        copy = plain(gradients[0]).clone()
        was_on_gpu = not isinstance(gradients[0], SimulatedTensor)
        return (simulated(copy) if was_on_gpu else copy), None


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to in all its forms; the memory's format and non_blocking make no difference here."""
    kind, where = kwargs.get("dtype"), kwargs.get("device")
    for arg in args:
        if isinstance(arg, Tensor):
            kind, where = arg.dtype, arg.device
        elif isinstance(arg, torch.dtype):
            kind = arg
        elif isinstance(arg, str | torch.device | int) and not isinstance(arg, bool):
            where = arg
    is_copy = kwargs.get("copy", False)
    if where is not None and not is_cuda(where) and torch.device(where).type == "meta":
        return raw(Tensor.to, plain(tensor), device="meta", dtype=kind or plain(tensor).dtype)
    if where is not None and is_cuda(where) != isinstance(tensor, SimulatedTensor):
        tensor, is_copy = raw(_Move.apply, tensor, is_cuda(where)), False
    if kind is not None and kind != raw(Tensor.dtype.__get__, tensor):  # type: ignore[attr-defined]
        return raw(Tensor.to, tensor, kind)
    return raw(Tensor.clone, tensor) if is_copy else tensor


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return raw(Tensor.type, tensor, *args, **kwargs)
    name = raw(Tensor.type, plain(tensor))
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(tensor, SimulatedTensor) else name


def _device(tensor: Tensor) -> torch.device:
    return CUDA if isinstance(tensor, SimulatedTensor) else raw(Tensor.device.__get__, tensor)  # type: ignore[attr-defined]


def _is_pinned(tensor: Tensor, *_: Any) -> bool:
    if isinstance(tensor, SimulatedTensor):
        return False
    ref = _pinned.get(raw(Tensor.untyped_storage, tensor)._cdata)
    return ref is not None and not ref.expired()


def _pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    if isinstance(tensor, SimulatedTensor):
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    return _pin(raw(Tensor.clone, tensor))


def _numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, SimulatedTensor):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    return raw(Tensor.numpy, tensor, *args, **kwargs)


def _array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    _numpy(tensor.detach())  # which refuses a GPU's
    return raw(Tensor.__array__, tensor, *args, **kwargs)


def _on_plain(func: Any) -> Any:
    return lambda tensor, *args, **kwargs: raw(func, plain(tensor.detach()), *args, **kwargs)


def _made_device(*args: Any, **kwargs: Any) -> torch.device:
    is_number = len(args) == 1 and isinstance(args[0], int) and not kwargs
    return CUDA if is_number else raw(torch.device, *args, **kwargs)


def _has_compatible_type(one: Tensor, other: Tensor) -> bool:
    return isinstance(one, SimulatedTensor) == isinstance(other, SimulatedTensor)


_OF_DEVICE: Any = Tensor.device, Tensor.is_cuda, Tensor.is_cpu
ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.device: _made_device,
    _OF_DEVICE[0].__get__: _device,
    _OF_DEVICE[1].__get__: lambda tensor: isinstance(tensor, SimulatedTensor),
    _OF_DEVICE[2].__get__: lambda tensor: (
        not isinstance(tensor, SimulatedTensor) and _device(tensor).type == "cpu"
    ),
    Tensor.get_device: lambda tensor: 0 if isinstance(tensor, SimulatedTensor) else -1,
    Tensor.is_pinned: _is_pinned,
    Tensor.pin_memory: _pin_memory,
    Tensor.tolist: _on_plain(Tensor.tolist),
    Tensor.item: _on_plain(Tensor.item),
    Tensor.__repr__: _on_plain(Tensor.__repr__),
    Tensor.__format__: _on_plain(Tensor.__format__),
    Tensor.numpy: _numpy,
    Tensor.__array__: _array,
    Tensor.type: _type,
    Tensor.to: _to,
    Tensor.cpu: lambda tensor, *_, **__: _to(tensor, "cpu"),
    Tensor.cuda: lambda tensor, *_, **__: _to(tensor, "cuda"),
    vars(torch)["_has_compatible_shallow_copy_type"]: _has_compatible_type,
}
