"""Recording what each operation of a rank's layers gives for one packed row, by hooks on Megatron's modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megarl.model.shape import ModelShape
from megarl.numerics import operations
from megarl.numerics.module_recorder import ModuleRecorder, first_tensor
from megarl.parallel.packing import PackedRow
from megarl.parallel.routing import Router, Routing
from megarl.placement.train_layout import RankCoords, TrainLayout
from megarl.types import IntArray


class LayerRecorder(ModuleRecorder):
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
        super().__init__(at.rank, (at.tp, layout.tp))
        self._row = row
        self._routing = routing
        self._shape = shape
        self._layout = layout
        self._at = at
        self._num_terms = 1 if has_adapters else num_terms
        self._numbers_L = token_numbers(row)[row.places]

    @contextmanager
    def recording(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Record the passes inside the block. chunks: those of the rank, without wrappers."""
        try:
            for chunk in chunks:
                self._watch_chunk(chunk)
            yield
        finally:
            self.remove_hooks()

    def add_logprobs(self, logp_T: Tensor) -> None:
        """Those of a row's tokens, each at the place of the token before it; what each sequence ends with has none."""
        numbers_T = token_numbers(self._row)
        for start, length in zip(self._row.starts, self._row.lengths, strict=True):
            numbers_T[start + length - 1] = -1
        self._append(operations.AFTER_LAYERS, operations.LOGPROBS, numbers_T, logp_T[:, None])

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
        if self._shape.is_linear(number):
            # not its heads: their norm makes rounding as large as the values where these are small
            self._watch_row_parallel(attention.out_proj, number, operations.ATTENTION)
            return
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
            self._hook(linear, partial(self._see_row_parallel, number, operation))

    def _after(self, module: Any, layer: int, operation: str, *, is_split: bool = False) -> None:
        if module is not None and not isinstance(module, IdentityOp):
            super()._after(module, layer, operation, is_split=is_split)

    def _before(self, module: Any, layer: int, operation: str, *, is_split: bool = False) -> None:
        """Record a module's input."""

        def see(_: Any, inputs: Any, output: Any) -> None:
            self._see(layer, operation, first_tensor(inputs), is_split=is_split)

        self._hook(module, see)

    def _see_heads(self, number: int, _: Any, inputs: Any, output: Any) -> None:
        query, key, value = inputs[:3]
        self._see(number, operations.QUERY, query, is_split=True)
        # of several TP ranks with one head of keys each has it all
        first_head = self._at.tp * self._shape.num_kv_heads // self._layout.tp
        for operation, values in ((operations.KEY, key), (operations.VALUE, value)):
            self._see(number, operation, values, first_head * values.shape[-1])

    def _see_row_parallel(
        self, number: int, operation: str, linear: Any, inputs: Any, _: Any
    ) -> None:
        num_own = self._num_terms // self._layout.tp
        if linear.weight.shape[1] % num_own == 0:
            self._see_terms(
                number,
                operation,
                inputs[0],
                linear.weight,
                tp_rank=self._at.tp,
                num_own=num_own,
                num_terms=self._num_terms,
            )

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

    def _is_recorded(self) -> bool:
        return self._routing.row is self._row

    def _token_numbers(self, num_rows: int) -> IntArray | None:
        if num_rows == len(self._numbers_L):
            return self._numbers_L
        if num_rows * self._layout.tp == len(self._numbers_L):  # sequence parallelism
            return self._numbers_L[self._at.tp * num_rows : (self._at.tp + 1) * num_rows]
        return None


def token_numbers(row: PackedRow) -> IntArray:
    """[T]: the number of each token of a row through its sequences, -1 for padding."""
    numbers_T = np.full(len(row.order_T), -1, np.int64)
    done = 0
    for start, length in zip(row.starts, row.lengths, strict=True):
        numbers_T[start : start + length] = np.arange(done, done + length)
        done += length
    return numbers_T
