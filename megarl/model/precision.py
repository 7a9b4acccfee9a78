"""The precision contract: the format of each tensor of a model in the engines, and in exported checkpoints.

It is made once, of the recipe (placement/roles.py), and read by the weight maps of both sides, the engines' arguments,
the export, the plan and the preflight. Training ranks hold every weight in `model.dtype`; the sender of a reshard
brings it into the format of its entry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from megarl.fp8 import ScaleRule
from megarl.model.families import layer_of, layer_prefix
from megarl.model.families.layouts import ParamPart
from megarl.model.quantisation import FP8_CONFIG, FP8_TILE
from megarl.model.shape import ModelShape
from megarl.model.tensors import is_projection, tensors

Format = Literal["plain", "fp8"]
# what a recipe may keep plain beside whole layers
Kind = Literal["kv_b_proj", "shared_experts"]

OWN_TYPE = "SGLang's parameter has a type of its own"
NO_LINEAR_LAYER = "no weight of a linear layer that SGLang quantises"
LAST_LAYER = "in the last layers"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_KV_B_PROJ = ".kv_b_proj.weight"


class TensorFormat(NamedTuple):
    """What holds for one tensor. rule: how it is quantised, or why it stays in `model.dtype`."""

    format: Format
    rule: str


@dataclass(frozen=True)
class Precision:
    """Which weights have which format.

    weights: of the linear layers of attention, MLPs and experts, but for those that stay plain: those of the last
    `plain_last_layers` layers of the decoder, and of the kinds in `plain`: `kv_b_proj` of latent attention, the shared
    experts. All other tensors are plain in any case: norms, biases, router, embedding and output layer. scales: the
    rule by which a tile's scale follows from its largest magnitude.
    """

    weights: Format = "plain"
    plain_last_layers: int = 0
    plain: tuple[Kind, ...] = ()
    scales: ScaleRule = "exact"

    @property
    def is_quantised(self) -> bool:
        return self.weights != "plain"

    def quantises(self, kind: Kind) -> bool:
        """Whether the weights of this kind are quantised in the layers that do not stay plain."""
        return self.is_quantised and kind not in self.plain

    def in_words(self, dtype: str) -> str:
        """As `fp8 but for the last 4 layers and kv_b_proj`. dtype: of plain weights."""
        if not self.is_quantised:
            return dtype
        last = []
        if self.plain_last_layers == 1:
            last = ["the last layer"]
        elif self.plain_last_layers:
            last = [f"the last {self.plain_last_layers} layers"]
        plain = [*last, *(kind.replace("_experts", " experts") for kind in self.plain)]
        return f"{self.weights} but for {' and '.join(plain)}" if plain else self.weights

    def entry(self, shape: ModelShape, name: str) -> TensorFormat:
        """Of a tensor of `tensors`, or of one item of a stack. Only the layers and the family of the shape are read."""
        if not self.is_quantised:
            return TensorFormat("plain", "the weights of engines are plain")
        if not is_projection(name):
            return TensorFormat("plain", NO_LINEAR_LAYER)
        layer = _LAYER.match(name)
        number = int(layer[1]) if layer else -1
        if shape.num_layers - self.plain_last_layers <= number < shape.num_layers:
            return TensorFormat("plain", LAST_LAYER)
        if name.endswith(_typed_tensors(shape)):
            return TensorFormat("plain", OWN_TYPE)
        kind = kind_of(shape, name)
        if kind in self.plain:
            return TensorFormat("plain", f"{kind} stays plain")
        rule = f"tiles of {FP8_TILE} x {FP8_TILE}, scale: the largest magnitude / 448"
        if self.scales == "powers_of_two":
            rule += ", rounded up to a power of two"
        return TensorFormat("fp8", rule)

    def is_plain(self, shape: ModelShape, name: str) -> bool:
        """Whether a tensor stays as it is trained."""
        return self.entry(shape, name).format == "plain"

    def entries(self, shape: ModelShape) -> dict[str, TensorFormat]:
        """The entry of every tensor of the model."""
        return {name: self.entry(shape, name) for name in tensors(shape)}

    @property
    def of_other_layers(self) -> Precision:
        """The contract of a layer which is not among the last ones."""
        return replace(self, plain_last_layers=0)


PLAIN = Precision()
FP8_TILES = Precision("fp8")


@cache
def _typed_tensors(shape: ModelShape) -> tuple[str, ...]:
    """How the names of attention's tensors end whose parameter in engines has a type of its own."""
    mixer = layer_of(shape, 0).mixer
    typed = {piece.name for entry in mixer.sglang if entry.dtype for piece in entry.layout.pieces}
    return tuple(sorted(f".{name}" for name in typed))


def kind_of(shape: ModelShape, name: str) -> Kind | None:
    """The kind of a projection that a recipe may name; None: another one."""
    if name.endswith(_KV_B_PROJ):
        return "kv_b_proj"
    if any(f".{module}." in name for module in shared_modules(shape)):
        return "shared_experts"
    return None


@cache
def shared_modules(shape: ModelShape) -> frozenset[str]:
    """The modules of shared experts inside a layer, in the checkpoint; they are declared in the family's blocks."""
    names = (piece.name for entry in _shared_parts(shape) for piece in entry.layout.pieces)
    return frozenset(map(_module, names))


def _shared_parts(shape: ModelShape) -> list[ParamPart]:
    """Those of shared experts in the last layer, which has experts where any layer has."""
    last = max(0, shape.num_layers + shape.num_mtp_layers - 1)
    return [entry for entry in layer_of(shape, last).mlp.sglang if entry.over == "shared"]


def plain_modules(shape: ModelShape, precision: Precision) -> tuple[str, ...]:
    """The modules that SGLang leaves plain besides those that it never quantises, as `quantization_config` names them.

    A name stands for the module at that path and for all modules inside it, wherever in a module's name the path begins
    (layers/quantization/utils.py, `is_layer_skipped`).
    """
    if not precision.is_quantised:
        return ()
    last = range(shape.num_layers - precision.plain_last_layers, shape.num_layers)
    modules = [layer_prefix(shape, layer).removesuffix(".") for layer in last]
    if "kv_b_proj" in precision.plain:
        modules.append("self_attn.kv_b_proj")
    if "shared_experts" in precision.plain:
        modules += sorted({_module(entry.param) for entry in _shared_parts(shape)})
    return tuple(modules)


def fp8_config(plain: Sequence[str], scales: ScaleRule) -> dict[str, Any]:
    """`quantization_config` of a config.json with fp8 tiles. plain: the modules that have none.

    scales: powers of two are named as DeepSeek-V3.1 names them. SGLang 0.5.21 reads the name for tiles of other widths
    (dispatch_w8a8_block_fp8_linear in layers/quantization/fp8_utils.py), and leaves tiles of 128 as they are.
    """
    config = {**FP8_CONFIG}
    if scales == "powers_of_two":
        config["scale_fmt"] = "ue8m0"
    if plain:
        config["modules_to_not_convert"] = [*plain]
    return config


def _module(weight: str) -> str:
    """The module around a linear layer, given its weight."""
    return weight.removesuffix(".weight").rpartition(".")[0]
