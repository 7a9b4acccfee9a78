"""What is around the transformer layer of a multi-token prediction layer, declared once for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megarl.model.families.blocks import Block, Modules
from megarl.model.families.layouts import ParamPart, copy, cut, rows, vector
from megarl.model.hf_values import ConfigFile
from megarl.model.shape import ModelShape


@dataclass(frozen=True)
class MtpFrame:
    """A multi-token prediction layer around its transformer layer; its defaults are DeepSeek-V3's (README_WEIGHTS.md).

    norms: the names of each norm in the checkpoint, in Megatron and in SGLang. projection: the matrix.
    copies: tensors that the checkpoint has once more, by the names inside the layer: "embedding" or "head". prefix,
    layer_prefix: begin the names in the checkpoint of the frame and of its transformer layer, {number}: the layer's
    number, counted on from the decoder's, {index}: from 0. draft_frame, draft_layer: the same in SGLang's draft model.
    key: the key of config.json with the number of these layers. most: how many of them the checkpoint's names have
    room for.
    """

    norms: tuple[tuple[str, str, str], ...] = (
        ("enorm", "enorm", "enorm"),
        ("hnorm", "hnorm", "hnorm"),
        ("shared_head.norm", "final_layernorm", "shared_head.norm"),
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
    key: str = "num_nextn_predict_layers"
    most: int | None = None

    def read(self, config: ConfigFile) -> int:
        """How many of these layers a checkpoint has: none where config.json does not say.

        Raises UserError for more than the family has names for.
        """
        number = config.integer(self.key, default=0, least=0)
        if self.most is not None and number > self.most:
            raise config.error(f"{self.key} is {number}", f"use a checkpoint with {self.most}")
        return number

    def block(self, shape: ModelShape) -> Block:
        """The norms, and the projection of [embedding; hidden state], which Megatron cuts and SGLang has whole."""
        return _mtp_block(self, shape)


@cache
def _mtp_block(frame: MtpFrame, shape: ModelShape) -> Block:
    hidden = shape.hidden_size
    norms = [vector(f"{name}.weight", hidden) for name, _, _ in frame.norms]
    projection = rows(f"{frame.projection}.weight", 1, hidden, 2 * hidden)
    in_megatron = [f"{name}.weight" for _, name, _ in frame.norms]
    in_sglang = [f"{name}.weight" for _, _, name in frame.norms]
    return Modules("", "", "").block(
        tensors=[*(norm.tensor for norm in norms), projection.tensor],
        megatron=[
            *(ParamPart(name, copy(norm)) for name, norm in zip(in_megatron, norms, strict=True)),
            ParamPart("eh_proj.weight", cut(projection)),
        ],
        sglang=[
            *(ParamPart(name, copy(norm)) for name, norm in zip(in_sglang, norms, strict=True)),
            ParamPart(projection.name, copy(projection)),
        ],
    )
