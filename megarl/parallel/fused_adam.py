"""TransformerEngine's FusedAdam in plain torch, for ranks on a CPU, and the masters that it splits in two halves.

Megatron's distributed optimizer and the checkpoints see the same constructor, methods and types of state as on a GPU,
as read in TransformerEngine 2.14: `pytorch/optimizers/fused_adam.py` and `common/multi_tensor/adam.cu`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_LOWEST = -(2**15)
_HIGHEST = 2**15 - 1


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 masters of bfloat16 weights and their 16-bit remainders: the weight's bits above, plus the remainder.

    A master in the upper half between two weights belongs to the upper one, with a remainder below 0.
    """
    return (_upper(weight) + remainder.int()).view(torch.float32)


def remainders(master: Tensor, weight: Tensor) -> Tensor:
    """The int16 remainders with which `weight` gives `master`.

    Exact but where a weight was rounded down from the middle between two (to the nearest even number, as other
    optimizers do), which has no remainder: there the master that follows is its neighbour in float32.
    """
    difference = master.contiguous().view(torch.int32) - _upper(weight)
    return difference.clamp(_LOWEST, _HIGHEST).to(torch.int16)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 weights, remainders): rounded to the nearest weight, from the middle away from 0. Both are exact."""
    bits = master.contiguous().view(torch.int32)
    remainder = (((bits + 2**15) & 0xFFFF) - 2**15).to(torch.int16)
    weight = (bits - remainder.int()).view(torch.float32).bfloat16()
    return weight, remainder


def keeps_remainders(inner: Any, param: Tensor) -> bool:
    """Whether a FusedAdam, this one or TransformerEngine's, has remainders in place of the parameter's masters."""
    return bool(inner.store_param_remainders) and param.dtype is torch.bfloat16


def _upper(weight: Tensor) -> Tensor:
    return weight.detach().float().view(torch.int32)


class FusedAdam(torch.optim.Optimizer):
    """AdamW on flat parameters, with masters of its own and with moments in float32 or bfloat16.

    All arithmetic is in float32; a moment is rounded to its type after each step. Megatron makes it, and owns it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool,
        master_weights: bool,
        master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        use_decoupled_grad: bool,
        store_param_remainders: bool,
    ) -> None:
        assert master_weights and use_decoupled_grad and master_weight_dtype is torch.float32
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.store_param_remainders = store_param_remainders
        self._decouples_decay = adam_w_mode
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Moments of 0, and masters that are the weights."""
        state: dict[str, Tensor] = {
            name: torch.zeros_like(param, dtype=dtype) for name, dtype in self._dtypes.items()
        }
        if store_param_remainders:
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        else:
            state["master_param"] = param.detach().clone().float()
        self.state[param] = state

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """In float32, or int16 where masters have remainders alone."""
        held = self.state[param][state_name]
        if held.dtype is torch.bfloat16:
            return held.float()
        return held

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """The opposite."""
        self.state[param][state_name].copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step with each parameter's `decoupled_grad`; parameters without one stay as they are."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, keeps_remainders(self, param))
                if getattr(param, "decoupled_grad", None) is not None:
                    self._step_param(param, group)

    def _step_param(self, param: Any, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        mean, square = (self.get_unscaled_state(param, name) for name in self._dtypes)
        has_remainders = keeps_remainders(self, param)
        if has_remainders:
            master = joined(param, state["master_param"])
        else:
            master = state["master_param"]
        gradient = param.decoupled_grad.float()
        decay = group["weight_decay"]
        if not self._decouples_decay:
            gradient = gradient + decay * master
        beta1, beta2 = group["betas"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1 ** group["step"])).div_(root)
        if self._decouples_decay:
            update.add_(master, alpha=decay)
        master.sub_(update, alpha=group["lr"])
        self.set_scaled_state(param, "exp_avg", mean)
        self.set_scaled_state(param, "exp_avg_sq", square)
        if has_remainders:
            weight, remainder = split(master)
            param.copy_(weight)
            state["master_param"].copy_(remainder)
        else:
            param.copy_(master)
