"""Gated DeltaNet (Yang et al., 2024), declared once: its tensors in the checkpoint, and where both sides have them.

A key head of Qwen3-Next's `in_proj_qkvz` has the rows of its query, of its key, of its values and of their gates z;
`in_proj_ba` those of its values' b and a. SGLang keeps that order (models/qwen3_next.py), and has [q; k; v] of the rank
in `conv1d`, as the checkpoint has those of all ranks. megarl/parallel weaves all by key head. Qwen3.5's files have
[q; k; v] of all heads in `in_proj_qkv`, and z, b and a as matrices of their own; SGLang has [q; k; v; z] and [b; a] of
the rank (models/qwen3_5.py).
"""

from __future__ import annotations

from functools import cache

from megarl.model.families.blocks import Block, Modules
from megarl.model.families.layouts import (
    ParamPart,
    cols,
    copy,
    cut,
    rows,
    stacked,
    vector,
)
from megarl.model.shape import ModelShape

LINEAR_ATTENTION = Modules("linear_attn.", "self_attention.", "linear_attn.")
QKVZ = "in_proj_qkvz.weight"
BA = "in_proj_ba.weight"


@cache
def delta_net(shape: ModelShape, at: Modules = LINEAR_ATTENTION) -> Block:
    """A layer of Gated DeltaNet with the projections of Qwen3-Next's files."""
    delta = shape.delta
    assert delta is not None
    hidden = shape.hidden_size
    heads = delta.num_key_heads
    values = delta.num_value_heads // heads  # of a key head
    gated = values * delta.value_dim
    qkvz = rows(QKVZ, heads, 2 * delta.key_dim + 2 * gated, hidden)
    ba = rows(BA, heads, 2 * values, hidden)
    projections = at.block(
        tensors=[qkvz.tensor, ba.tensor],
        megatron=[ParamPart("in_proj.weight", cut(qkvz, ba, groups=heads))],
        sglang=[ParamPart(QKVZ, cut(qkvz)), ParamPart(BA, cut(ba))],
        takes_norm="in_proj",
    )
    return projections + _common(shape, at)


@cache
def split_delta_net(shape: ModelShape, at: Modules = LINEAR_ATTENTION) -> Block:
    """A layer of Gated DeltaNet with the projections of Qwen3.5's files."""
    delta = shape.delta
    assert delta is not None
    hidden = shape.hidden_size
    keys = (delta.num_key_heads, delta.key_dim)
    values = (delta.num_value_heads, delta.value_dim)
    q, k, v = stacked("in_proj_qkv.weight", [keys, keys, values], hidden)
    z = rows("in_proj_z.weight", *values, hidden)
    b, a = (rows(f"in_proj_{name}.weight", delta.num_value_heads, 1, hidden) for name in "ba")
    num_rows = q.total + k.total + v.total
    projections = at.block(
        tensors=[
            (q.name, (1, num_rows, hidden)),
            *(part.tensor for part in (z, b, a)),
        ],
        megatron=[ParamPart("in_proj.weight", cut(q, k, v, z, b, a, groups=delta.num_key_heads))],
        sglang=[
            *(ParamPart(QKVZ, cut(part)) for part in (q, k, v, z)),
            *(ParamPart(BA, cut(part)) for part in (b, a)),
        ],
        takes_norm="in_proj",
    )
    return projections + _common(shape, at)


def _common(shape: ModelShape, at: Modules) -> Block:
    """What does not depend on how the files have the input projections."""
    delta = shape.delta
    assert delta is not None
    keys = (delta.num_key_heads, delta.key_dim)
    values = (delta.num_value_heads, delta.value_dim)
    conv = stacked("conv1d.weight", [keys, keys, values], delta.kernel_size)
    num_rows = sum(part.total for part in conv)
    out = cols("out_proj.weight", *values, shape.hidden_size)
    norm = vector("norm.weight", delta.value_dim)
    step_bias, decay = (vector(name, 1, delta.num_value_heads) for name in ("dt_bias", "A_log"))
    return at.block(
        tensors=[
            ("conv1d.weight", (1, num_rows, delta.kernel_size)),
            *(part.tensor for part in (step_bias, decay, norm, out)),
        ],
        megatron=[
            ParamPart("conv1d.weight", cut(*conv, groups=delta.num_key_heads)),
            ParamPart("dt_bias", cut(step_bias)),
            ParamPart("A_log", cut(decay)),
            ParamPart("out_norm.weight", copy(norm)),
            ParamPart("out_proj.weight", cut(out)),
        ],
        sglang=[
            *(ParamPart("conv1d.weight", cut(part)) for part in conv),
            ParamPart("dt_bias", cut(step_bias)),
            ParamPart("A_log", cut(decay), dtype="float32"),
            ParamPart("norm.weight", copy(norm)),
            ParamPart("out_proj.weight", cut(out)),
        ],
    )
