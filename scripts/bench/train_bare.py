"""A bare megatron-core training loop: GPTModel, its own loss from logits, the pipeline schedule, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter

from megarl.config import Recipe
from megarl.device import DEVICE
from megarl.model.hf_config import hf_facts
from megarl.model.shape import ModelShape
from megarl.parallel import groups, model
from megarl.parallel.layer_kinds import LayerKind
from megarl.parallel.optimizer import build_optimizer
from megarl.parallel.packing import PackedRow
from megarl.parallel.routing import Routing
from megarl.parallel.shared_rows import RowParams
from megarl.parallel.tp_attributes import set_tp_attributes
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.megatron_map import split_params


class Bare:
    """One rank of the loop; `weights` are what it begins with, by the names of `model.params`.

    Layers, norm, attention, buffers and optimizer are the ones that megarl gives Megatron, so that kernels are the
    same; the router, the output layer, the loss and the step are Megatron's own.
    """

    def __init__(
        self, recipe: Recipe, shape: ModelShape, layout: TrainLayout, rank: int, weights: Mapping
    ) -> None:
        dtype = model.DTYPES[recipe.model.dtype]
        facts = hf_facts(recipe.model.path, recipe.model.family)
        config = model.transformer_config(facts, shape, layout, dtype, recipe.train)
        config.finalize_model_grads_func = finalize_model_grads
        stage = layout.coords(rank).pp
        kinds = [
            LayerKind(shape.is_dense(layer), shape.is_linear(layer))
            for layer in layout.layers(stage, shape.num_layers, 0)
        ]
        block, _ = model._specs(config, kinds, Routing(), with_mtp=False)
        for layer in block.layer_specs:
            layer.submodules.mlp.submodules.router = TopKRouter
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=layout.padded_vocab(shape.vocab_size),
            max_sequence_length=facts.max_positions,
            pre_process=stage == 0,
            post_process=stage == layout.pp - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=facts.rope_theta,  # type: ignore[arg-type]
        ).to(DEVICE)
        split = split_params(shape, layout, rank, model.TRANSFORMER_ENGINE)
        set_tp_attributes([gpt], split, config.sequence_parallel)
        self._chunks = model.wrap(config, [gpt], recipe.train)  # type: ignore[list-item]
        for name, weight in model.params([gpt]).items():
            weight.copy_(weights[name])
        self._optimizer = build_optimizer(self._chunks, recipe.train, dtype)

    def step(self, rows: Sequence[PackedRow], lr: float) -> tuple[float, float]:
        """(the mean loss over all ranks' tokens, on the last stage; the gradient's norm) of one update."""
        (chunk,) = self._chunks
        chunk.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(rows),
            model=chunk,
            num_microbatches=len(rows),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        _, norm, _ = self._optimizer.step()
        if not losses:
            return 0.0, float(norm or 0.0)
        total = torch.stack(losses).sum(0)
        dist.all_reduce(total, group=groups.dp_group())
        return float(total[0] / total[1]), float(norm or 0.0)


def _forward(rows: Iterator[PackedRow], gpt: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    row = next(rows)
    tokens = row.token_ids_L[None]
    output = gpt(
        input_ids=tokens,
        position_ids=torch.zeros_like(tokens),
        attention_mask=None,
        labels=row.labels_L[None],
        packed_seq_params=RowParams.of(row),
    )
    return output, partial(_loss, row)


def _loss(row: PackedRow, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = row.targets.loss_mask_T
    total, tokens = (losses.flatten() * mask).sum(), mask.sum()
    return total, tokens.int(), torch.stack([total.detach().double(), tokens.double()])
