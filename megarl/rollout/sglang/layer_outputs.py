"""Recording what each operation of an engine's layers gives, by hooks on SGLang's modules in a scheduler process.

The engine is asked for one sequence after another, whose request is named by `request_name`, so that each token's
number is known. What a rank has of other tokens than its own (of experts under DP attention) is left out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.numerics import operations
from megarl.numerics.module_recorder import ModuleRecorder, first_tensor
from megarl.numerics.parts import ENGINE, output_file, write_parts
from megarl.resharding.engine_model import language_model
from megarl.types import IntArray

_PREFIX = "compare-layers-"


def request_name(first_token: int) -> str:
    """Of the sequence whose first token has this number in the micro-batch."""
    return f"{_PREFIX}{first_token}"


def _first_of(module: Any, names: tuple[str, ...]) -> Any:
    """The part of a module that has one of these names, which SGLang's classes give it; None: it has none."""
    parts = (getattr(module, name, None) for name in names)
    return next((part for part in parts if part is not None), None)


class EngineLayerRecorder(ModuleRecorder):
    """Records the prefills of a model from its making until `finish`.

    rank: the tensor-parallel one of the process. num_terms: in which the sums over ranks are recorded, where the
    weights are not quantised; otherwise it is a term of each rank.
    """

    def __init__(self, model: Any, rank: int, num_terms: int) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        super().__init__(rank, (int(parallel.attn_tp_rank), int(parallel.attn_tp_size)))
        self._num_terms = num_terms
        self._tp = int(parallel.tp_size)
        # of the tokens of the current pass, where it is recorded
        self._numbers_N: IntArray | None = None
        decoder: Any = language_model(model).model
        self._handles.append(decoder.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._after(decoder.embed_tokens, operations.BEFORE_LAYERS, operations.EMBEDDING)
        for number, layer in enumerate(decoder.layers):
            self._watch_layer(layer, number)
        self._hook(decoder.norm, partial(self._see_norm, operations.AFTER_LAYERS))
        self._last_layer = len(decoder.layers) - 1

    def finish(self, folder: Path) -> None:
        """Write what was recorded, and remove the hooks."""
        self.remove_hooks()
        write_parts(output_file(folder, ENGINE, self._rank), self.parts)

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A pass begins; of a prefill of one of our requests the tokens' numbers are known."""
        values = [*args, *kwargs.values()]
        batch = next(value for value in values if hasattr(value, "forward_mode"))
        self._numbers_N = None
        names = batch.rids or []
        if batch.forward_mode.is_extend() and len(names) == 1 and names[0].startswith(_PREFIX):
            places_N = batch.positions.cpu().numpy().astype(np.int64)
            self._numbers_N = int(names[0].removeprefix(_PREFIX)) + places_N
            self._see_embedded(values)

    def _see_embedded(self, values: list[Any]) -> None:
        """Classes with a vision tower embed the tokens before they call the decoder."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._see(operations.BEFORE_LAYERS, operations.EMBEDDING, value)

    def _watch_layer(self, layer: Any, number: int) -> None:
        self._hook(layer.input_layernorm, partial(self._see_norm, number))
        # Qwen3-Next and Qwen3.5 have the modules of attention in the layer itself
        attention = getattr(layer, "self_attn", layer)
        linear = getattr(layer, "linear_attn", None)
        if linear is not None:
            attention = linear
        elif hasattr(attention, "kv_a_layernorm"):
            if latent := getattr(attention, "q_a_layernorm", None):
                self._after(latent, number, operations.QUERY_LATENT)
            self._after(attention.kv_a_layernorm, number, operations.KEY_VALUE_LATENT)
            query = getattr(attention, "q_b_proj", None) or attention.q_proj
            self._after(query, number, operations.QUERY_PROJECTION, is_split=True)
        else:
            self._hook(attention.attn, partial(self._see_heads, number, attention))
        if linear is None:
            self._hook(attention.o_proj, partial(self._see_projection, number))
        else:
            see = partial(self._see_row_parallel, number, operations.ATTENTION)
            self._hook(linear.out_proj, see)
        self._hook(layer.post_attention_layernorm, partial(self._see_mlp_norm, number))
        mlp = _first_of(layer, ("mlp", "block_sparse_moe"))
        if gate := getattr(mlp, "gate", None):
            self._after(gate, number, operations.ROUTER_LOGITS)
            self._hook(mlp.topk, partial(self._see_choices, number, gate))
            if shared := _first_of(mlp, ("shared_experts", "shared_expert", "shared_mlp")):
                see = partial(self._see_row_parallel, number, operations.SHARED_EXPERTS)
                self._hook(shared.down_proj, see)
            self._hook(mlp, partial(self._see_experts, number))
        else:
            see = partial(self._see_row_parallel, number, operations.MLP)
            self._hook(mlp.down_proj, see)

    def _see_norm(self, layer: int, _: Any, inputs: Any, output: Any) -> None:
        """A norm before attention, or the last: it also adds the output of the layer before to the residual."""
        is_last = layer == operations.AFTER_LAYERS
        operation = operations.FINAL_NORM if is_last else operations.INPUT_NORM
        self._see(layer, operation, first_tensor(output))
        if not isinstance(output, torch.Tensor):
            before = self._last_layer if is_last else layer - 1
            self._see(before, operations.LAYER, output[1])

    def _see_mlp_norm(self, number: int, _: Any, inputs: Any, output: Any) -> None:
        self._see(number, operations.MLP_NORM, first_tensor(output))
        if not isinstance(output, torch.Tensor):
            self._see(number, operations.RESIDUAL, output[1])

    def _see_heads(self, number: int, attention: Any, _: Any, inputs: Any, output: Any) -> None:
        query, key, value = inputs[:3]
        self._see(number, operations.QUERY, query, is_split=True)
        # of several ranks with one head of keys each has it all
        first_head = self._split_number * attention.total_num_kv_heads // self._split_count
        for operation, values in ((operations.KEY, key), (operations.VALUE, value)):
            self._see(number, operation, values, first_head * attention.head_dim)

    def _see_projection(self, number: int, module: Any, inputs: Any, output: Any) -> None:
        self._see(number, operations.HEADS, inputs[0], is_split=True)
        self._see_row_parallel(number, operations.ATTENTION, module, inputs, output)

    def _see_row_parallel(
        self, number: int, operation: str, module: Any, inputs: Any, output: Any
    ) -> None:
        """The terms of this rank, computed again, because whether a layer sums them depends on what comes next."""
        linear = getattr(module, "base_layer", module)
        if linear.tp_size == 1:
            self._see(number, operation, first_tensor(output))
        own_sum = linear.tp_rank, linear.tp_rank + 1, linear.tp_size
        if getattr(module, "lora_active", False):
            # an adapter in SGLang's slot adds to the sum of a rank, not to each of its terms
            if linear.tp_size > 1:
                values = linear.quant_method.apply(linear, inputs[0], bias=None)
                values = module.apply_lora(values, inputs[0])
                self._see(number, operation, values, terms=own_sum)
            return
        own_terms = self._num_terms // linear.tp_size
        weight = linear.weight
        is_plain = weight.shape[-1] == inputs[0].shape[-1] and weight.dtype == inputs[0].dtype
        if own_terms > 1 and is_plain and weight.shape[1] % own_terms == 0:
            self._see_terms(
                number,
                operation,
                inputs[0],
                weight,
                tp_rank=linear.tp_rank,
                num_own=own_terms,
                num_terms=self._num_terms,
            )
        elif linear.tp_size > 1:
            values = linear.quant_method.apply(linear, inputs[0], bias=None)
            self._see(number, operation, values, terms=own_sum)

    def _see_choices(self, number: int, gate: Any, _: Any, inputs: Any, output: Any) -> None:
        """As [tokens, experts]: whether each is chosen, and its share of the token's weights."""
        ids_NK = getattr(output, "topk_ids", None)
        if ids_NK is None:  # the experts' own kernel chooses
            return
        num_experts = gate.weight.shape[0]
        ids_NK = ids_NK.long()
        # behind the experts there may be shared ones
        is_routed_NK = (ids_NK >= 0) & (ids_NK < num_experts)
        chosen_NE = ids_NK.new_zeros((len(ids_NK), num_experts + 1), dtype=torch.float32)
        places_NK = torch.where(is_routed_NK, ids_NK, num_experts)
        weights_NE = chosen_NE.scatter(1, places_NK, output.topk_weights.float())[:, :-1]
        chosen_NE = chosen_NE.scatter(1, places_NK, 1.0)[:, :-1]
        self._see(number, operations.ROUTER_CHOICES, chosen_NE)
        total_N1 = weights_NE.sum(-1, keepdim=True).clamp_min(1e-20)
        self._see(number, operations.ROUTER_WEIGHTS, weights_NE / total_N1)

    def _see_experts(self, number: int, _: Any, inputs: Any, output: Any) -> None:
        from sglang.srt.layers.moe.utils import should_skip_mlp_all_reduce

        terms = None
        if self._tp > 1 and should_skip_mlp_all_reduce():
            terms = self._rank, self._rank + 1, self._tp
        self._see(number, operations.EXPERTS, first_tensor(output), terms=terms)

    def _is_recorded(self) -> bool:
        return self._numbers_N is not None

    def _token_numbers(self, num_rows: int) -> IntArray | None:
        if self._numbers_N is None or num_rows != len(self._numbers_N):
            return None
        return self._numbers_N
