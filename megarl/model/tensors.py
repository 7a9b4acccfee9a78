"""The logical tensors of a model: the names and shapes of its HF checkpoint.

The blocks of the layers are those of the model's family (megarl/model/families).
"""

from __future__ import annotations

from megarl.model.families import family_of, layer_of, layer_prefix, mtp_block, mtp_prefix
from megarl.model.families.layouts import STACK as STACK
from megarl.model.families.layouts import Size as Size
from megarl.model.shape import SCORE, ModelShape

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
# as names of linear layers that are quantised end; w1, w2 and w3 are an expert's
_PROJECTIONS = (
    "_proj.weight",
    "_proj_with_mqa.weight",
    *("in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight"),
    *(f".w{number}.weight" for number in (1, 2, 3)),
    *(".indexer.wq_b.weight", ".indexer.wk.weight"),
)
_NOT_QUANTISED = (".eh_proj.weight", ".indexer.weights_proj.weight")
INPUT_NORM = "input_layernorm.weight"
MLP_NORM = "post_attention_layernorm.weight"


def tensors(shape: ModelShape) -> dict[str, Size]:
    """Every logical tensor: name -> (items, rows, columns); a layer's experts of one kind are one stack."""
    sizes_by_name = {
        EMBEDDING: (1, shape.vocab_size, shape.hidden_size),
        FINAL_NORM: _vector(shape.hidden_size),
    }
    if shape.num_labels:
        sizes_by_name[SCORE] = (1, shape.num_labels, shape.hidden_size)
    elif not shape.tied:
        sizes_by_name[LM_HEAD] = (1, shape.vocab_size, shape.hidden_size)
    for number in range(shape.num_layers + shape.num_mtp_layers):
        prefix = layer_prefix(shape, number)
        layer = layer_of(shape, number)
        for norm in (INPUT_NORM, MLP_NORM):
            sizes_by_name[prefix + norm] = _vector(shape.hidden_size)
        for name, size in layer.mixer.tensors + layer.mlp.tensors:
            sizes_by_name[prefix + name] = size
    for index in range(shape.num_mtp_layers):
        prefix = mtp_prefix(shape, index)
        sizes_by_name |= {prefix + name: size for name, size in mtp_block(shape).tensors}
    return sizes_by_name


def aliases(shape: ModelShape) -> dict[str, str]:
    """Tensors that a checkpoint has twice: name of the copy -> name of the original."""
    originals = {"embedding": EMBEDDING, "head": EMBEDDING if shape.tied else LM_HEAD}
    return {
        mtp_prefix(shape, index) + name: originals[original]
        for index in range(shape.num_mtp_layers)
        for name, original in family_of(shape).mtp.copies
    }


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape in the checkpoint's files, where items of stacks are separate."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    for name, (items, rows, cols) in tensors(shape).items():
        one = file_shape(name, (1, rows, cols))
        shapes_by_name |= {name.format(item): one for item in range(items)}
    return shapes_by_name


def file_shape(name: str, size: Size) -> tuple[int, ...]:
    """The shape in the checkpoint's files: norms and biases have one dimension.

    Convolutions over time have three, and so has a tensor of several items.
    """
    items, rows, cols = size
    if items > 1:
        return size
    if cols == 1:
        return (rows,)
    if name.endswith("conv1d.weight"):
        return rows, 1, cols
    return rows, cols


def is_projection(name: str) -> bool:
    """Whether the tensor is the weight of a linear layer that fp8 and int4 checkpoints quantise.

    Those of attention, MLPs and experts, not the router, the embedding, the output layer, MTP's eh_proj, and the
    weights that an indexer of sparse attention gives its heads.
    """
    return name.endswith(_PROJECTIONS) and not name.endswith(_NOT_QUANTISED)


def _vector(size: int) -> Size:
    return 1, size, 1
