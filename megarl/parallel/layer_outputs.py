"""Recording what each operation of a rank's layers gives for one packed row, by hooks on Megatron's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megarl.model.shape import ModelShape
from megarl.numerics import operations
from megarl.numerics.parts import OutputPart, Terms
from megarl.parallel.packing import PackedRow
from megarl.parallel.routing import Router, Routing
from megarl.placement.train_layout import RankCoords, TrainLayout
from megarl.types import IntArray


class LayerRecorder:
    """Records the outputs of a rank's chunks while `recording`, of the row `row` alone.

    Tokens are numbered through the row's sequences, without padding. A norm that TransformerEngine computes inside the
    next layer is left out. num_terms: in which sums over TP are recorded, a multiple of tp; they are left out where
    there are adapters (has_adapters), which add to each.
    """

    def __init__(
        self,
        row: PackedRow,
        routing: Routing,
        shape: ModelShape,
        layout: TrainLayout,
        at: RankCoords,
        *,
        num_terms: int,
        has_adapters: bool,
    ) -> None:
        self.parts: list[OutputPart] = []
        self._row = row
        self._routing = routing
        self._shape = shape
        self._layout = layout
        self._at = at
        self._num_terms = 1 if has_adapters else num_terms
        self._numbers_L = token_numbers(row)[row.places]
        self._handles: list[Any] = []

    @contextmanager
    def recording(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Record the passes inside the block. chunks: those of the rank, without wrappers."""
        try:
            for chunk in chunks:
                self._watch_chunk(chunk)
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def add_logprobs(self, logp_T: Tensor) -> None:
        """Those of a row's tokens, each at the place of the token before it; what each sequence ends with has none."""
        numbers_T = token_numbers(self._row)
        for start, length in zip(self._row.starts, self._row.lengths, strict=True):
            numbers_T[start + length - 1] = -1
        self._append(
            operations.AFTER_LAYERS, operations.LOGPROBS, numbers_T, logp_T[:, None], 0, None
        )

    def _watch_chunk(self, chunk: Any) -> None:
        if chunk.pre_process:
            self._after(chunk.embedding, operations.BEFORE_LAYERS, operations.EMBEDDING)
        for layer in chunk.decoder.layers:
            self._watch_layer(layer, layer.layer_number - 1)
        if norm := getattr(chunk.decoder, "final_layernorm", None):
            self._after(norm, operations.AFTER_LAYERS, operations.FINAL_NORM)

    def _watch_layer(self, layer: Any, number: int) -> None:
        attention = layer.self_attention
        self._after(layer.input_layernorm, number, operations.INPUT_NORM)
        self._watch_attention(attention, number)
        self._before(layer.pre_mlp_layernorm, number, operations.RESIDUAL)
        self._after(layer.pre_mlp_layernorm, number, operations.MLP_NORM)
        mlp = layer.mlp
        if router := getattr(mlp, "router", None):
            self._hook(router, partial(self._see_router, number))
            if shared := getattr(mlp, "shared_experts", None):
                self._watch_row_parallel(shared.linear_fc2, number, operations.SHARED_EXPERTS)
            self._after(mlp, number, operations.EXPERTS)
        else:
            self._watch_row_parallel(mlp.linear_fc2, number, operations.MLP)
        self._after(layer, number, operations.LAYER)

    def _watch_attention(self, attention: Any, number: int) -> None:
        if self._shape.mla:
            self._after(getattr(attention, "q_layernorm", None), number, operations.QUERY_LATENT)
            self._after(attention.kv_layernorm, number, operations.KEY_VALUE_LATENT)
            for name in ("linear_q_up_proj", "linear_q_proj"):
                linear = getattr(attention, name, None)
                self._after(linear, number, operations.QUERY_PROJECTION, is_split=True)
        else:
            self._hook(attention.core_attention, partial(self._see_heads, number))
        self._before(attention.linear_proj, number, operations.HEADS, is_split=True)
        self._watch_row_parallel(attention.linear_proj, number, operations.ATTENTION)

    def _watch_row_parallel(self, linear: Any, number: int, operation: str) -> None:
        self._after(linear, number, operation)
        if self._num_terms > 1:
            self._hook(linear, partial(self._see_terms, number, operation))

    def _after(self, module: Any, layer: int, operation: str, *, is_split: bool = False) -> None:
        """Record a module's output. is_split: over TP, by features."""
        if module is None or isinstance(module, IdentityOp):
            return

        def see(_: Any, inputs: Any, output: Any) -> None:
            self._see(layer, operation, first_tensor(output), is_split=is_split)

        self._hook(module, see)

    def _before(self, module: Any, layer: int, operation: str, *, is_split: bool = False) -> None:
        """Record a module's input."""

        def see(_: Any, inputs: Any, output: Any) -> None:
            self._see(layer, operation, first_tensor(inputs), is_split=is_split)

        self._hook(module, see)

    def _hook(self, module: Any, see: Callable[[Any, Any, Any], None]) -> None:
        def at_row(module: Any, inputs: Any, output: Any) -> None:
            if self._routing.row is self._row:
                see(module, inputs, output)

        self._handles.append(module.register_forward_hook(at_row))

    def _see_heads(self, number: int, _: Any, inputs: Any, output: Any) -> None:
        query, key, value = inputs[:3]
        self._see(number, operations.QUERY, query, is_split=True)
        # of several TP ranks with one head of keys each has it all
        first_head = self._at.tp * self._shape.num_kv_heads // self._layout.tp
        for operation, values in ((operations.KEY, key), (operations.VALUE, value)):
            self._see(number, operation, values, first_head * values.shape[-1])

    def _see_terms(self, number: int, operation: str, linear: Any, inputs: Any, _: Any) -> None:
        own_terms = self._num_terms // self._layout.tp
        if linear.weight.shape[1] % own_terms:
            return
        inputs_of_terms = inputs[0].chunk(own_terms, dim=-1)
        weights = linear.weight.chunk(own_terms, dim=1)
        first = self._at.tp * own_terms
        for place, (values, weight) in enumerate(zip(inputs_of_terms, weights, strict=True), first):
            terms = place, place + 1, self._num_terms
            self._see(number, operation, F.linear(values, weight), terms=terms)

    def _see_router(self, number: int, router: Router, inputs: Any, output: Any) -> None:
        logits_NE, own_NE = router.own_choice(inputs[0])
        scores_NE = router.choice_scores(logits_NE)
        weights_NE = output[0].flatten(0, -2).float()
        weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True).clamp_min(1e-20)
        self._see(number, operations.ROUTER_LOGITS, logits_NE)
        self._see(number, operations.ROUTER_CHOICES, own_NE)
        self._see(number, operations.ROUTER_WEIGHTS, weights_NE)
        self._see(number, operations.ROUTER_SCORES, scores_NE)
        if num_groups := router.config.moe_router_num_groups:
            best = scores_NE.unflatten(-1, (num_groups, -1)).topk(2, dim=-1).values
            self._see(number, operations.ROUTER_GROUPS, best.sum(-1))

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
        rows = values.shape[0]
        if rows == len(self._numbers_L):
            numbers_N = self._numbers_L
        elif rows * self._layout.tp == len(self._numbers_L):  # sequence parallelism
            numbers_N = self._numbers_L[self._at.tp * rows : (self._at.tp + 1) * rows]
        else:
            return
        values_NF = values.reshape(rows, -1)
        if is_split:
            first_feature = self._at.tp * values_NF.shape[1]
        self._append(layer, operation, numbers_N, values_NF, first_feature, terms)

    def _append(
        self,
        layer: int,
        operation: str,
        numbers_N: IntArray,
        values_NF: Tensor,
        first_feature: int,
        terms: Terms | None,
    ) -> None:
        is_token_N = numbers_N >= 0
        values = values_NF.detach().float().cpu().numpy()[is_token_N]
        part = OutputPart(
            layer=layer,
            operation=operation,
            rank=self._at.rank,
            tokens_N=numbers_N[is_token_N],
            values_NF=values,
            first_feature=first_feature,
            terms=terms,
        )
        self.parts.append(part)


def token_numbers(row: PackedRow) -> IntArray:
    """[T]: the number of each token of a row through its sequences, -1 for padding."""
    numbers_T = np.full(len(row.order_T), -1, np.int64)
    done = 0
    for start, length in zip(row.starts, row.lengths, strict=True):
        numbers_T[start : start + length] = np.arange(done, done + length)
        done += length
    return numbers_T


def first_tensor(values: Any) -> Tensor:
    """A module's output, or its first argument, without what comes with it."""
    return values if isinstance(values, torch.Tensor) else values[0]
