"""The kinds of decoder layers that one model may mix, and attention whose output a gate multiplies."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.transformer.attention import SelfAttention

from megarl.model.shape import DeltaShape


class LayerKind(NamedTuple):
    """is_dense: an MLP in place of experts; is_linear: Gated DeltaNet in place of attention."""

    is_dense: bool = False
    is_linear: bool = False


def delta_fields(delta: DeltaShape) -> dict[str, Any]:
    """The fields of TransformerConfig that Gated DeltaNet reads.

    Without `experimental_attention_variant`, which would ask for Megatron's own module.
    """
    return {
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.kernel_size,
    }


class GatedSelfAttention(SelfAttention):
    """Megatron's attention with `attention_output_gate`, for more TP ranks than key/value heads too.

    There Megatron 0.16.1 takes the rank's own part of the group's queries, and all of the group's gates.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        tensors: Any = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, value, *gate = tensors
        own = query.shape[2]
        if gate and gate[0].shape[2] > own:
            part = self.pg_collection.tp.rank() % (gate[0].shape[2] // own)
            gate = [gate[0][:, :, part * own : (part + 1) * own]]
        return query, key, value, *gate
