"""What is around the transformer layer of a multi-token prediction layer, declared once for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megarl.model.families.blocks import Block, Modules
from megarl.model.families.layouts import ParamPart, copy, cut, rows, vector
from megarl.model.shape import ModelShape


@dataclass(frozen=True)
class MtpFrame:
    """A multi-token prediction layer around its transformer layer; its defaults are DeepSeek-V3's (README_WEIGHTS.md).

    norms: (in the checkpoint, in Megatron) of each norm; SGLang has the checkpoint's names. projection: its matrix.
    copies: tensors that the checkpoint has once more, by the names inside the layer: "embedding" or "head". prefix,
    layer_prefix: begin the names in the checkpoint of the frame and of its transformer layer, {number}: the layer's
    number, counted on from the decoder's, {index}: from 0. draft_frame, draft_layer: the same in SGLang's draft model.
    """

    norms: tuple[tuple[str, str], ...] = (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("shared_head.norm", "final_layernorm"),
    )
    projection: str = "eh_proj"
    copies: tuple[tuple[str, str], ...] = (
        ("embed_tokens.weight", "embedding"),
        ("shared_head.head.weight", "head"),
    )
    prefix: str = "model.layers.{number}."
    layer_prefix: str = "model.layers.{number}."
    draft_frame: str = "model."
    draft_layer: str = "model.decoder."

    def block(self, shape: ModelShape) -> Block:
        """The norms, and the projection of [embedding; hidden state], which Megatron cuts and SGLang has whole."""
        return _mtp_block(self, shape)


@cache
def _mtp_block(frame: MtpFrame, shape: ModelShape) -> Block:
    hidden = shape.hidden_size
    norms = [vector(f"{name}.weight", hidden) for name, _ in frame.norms]
    projection = rows(f"{frame.projection}.weight", 1, hidden, 2 * hidden)
    in_megatron = [f"{name}.weight" for _, name in frame.norms]
    return Modules("", "", "").block(
        tensors=[*(norm.tensor for norm in norms), projection.tensor],
        megatron=[
            *(ParamPart(name, copy(norm)) for name, norm in zip(in_megatron, norms, strict=True)),
            ParamPart("eh_proj.weight", cut(projection)),
        ],
        sglang=[
            *(ParamPart(norm.name, copy(norm)) for norm in norms),
            ParamPart(projection.name, copy(projection)),
        ],
    )
