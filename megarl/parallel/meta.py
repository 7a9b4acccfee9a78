"""The sizes of the ranks' real Megatron modules, built on torch's meta device: shapes, and no contents.

Run as a program it reads one JSON list of requests from its input and writes the JSON list of their sizes, so that no
process of a plan's user is left with Megatron's global state.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.config import Recipe
from megarl.parallel import cpu, groups, model
from megarl.parallel.hf_config import model_shape, scorer_shape
from megarl.parallel.layout import TrainLayout
from megarl.parallel.placement import train_layout
from megarl.parallel.routing import Routing
from megarl.parallel.sizes import ChunkSize, Whole
from megarl.types import ModelShape, UserFault


def whole(path: str, shape: ModelShape, recipe: Recipe) -> Whole:
    """All layers, in one of as many ranks as there are experts: each has one of a layer, and all hold as much."""
    ranks = shape.num_experts or 1
    (chunk,) = _chunks(path, shape, TrainLayout(ranks, 1, 1, ranks), 0, recipe)
    of_mtp = {id(param) for param in chunk.mtp.parameters()} if chunk.mtp_process else set()
    one_of_each = {id(param) for param in _routed(chunk)}
    sizes = {id(param): param.numel() * (ranks if id(param) in one_of_each else 1) for param in chunk.parameters()}
    main = sum(size for key, size in sizes.items() if key not in of_mtp) - _padding(chunk, shape)
    routed = sum(sizes[key] for key in one_of_each - of_mtp)
    return Whole(main, routed, sum(sizes[key] for key in of_mtp))


def stages(path: str, shape: ModelShape, layout: TrainLayout, recipe: Recipe) -> list[list[ChunkSize]]:
    """The chunks of every pipeline rank, whatever its other coordinates: those all hold as much.

    Stages that are put together alike are built once.
    """
    found: list[list[ChunkSize]] = []
    known: dict[Any, list[ChunkSize]] = {}
    for stage in range(layout.pp):
        layers = [layout.layers(stage, shape.num_layers, chunk) for chunk in range(layout.vpp)]
        kind = (*(tuple(map(shape.is_dense, one)) for one in layers), stage == 0, stage == layout.pp - 1)
        if kind not in known:
            rank = stage * (layout.world_size // layout.pp)
            known[kind] = [size_of(chunk, shape) for chunk in _chunks(path, shape, layout, rank, recipe)]
        found.append(known[kind])
    return found


def size_of(chunk: model.Chunk, shape: ModelShape) -> ChunkSize:
    """Of a chunk wherever it lies."""
    params = list(chunk.parameters())
    trained = [param for param in params if param.requires_grad]
    # As Megatron's DistributedDataParallel tells them apart.
    dense = sum(param.numel() for param in trained if getattr(param, "allreduce", True))
    total = sum(param.numel() for param in trained)
    return ChunkSize(
        dense=dense,
        expert=total - dense,
        frozen=sum(param.numel() for param in params) - total,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in chunk.buffers()),
        padding=_padding(chunk, shape),
    )


def _chunks(path: str, shape: ModelShape, layout: TrainLayout, rank: int, recipe: Recipe) -> list[model.Chunk]:
    """`train.megatron` chooses kernels, which have no part in what weights there are and may need a GPU."""
    train = recipe.train.model_copy(update={"megatron": {}})
    with groups.simulated(rank, layout), torch.device("meta"):
        config = model.transformer_config(path, shape, layout, model.DTYPES[recipe.model.dtype], train)
        config.init_method = config.output_layer_init_method = config.embedding_init_method = _leave
        chunks = model.build_chunks(config, path, shape, layout, rank, Routing(), device="meta")
    if not train.mtp_loss:
        model.freeze_mtp(chunks)
    return chunks


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _routed(chunk: model.Chunk) -> list[torch.nn.Parameter]:
    layers = [module for module in chunk.modules() if isinstance(module, MoELayer)]
    return [param for layer in layers for param in layer.experts.parameters()]  # type: ignore[union-attr]


def _padding(chunk: model.Chunk, shape: ModelShape) -> int:
    """Elements of the vocabulary's padding, by this rank's share of it."""
    tables = []
    if hasattr(chunk, "embedding"):
        tables.append(chunk.embedding.word_embeddings.weight)
    if chunk.post_process and not shape.num_labels and chunk.output_layer.weight is not None:  # None: the embedding's
        tables.append(chunk.output_layer.weight)
    tp = chunk.config.tensor_model_parallel_size
    return sum((len(table) * tp - shape.vocab_size) * table.shape[1] // tp for table in tables)


def answer(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object for each request: `stages`, and `whole` where it is asked for, or the `fault` of its recipe."""
    found = []
    for request in requests:
        recipe = Recipe.model_validate_json(request["recipe"])
        path = recipe.model.path
        try:
            shape = scorer_shape(path) if request["scores"] else model_shape(path)
            sizes = stages(path, shape, train_layout(recipe), recipe)
            one: dict[str, Any] = {"stages": [[asdict(chunk) for chunk in chunks] for chunks in sizes]}
            if request["whole"]:
                one["whole"] = asdict(whole(path, shape, recipe))
        except UserFault as fault:
            one = {"fault": fault.args}
        found.append(one)
    return found


def main() -> None:
    """Nothing but the answer goes to the output: what libraries print goes where their warnings go."""
    gc.disable()  # modules by the 10,000, and none is garbage before the end
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        cpu.patch_megatron(torch.device("meta"))
        json.dump(answer(json.load(sys.stdin)), out)


if __name__ == "__main__":
    main()
