"""The model families, one file for each: blocks of layers that megarl has, and what the architecture decides.

docs/models.md shows how a family is added.
"""

from __future__ import annotations

from functools import cache, lru_cache

from megarl.model.families.blocks import Block, Layer
from megarl.model.families.deepseek_v3 import DEEPSEEK_V3
from megarl.model.families.deepseek_v32 import DEEPSEEK_V32
from megarl.model.families.family import Family
from megarl.model.families.glm4_moe import GLM4_MOE
from megarl.model.families.glm4_moe_lite import GLM4_MOE_LITE
from megarl.model.families.glm_moe_dsa import GLM_MOE_DSA
from megarl.model.families.hy_v3 import HY_V3
from megarl.model.families.kimi_k25 import KIMI_K25
from megarl.model.families.llama import LLAMA
from megarl.model.families.minimax_m2 import MINIMAX_M2
from megarl.model.families.mixtral import MIXTRAL
from megarl.model.families.qwen2 import QWEN2
from megarl.model.families.qwen2_moe import QWEN2_MOE
from megarl.model.families.qwen3 import QWEN3
from megarl.model.families.qwen3_5_moe import QWEN3_5_MOE
from megarl.model.families.qwen3_moe import QWEN3_MOE
from megarl.model.families.qwen3_next import QWEN3_NEXT
from megarl.model.shape import ModelShape
from megarl.types import UserError
from megarl.types.json_objects import JsonObject
from megarl.types.named_objects import load_object

KEY = "model.family"
_ROWS = (
    *(QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE, DEEPSEEK_V3, DEEPSEEK_V32, KIMI_K25),
    *(GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA),
    *(MINIMAX_M2, HY_V3, QWEN2_MOE, MIXTRAL),
    *(QWEN2, QWEN3, LLAMA),
)
FAMILIES: dict[str, Family] = {family.architecture: family for family in _ROWS}


def family_of(shape: ModelShape) -> Family:
    """The row that the shape names, in the table or as `module:ROW`."""
    row = FAMILIES.get(shape.family)
    if row is None:
        return own_family(shape.family)
    return row


@cache
def own_family(path: str) -> Family:
    """A user's row, at `module:ROW`. Raises UserError(model.family) where there is none."""
    example = 'write it as "my_family:ROW", a Family in a module on PYTHONPATH (docs/models.md)'
    row = load_object(path, KEY, "module:ROW", example)
    if not isinstance(row, Family):
        raise UserError(KEY, f"{path} is a {type(row).__name__}", example)
    return row


def has_output_gate(shape: ModelShape) -> bool:
    """Whether a gate multiplies what attention returns, as wide as the queries."""
    return bool(family_of(shape).megatron.get("attention_output_gate"))


@lru_cache(maxsize=4096)
def layer_of(shape: ModelShape, number: int) -> Layer:
    """The blocks of a layer, from 0; multi-token prediction layers count on from the decoder's."""
    return family_of(shape).layer(shape, number)


def name_in_files(shape: ModelShape, name: str) -> str:
    """The name that the checkpoint's files have for a tensor of the language model."""
    wrapper = family_of(shape).wrapper
    return wrapper.in_files(name) if wrapper else name


def without_tower(shape: ModelShape) -> JsonObject:
    """Values of config.json with which SGLang serves text alone."""
    wrapper = family_of(shape).wrapper
    return dict(wrapper.without_tower) if wrapper else {}


def mtp_block(shape: ModelShape) -> Block:
    """What is around the transformer layer of each multi-token prediction layer."""
    return family_of(shape).mtp.block(shape)


def mtp_prefix(shape: ModelShape, index: int) -> str:
    """Begins the checkpoint's names of the tensors of `mtp_block`."""
    return family_of(shape).mtp.prefix.format(number=shape.num_layers + index, index=index)


def layer_prefix(shape: ModelShape, number: int) -> str:
    """Begins the checkpoint's names of a layer's tensors."""
    if number < shape.num_layers:
        return f"model.layers.{number}."
    index = number - shape.num_layers
    return family_of(shape).mtp.layer_prefix.format(number=number, index=index)
