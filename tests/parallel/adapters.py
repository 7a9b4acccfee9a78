"""Worlds whose recipe has `lora`, with adapters that are not 0, for tests."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import Recipe
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.shards import views
from tests.parallel.gradients import uneven_steps
from tests.parallel.worlds import recipe, trained, trained_shards

STEPS = 2
LORA = {"rank": 4, "alpha": 6.0, "experts": 2}


def lora_recipe(path: Path, layout: TrainLayout, lora: Any = None, **train: Any) -> Recipe:
    """As `worlds.recipe`, with adapters."""
    return Recipe.model_validate(
        recipe(path, layout, **train).model_dump() | {"lora": LORA if lora is None else lora}
    )


def drawn(name: str, size: tuple[int, int]) -> np.ndarray:
    """A whole factor B that is not 0, which its name decides."""
    return (
        np.random.default_rng(zlib.crc32(name.encode()))
        .normal(size=size, scale=0.05)
        .astype(np.float32)
    )


@torch.no_grad()
def set_b(trainer: Any) -> None:
    """Give every B of this rank values that are the same whole tensor in every layout."""
    from megarl.model.tensors import tensors

    sizes, held = tensors(trainer.shape), trained(trainer)
    for shard in trained_shards(trainer):
        if ".lora_B." not in shard.name:
            continue
        rows = sizes[shard.name.replace(".lora_B", "")][1]
        planes = [
            plane for view in views(held, shard.param, shard.at, shard.size) for plane in view
        ]
        for item, plane in zip(range(*shard.items), planes, strict=True):
            whole = drawn(shard.name.format(item), (rows, shard.cols[1]))
            plane.copy_(torch.from_numpy(whole[slice(*shard.rows)]))
    trainer._model.make_optimizer()  # whose master weights, where it has any, are copies
    if getattr(trainer, "_merged", None):  # of the policy alone
        trainer._merged.write()


def train(trainer: Any, prepare: Callable[[Any], None] = set_b) -> dict[str, Any]:
    """Logprobs, then steps on uneven micro-batches from B != 0; what is frozen before and after."""
    prepare(trainer)
    before = frozen_digest(trainer)
    results = uneven_steps(trainer, STEPS)
    assert frozen_digest(trainer) == before, "the frozen weights have changed"
    return results


def frozen_digest(trainer: Any) -> str:
    with trainer._merged.frozen() if trainer._merged else nullcontext():
        return digest(trainer.params())


def digest(params: dict[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name, param in sorted(params.items()):
        hasher.update(name.encode() + param.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return hasher.hexdigest()
