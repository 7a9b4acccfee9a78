"""Training in the engine's fp8 (`train.numbers: engine`): the products in fp8, and what quantising reads and writes.

TransformerEngine's blockwise recipe, read from its `module/linear.py` and `module/grouped_linear.py` of September 2026:
activations and gradients have a scale for each 128 numbers of a row, weights for each tile of 128 x 128. A backward
pass in fp8 multiplies codes along the other axis, so that what it needs is quantised twice; a module keeps its weight's
codes from the first micro-batch of an update on. Nothing here was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megarl.fp8 import TILE, Fp8Backward
from megarl.model.families import has_output_gate
from megarl.model.precision import Precision
from megarl.model.shape import ModelShape
from megarl.placement.roles import Role, precision_of
from megarl.placement.train_layout import TrainLayout

# what a linear layer belongs to: Megatron's module that is computed again with it, or attention's other projections
Module = Literal["attention", "mla_up_proj", "mlp", "experts", "shared_experts"]
# bytes of a code with its share of a row's scale, a float32 for each 128
CODE_BYTES = 1 + 4 / TILE
PLAIN_BYTES = 2
# Assumption: of a layer's kernels in one pass of a micro-batch, those that quantise or dequantise. With it the two
# published runs in tests/plan/test_layer_time.py are met, of which the smaller model gained nothing by fp8.
KERNELS_SHARE = 0.2


class Linear(NamedTuple):
    """A linear layer in fp8. copies: of each token, times the layers that have it; weights: in the whole model."""

    module: Module
    inputs: int
    outputs: int
    copies: int
    weights: int


@dataclass(frozen=True)
class Fp8Linears:
    """The linear layers of a model that multiply in fp8, and what their backward passes multiply."""

    linears: tuple[Linear, ...]
    backward: Fp8Backward

    def flops(self, tokens: float, modules: Collection[Module] | None = None) -> float:
        """Operations of a forward pass over so many tokens; modules: of these alone."""
        return 2 * tokens * sum(
            linear.copies * linear.inputs * linear.outputs for linear in self._of(modules)
        )  # fmt: skip

    def forward_bytes(self, tokens: float, modules: Collection[Module] | None = None) -> float:
        """Read and written to quantise the inputs of a forward pass."""
        return tokens * (PLAIN_BYTES + CODE_BYTES) * self._inputs(modules)

    def backward_bytes(self, tokens: float, modules: Collection[Module] | None = None) -> float:
        """Read and written for what a backward pass multiplies, besides weights.

        In fp8 the inputs' codes along the other axis, from the forward pass, and gradients along both. Dequantised are
        the inputs.
        """
        match self.backward:
            case "fp8":
                outputs = sum(linear.copies * linear.outputs for linear in self._of(modules))
                gradients = (PLAIN_BYTES + 2 * CODE_BYTES) * outputs
                return tokens * (CODE_BYTES * self._inputs(modules) + gradients)
            case "dequantised":
                return tokens * (CODE_BYTES + PLAIN_BYTES) * self._inputs(modules)
        return 0.0

    def rank_weights(self, layout: TrainLayout) -> float:
        """Weights in fp8 on a rank of the mean pipeline stage."""
        experts = sum(linear.weights for linear in self._of({"experts"}))
        others = sum(linear.weights for linear in self.linears) - experts
        ranks_of_expert = layout.ep * layout.etp
        return (experts / ranks_of_expert + others / layout.tp) / layout.pp

    @property
    def code_copies(self) -> int:
        """The codes that a module keeps of its weight: along each axis that is multiplied."""
        return 2 if self.backward == "fp8" else 1

    def update_bytes(self, weights: float) -> float:
        """Read and written to quantise so many weights, once an update."""
        return weights * (PLAIN_BYTES + self.code_copies)

    def micro_batch_bytes(self, weights: float, forwards: int, backwards: int) -> float:
        """What passes of a micro-batch read and write of so many weights, beyond reading plain ones."""
        of_backward = {"fp8": 1 - PLAIN_BYTES, "dequantised": 1 + PLAIN_BYTES, "high_precision": 0}
        saved = 1 - PLAIN_BYTES
        return weights * (forwards * saved + backwards * of_backward[self.backward])

    def kernels(self, forwards: int, backwards: int) -> float:
        """Of so many passes, the number of forward passes whose kernels take as long."""
        of_backward = {"fp8": 2, "dequantised": 1, "high_precision": 0}
        return KERNELS_SHARE * (forwards + backwards * of_backward[self.backward])

    @property
    def keeps_codes(self) -> bool:
        """Whether the backward pass finds a linear layer's input as codes, and not as it was."""
        return self.backward != "high_precision"

    def has(self, module: Module) -> bool:
        """Whether linear layers of a module are in fp8."""
        return any(linear.module == module for linear in self.linears)

    def _inputs(self, modules: Collection[Module] | None) -> int:
        return sum(linear.copies * linear.inputs for linear in self._of(modules))

    def _of(self, modules: Collection[Module] | None) -> list[Linear]:
        return [linear for linear in self.linears if modules is None or linear.module in modules]


def fp8_linears_of(role: Role) -> Fp8Linears | None:
    """Of a role's ranks; None where they multiply plain numbers, as all but the policy do."""
    train = role.recipe.train
    if role.name != "policy" or train.numbers == "plain":
        return None
    return fp8_linears(role.shape, precision_of(role.recipe, "fp8"), train.fp8_backward)


def fp8_linears(shape: ModelShape, precision: Precision, backward: Fp8Backward) -> Fp8Linears:
    """Those of the decoder's layers that `precision` does not keep plain; linear attention's stay plain."""
    layers = range(shape.num_layers - precision.plain_last_layers)
    num_dense = sum(map(shape.is_dense, layers))
    num_sparse = len(layers) - num_dense
    num_full = len(layers) - sum(map(shape.is_linear, layers))
    hidden = shape.hidden_size
    width = shape.moe_ffn_size
    linears = [
        _linear(module, inputs, outputs, num_full)
        for module, inputs, outputs in _attention(shape, precision)
    ]
    linears += _gated("mlp", hidden, shape.ffn_size, num_dense)
    experts = _gated("experts", hidden, width, num_sparse)
    linears += [
        linear._replace(
            copies=linear.copies * shape.experts_per_token,
            weights=linear.weights * shape.num_experts,
        )
        for linear in experts
    ]
    if shape.num_shared_experts and precision.quantises("shared_experts"):
        linears += _gated("shared_experts", hidden, shape.num_shared_experts * width, num_sparse)
    return Fp8Linears(tuple(linear for linear in linears if linear.copies), backward)


def _linear(module: Module, inputs: int, outputs: int, num_layers: int) -> Linear:
    return Linear(module, inputs, outputs, num_layers, num_layers * inputs * outputs)


def _gated(module: Module, hidden: int, width: int, num_layers: int) -> list[Linear]:
    """Both linear layers of a SwiGLU."""
    return [
        _linear(module, hidden, 2 * width, num_layers),
        _linear(module, width, hidden, num_layers),
    ]


def _attention(shape: ModelShape, precision: Precision) -> list[tuple[Module, int, int]]:
    """(module, inputs, outputs) of a layer's projections."""
    hidden = shape.hidden_size
    heads = shape.num_heads
    mla = shape.mla
    if mla is None:
        width = shape.head_dim
        outputs = width * (heads * (1 + has_output_gate(shape)) + 2 * shape.num_kv_heads)
        return [("attention", hidden, outputs), ("attention", heads * width, hidden)]
    queries = heads * (mla.nope_dim + mla.rope_dim)
    projections: list[tuple[Module, int, int]] = [
        ("attention", hidden, mla.kv_lora_rank + mla.rope_dim),
        ("attention", heads * mla.v_dim, hidden),
    ]
    if precision.quantises("kv_b_proj"):
        keys_values = heads * (mla.nope_dim + mla.v_dim)
        projections.append(("mla_up_proj", mla.kv_lora_rank, keys_values))
    if mla.q_lora_rank is None:
        return [*projections, ("mla_up_proj", hidden, queries)]
    return [
        *projections,
        ("attention", hidden, mla.q_lora_rank),
        ("mla_up_proj", mla.q_lora_rank, queries),
    ]
