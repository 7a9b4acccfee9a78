"""The sizes of the ranks' real Megatron modules, built on torch's meta device, which allocates no memory.

As a program it reads a JSON list of requests from standard input and writes the JSON list of their sizes, so that the
caller's process does not get Megatron's global state.
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
from megarl.cpu import megatron_patches
from megarl.model.hf_config import HfFacts, read_model
from megarl.model.shape import ModelShape
from megarl.parallel import groups, model
from megarl.parallel.chunk_sizes import ChunkSize, Whole
from megarl.parallel.local_spec import use_local_layers
from megarl.parallel.routing import Routing
from megarl.placement.roles import train_layout
from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError
from megarl.types.json_objects import JsonObject


def whole(facts: HfFacts, shape: ModelShape, recipe: Recipe) -> Whole:
    """The parameters of the whole model, measured on one rank with as many EP ranks as experts (one expert a layer)."""
    ranks = shape.num_experts or 1
    (chunk,) = _chunks(facts, shape, TrainLayout(ranks, 1, 1, ranks), 0, recipe)
    if chunk.mtp_process:
        of_mtp = {id(param) for param in chunk.mtp.parameters()}
    else:
        of_mtp = set()
    moe_layers: list[Any] = [module for module in chunk.modules() if isinstance(module, MoELayer)]
    one_of_each = {id(param) for layer in moe_layers for param in layer.experts.parameters()}
    sizes = {
        id(param): param.numel() * (ranks if id(param) in one_of_each else 1)
        for param in chunk.parameters()
    }
    main = sum(size for key, size in sizes.items() if key not in of_mtp) - _padding(chunk, shape)
    routed = sum(sizes[key] for key in one_of_each - of_mtp)
    return Whole(main, routed, sum(sizes[key] for key in of_mtp))


def stages(
    facts: HfFacts, shape: ModelShape, layout: TrainLayout, recipe: Recipe
) -> list[list[ChunkSize]]:
    """The model chunks of every pipeline rank; all ranks of a stage are of equal size.

    Stages with the same kinds of layers are built once.
    """
    sizes_by_stage: list[list[ChunkSize]] = []
    known: dict[Any, list[ChunkSize]] = {}
    for stage in range(layout.pp):
        layers = [layout.layers(stage, shape.num_layers, chunk) for chunk in range(layout.vpp)]
        kind = (
            *(tuple(map(shape.is_dense, chunk)) for chunk in layers),
            *(tuple(map(shape.is_linear, chunk)) for chunk in layers),
            stage == 0,
            stage == layout.pp - 1,
        )
        if kind not in known:
            rank = stage * (layout.world_size // layout.pp)
            known[kind] = [
                size_of(chunk, shape) for chunk in _chunks(facts, shape, layout, rank, recipe)
            ]
        sizes_by_stage.append(known[kind])
    return sizes_by_stage


def size_of(chunk: model.Chunk, shape: ModelShape) -> ChunkSize:
    """The size of a chunk on any device."""
    params = list(chunk.parameters())
    trained = [param for param in params if param.requires_grad]
    # Megatron's DistributedDataParallel tells dense and expert parameters apart in the same way.
    dense = sum(param.numel() for param in trained if getattr(param, "allreduce", True))
    total = sum(param.numel() for param in trained)
    return ChunkSize(
        dense=dense,
        expert=total - dense,
        frozen=sum(param.numel() for param in params) - total,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in chunk.buffers()),
        padding=_padding(chunk, shape),
    )


def _chunks(
    facts: HfFacts, shape: ModelShape, layout: TrainLayout, rank: int, recipe: Recipe
) -> list[model.Chunk]:
    """Build a rank's chunks without options that do not change the weights, and whose kernels may need a GPU."""
    train = recipe.train.model_copy(update={"megatron": {}, "recompute": {}})
    with groups.simulated(rank, layout), torch.device("meta"):
        config = model.transformer_config(
            facts, shape, layout, model.DTYPES[recipe.model.dtype], train
        )
        config.init_method = config.output_layer_init_method = config.embedding_init_method = (
            lambda weight: weight
        )
        chunks = model.build_chunks(config, facts, shape, layout, rank, Routing(), device="meta")
    if not train.mtp_loss:
        model.freeze_mtp(chunks)
    return chunks


def _padding(chunk: model.Chunk, shape: ModelShape) -> int:
    """This rank's share of the elements that pad the vocabulary."""
    tables = []
    if hasattr(chunk, "embedding"):
        tables.append(chunk.embedding.word_embeddings.weight)
    # None: the embedding's
    if chunk.post_process and not shape.num_labels and chunk.output_layer.weight is not None:
        tables.append(chunk.output_layer.weight)
    tp = chunk.config.tensor_model_parallel_size
    return sum((len(table) * tp - shape.vocab_size) * table.shape[1] // tp for table in tables)


def answer_requests(requests: Sequence[JsonObject]) -> list[JsonObject]:
    """One object for each request: `stages`, and `whole` on request, or the `error` of its recipe."""
    use_local_layers()
    answers = []
    for request in requests:
        recipe = Recipe.model_validate_json(request["recipe"])
        folder = read_model(
            recipe.model.path,
            recipe.model.family,
            has_scores=request["scores"],
            rope_scaling=recipe.model.rope_values,
        )
        try:
            facts = folder.required_facts
            shape = folder.shape
            sizes = stages(facts, shape, train_layout(recipe), recipe)
            answer: JsonObject = {
                "stages": [[asdict(chunk) for chunk in chunks] for chunks in sizes]
            }
            if request["whole"]:
                answer["whole"] = asdict(whole(facts, shape, recipe))
        except UserError as error:
            answer = {"error": error.args}
        answers.append(answer)
    return answers


def main() -> None:
    """Write nothing but the answers to standard output; what libraries print there goes to standard error."""
    gc.disable()  # 10,000 modules, none of which is garbage before the end
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        megatron_patches.patch_megatron(torch.device("meta"))
        json.dump(answer_requests(json.load(sys.stdin)), out)


if __name__ == "__main__":
    main()
