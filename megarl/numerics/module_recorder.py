"""Recording what modules give as parts of outputs, by forward hooks: what the recorders of both sides share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.numerics.parts import OutputPart, Terms
from megarl.types import IntArray


class ModuleRecorder(ABC):
    """Collects in `parts` what the hooked modules of one rank give, in the passes that are to be recorded.

    rank: of the process on its side. split: which part (number, count) of features the rank has, where they are split.
    A subclass places the hooks with `_hook` and `_after`; `remove_hooks` ends the recording.
    """

    def __init__(self, rank: int, split: tuple[int, int]) -> None:
        self.parts: list[OutputPart] = []
        self._rank = rank
        self._split_number, self._split_count = split
        self._handles: list[Any] = []

    @abstractmethod
    def _is_recorded(self) -> bool:
        """Whether the pass that now runs is to be recorded."""

    @abstractmethod
    def _token_numbers(self, num_rows: int) -> IntArray | None:
        """[num_rows]: the tokens of an output's rows, -1 for padding; None where they are not known."""

    def remove_hooks(self) -> None:
        """Nothing is recorded from now on."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: Any, see: Callable[[Any, Any, Any], None]) -> None:
        """Call see(module, inputs, output) after each of its forward passes that is recorded."""

        def in_pass(module: Any, inputs: Any, output: Any) -> None:
            if self._is_recorded():
                see(module, inputs, output)

        self._handles.append(module.register_forward_hook(in_pass))

    def _after(self, module: Any, layer: int, operation: str, *, is_split: bool = False) -> None:
        """Record a module's output. is_split: by features."""

        def see(_: Any, inputs: Any, output: Any) -> None:
            self._see(layer, operation, first_tensor(output), is_split=is_split)

        self._hook(module, see)

    def _see(
        self,
        layer: int,
        operation: str,
        values: Tensor,
        first_feature: int = 0,
        *,
        is_split: bool = False,
        terms: Terms | None = None,
    ) -> None:
        """Record values [N, ...] of a pass; first_feature: of the first, where `is_split` does not tell."""
        numbers_N = self._token_numbers(len(values))
        if numbers_N is None:
            return
        values_NF = values.reshape(len(values), -1)
        if is_split:
            first_feature = self._split_number * values_NF.shape[1]
        self._append(layer, operation, numbers_N, values_NF, first_feature, terms)

    def _see_terms(
        self,
        layer: int,
        operation: str,
        values: Tensor,
        weight: Tensor,
        *,
        tp_rank: int,
        num_own: int,
        num_terms: int,
    ) -> None:
        """Record the `num_own` of `num_terms` terms that this rank adds to the sum of a row-parallel layer.

        values, weight: its parts of the layer's input and weight. tp_rank: its number among the ranks that sum.
        """
        pieces = zip(values.chunk(num_own, dim=-1), weight.chunk(num_own, dim=1), strict=True)
        for place, (piece, columns) in enumerate(pieces, tp_rank * num_own):
            terms = place, place + 1, num_terms
            self._see(layer, operation, F.linear(piece, columns), terms=terms)

    def _append(
        self,
        layer: int,
        operation: str,
        numbers_N: IntArray,
        values_NF: Tensor,
        first_feature: int = 0,
        terms: Terms | None = None,
    ) -> None:
        is_token_N = numbers_N >= 0
        # the index copies, which it must: SGLang writes into its residuals
        values = values_NF.detach().float().cpu().numpy()[is_token_N]
        part = OutputPart(
            layer=layer,
            operation=operation,
            rank=self._rank,
            tokens_N=numbers_N[is_token_N],
            values_NF=values,
            first_feature=first_feature,
            terms=terms,
        )
        self.parts.append(part)


def first_tensor(values: Any) -> Tensor:
    """A module's output, or its first argument, without what comes with it."""
    return values if isinstance(values, torch.Tensor) else values[0]
