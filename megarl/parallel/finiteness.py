"""Where numbers first were not finite: found before the ranks' gradients are added up, after which all are alike.

NaN and infinity show in sums, which are kept on the device, so that nothing waits for them before the update ends. One
pass over numbers that were just computed costs little beside computing them. Sums overflow only of numbers from which
nothing can be learnt: gradients above 1e19, as in the norm of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.parallel.param_names import named_parameters
from megarl.types.tensors import ModelChunks

# Classes of places in the order in which a fault passes them. A place is a class and what is first in it.
_WEIGHTS, _FORWARD, _LOSS, _GRADIENT, _NOWHERE = (number << 48 for number in range(5))
_MOST_STAGES = 1 << 16
_MOST_PARAMS = 1 << 24
# in the forward pass of a stage: the input of each layer with experts, what the experts return; in the end the output
_STAGE_OUTPUT = (1 << 16) - 1


class Finiteness:
    """The numbers of one rank from one `reset` to the next, in all of its passes.

    A place is a whole number that orders faults over all ranks: the smaller one was earlier. In a forward pass a fault
    goes from layer to layer, to the ranks of experts and back at each of them, and from a pipeline stage to the next;
    in a backward pass from the last layers to the first. Tensor-parallel ranks, which add up parts of a layer, and
    context-parallel ranks may have the same place.
    """

    def __init__(self, chunks: ModelChunks, stages: Sequence[int]) -> None:
        """chunks: without DDP. stages: of each, its number among all virtual pipeline stages."""
        self._chunks = chunks
        self._stages = {id(chunk): stage for chunk, stage in zip(chunks, stages, strict=True)}
        self._sums: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # of the gradient of each parameter, by its id
        self._names: dict[int, str] = {}  # of each parameter, by its place in `named_parameters`
        # of a bucket group's gradients: their places, and their norms
        self._gradients: list[tuple[list[int], Tensor]] = []
        stage_of = {
            id(param): self._stages[id(chunk)] for chunk in chunks for param in chunk.parameters()
        }
        for index, (name, param) in enumerate(named_parameters(chunks)):
            backward = (_MOST_STAGES - stage_of[id(param)]) * _MOST_PARAMS - index
            self._places[id(param)] = _GRADIENT + backward
            self._names[index] = name
        for chunk in chunks:
            self._watch_experts(chunk)

    def watch_gradients(self, wrapped: Sequence[Any]) -> None:
        """Look at the gradients of Megatron's DDP chunks each time before they are added to those of other ranks.

        Megatron's own check (check_for_nan_in_grad) waits for each bucket, and ends this rank's process alone.
        """
        for chunk in wrapped:
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                group.start_grad_sync = partial(self._seen, group, group.start_grad_sync)

    def see_output(self, chunk: torch.nn.Module, output: Tensor) -> None:
        """The output of a model chunk for a micro-batch."""
        self._see(self._forward(chunk, _STAGE_OUTPUT), output)

    def see_loss(self, loss: Tensor) -> None:
        self._see(_LOSS, loss)

    @torch.no_grad()
    def all_finite(self) -> Tensor:
        """1 if everything was finite, else 0; int64 [1] on the device."""
        totals = [total.reshape(1) for total in self._sums.values()]
        totals += [norms for _, norms in self._gradients]
        if not totals:
            return torch.ones(1, dtype=torch.int64)
        return torch.cat(totals).isfinite().all().long().reshape(1)

    def first(self) -> tuple[int, str]:
        """The first place that was not finite, and a predicate about it; later than any other's if all were.

        Also looks at the weights, which nothing has changed since they were computed with.
        """
        for index, (name, param) in enumerate(named_parameters(self._chunks)):
            if not bool(param.detach().isfinite().all()):
                return _WEIGHTS + index, f"held weights that are not finite ({name})"
        places = [place for place, total in self._sums.items() if not math.isfinite(total)]
        for gradient_places, norms in self._gradients:
            finite = norms.isfinite().tolist()
            places += [
                place for place, good in zip(gradient_places, finite, strict=True) if not good
            ]
        if not places:
            return _NOWHERE, ""
        return min(places), self._predicate(min(places))

    def reset(self) -> None:
        """Forget everything, after an update."""
        self._sums.clear()
        self._gradients.clear()

    def _predicate(self, place: int) -> str:
        if place >= _GRADIENT:
            name = self._names[-(place - _GRADIENT) % _MOST_PARAMS]
            return f"computed a gradient that is not finite ({name})"
        if place >= _LOSS:
            return "computed a loss that is not finite"
        (stage, layer) = divmod(place - _FORWARD, _STAGE_OUTPUT + 1)
        if layer == _STAGE_OUTPUT:
            what = "an output"
        elif layer % 2:
            what = "an output of experts"
        else:
            what = "an input of experts"
        return f"computed {what} that is not finite in pipeline stage {stage}"

    def _forward(self, chunk: torch.nn.Module, layer: int) -> int:
        return _FORWARD + self._stages[id(chunk)] * (_STAGE_OUTPUT + 1) + layer

    def _watch_experts(self, chunk: torch.nn.Module) -> None:
        """Look at what layers with experts get, before it goes to the experts' ranks, and at what experts return.

        Their routers get the same, which also run where Megatron calls a layer's parts and not the layer.
        """
        layers = [module for module in chunk.modules() if hasattr(module, "experts")]
        for number, layer in enumerate(layers):
            at_input = self._forward(chunk, 2 * number)
            router: Any = layer.router
            router.register_forward_pre_hook(partial(self._see_input, at_input))
            experts: Any = layer.experts
            experts.register_forward_hook(partial(self._see_first, at_input + 1))

    def _see_input(self, place: int, _: Any, inputs: tuple[Tensor, ...]) -> None:
        if inputs:
            self._see(place, inputs[0])

    def _see_first(self, place: int, _: Any, __: Any, outputs: tuple[Tensor, ...]) -> None:
        self._see(place, outputs[0])

    @torch.no_grad()
    def _see(self, place: int, values: Tensor) -> None:
        total = values.detach().sum(dtype=torch.float32)
        before = self._sums.get(place)
        self._sums[place] = total if before is None else before + total

    def _seen(self, group: Any, start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Megatron's start_grad_sync, after a look at the gradients unless they are on their way already."""
        if group.grad_reduce_handle is None:
            self._see_gradients(group)
        start(*args, **kwargs)

    @torch.no_grad()
    def _see_gradients(self, group: Any) -> None:
        params = [param for bucket in group.buckets for param in bucket.params_list]
        gradients = [param.main_grad for param in params]
        norms = torch._foreach_norm(gradients)  # type: ignore[attr-defined]
        places = [self._places[id(param)] for param in params]
        self._gradients.append((places, torch.stack(norms)))
