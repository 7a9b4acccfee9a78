"""What a recipe asks of its adapters (LoRA), and the pairs of factors that a linear layer of a rank gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Rounding = Literal["nearest", "stochastic"]
Sync = Literal["merged", "adapters"]
CHILD = "lora"  # the name of the adapter inside its linear layer
Param = TypeVar("Param")
FACTORS = ("A", "B")


@dataclass(frozen=True)
class LoraSize:
    """The adapters of a model. rank, expert_rank: of the factors outside and inside routed experts; 0: none there.

    targets: the last parts of the checkpoint's names of the layers with adapters; (): all linear layers. sync: whether
    engines get them merged into the weights, or on their own. rounding: of the weights into which they are merged.
    """

    rank: int
    expert_rank: int
    alpha: float
    targets: tuple[str, ...]
    rounding: Rounding = "nearest"
    sync: Sync = "merged"

    @property
    def in_slots(self) -> bool:
        """Whether engines have the adapters beside the weights, in SGLang's adapter slots."""
        return self.sync == "adapters"

    def includes(self, name: str, is_expert: bool) -> bool:
        """Whether the linear layer with this weight of the decoder has an adapter."""
        return bool(self.rank_of(is_expert)) and (not self.targets or leaf_of(name) in self.targets)

    def rank_of(self, is_expert: bool) -> int:
        if is_expert:
            return self.expert_rank
        return self.rank

    def scale_of(self, is_expert: bool) -> float:
        """What B A x is multiplied by: alpha / rank."""
        return self.alpha / self.rank_of(is_expert)


@dataclass(frozen=True)
class LoraPair:
    """The factors of one tensor of the checkpoint, of which a rank's linear layer holds rows and columns.

    A [rank, the tensor's columns] has the columns, B [the tensor's rows, rank] the rows. places: (row of the layer's
    output, row of this rank's B, number of rows), several where the layer is fused from several tensors. param: the
    layer's weight in the rank's model. size: rows and columns of the whole tensor; the columns are the layer's fan-in.
    """

    name: str
    param: str
    is_expert: bool
    size: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]
    places: tuple[tuple[int, int, int], ...]

    @property
    def leaf(self) -> str:
        """The last part of the tensor's name: "q_proj"."""
        return leaf_of(self.name)


def leaf_of(name: str) -> str:
    """The last part of a linear layer's name, given the name of its weight in the checkpoint."""
    return name.removesuffix(".weight").rpartition(".")[2]


def factor_name(name: str, factor: str) -> str:
    """The name of a factor, as PEFT's files have it, given the name of the weight."""
    return f"{name.removesuffix('.weight')}.lora_{factor}.weight"


def weight_of(factor: str) -> str:
    """The name of the weight to which a factor of this name belongs."""
    return factor.rpartition(".lora_")[0] + ".weight"


def factor_param(param: str, name: str, factor: str) -> str:
    """The name of a factor in the rank's model, given the weight's there and in the checkpoint.

    A layer of several experts has weights `weight0`, `weight1`...
    """
    path, _, weight = param.rpartition(".")
    expert = weight.removeprefix("weight")
    return ".".join([path, CHILD, *([expert] if expert else []), leaf_of(name), factor])


def is_factor(param: str) -> bool:
    """Whether a parameter of the rank's model belongs to an adapter."""
    return f".{CHILD}." in param


def split_factors(params: Mapping[str, Param]) -> tuple[dict[str, Param], dict[str, Param]]:
    """(the weights, the factors of adapters) among the parameters of the rank's model."""
    weights: dict[str, Param] = {}
    factors: dict[str, Param] = {}
    for name, param in params.items():
        (factors if is_factor(name) else weights)[name] = param
    return weights, factors
