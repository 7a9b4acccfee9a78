"""Real training worlds for tests: one process per rank, reaped whatever happens."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl import device
from megarl.algos.losses import DIFF, DIFF_MAX, LossResult
from megarl.algos.statistics import TOKENS, Statistics, over_tokens
from megarl.config import Recipe
from megarl.device import Address
from megarl.model.hf_config import read_model
from megarl.placement.roles import Role, RoleName, train_layout
from megarl.placement.train_layout import TrainLayout
from megarl.tracking.metrics import train_metrics
from megarl.types import TrainSequence
from tests import forked
from tests.parallel.precision import dtype

TIMEOUT_S = 120.0
LONGEST = 32  # tokens of the longest sample that a recipe of these worlds allows


def recipe(path: Path, layout: TrainLayout, **train: Any) -> Recipe:
    """A recipe for a checkpoint and a layout; only what a training rank reads is real."""
    return Recipe.model_validate(
        {
            "run": {"name": "test", "steps": 1, "timeout_s": TIMEOUT_S},
            "model": {"path": str(path), "dtype": train.pop("dtype", dtype())},
            "data": {"train": "none", "max_prompt_tokens": LONGEST - 1},
            "reward": {"function": "none"},
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 1},
            "train": {
                "tokens_per_micro_batch": LONGEST // layout.max_cp,
                **axes(layout),
                "lr": 1e-3,
                **train,
            },
            "placement": {"gpus": layout.world_size},
        }
    )


def axes(layout: TrainLayout) -> dict[str, Any]:
    """The layout as keys of the recipe's `train`."""
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "cp": "auto" if layout.max_cp > 1 else layout.cp,
        "vpp": layout.vpp,
        "etp": layout.expert_tp or None,
        "layers_per_stage": layout.stage_layers,
    }


def need_gpus(count: int) -> None:
    """Skip the test where each rank is to have a GPU of its own and there are not as many."""
    num_gpus = torch.cuda.device_count()
    if device.DEVICE == "cuda" and num_gpus < count:
        pytest.skip(f"{count} ranks on {num_gpus} GPU{'s' * (num_gpus != 1)}: each needs its own")


def run_world(made: Recipe, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(trainer, *args)` on every rank of a fresh world; the results by rank, as of `run_ranks`."""
    return run_ranks(made.placement.gpus, _with_trainer, made, work, args)


def _with_trainer(
    rank: int, meet: Address, made: Recipe, work: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    from megarl.training.policy import PolicyRank

    return work(PolicyRank(rank, role_of(made), meet), *args)


def role_of(made: Recipe, name: RoleName = "policy", *, has_scores: bool = False) -> Role:
    """The role of a model whose ranks read this recipe, from slot 0 on."""
    model = read_model(
        made.model.path,
        made.model.family,
        has_scores=has_scores,
        rope_scaling=made.model.rope_values,
    )
    return Role(name, made, train_layout(made), 0, has_scores, model)


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, address of the store, *args)` in a process for each rank; the results by rank.

    The processes are forked from a server that has done the imports. Raises RuntimeError with the first rank's
    traceback, or TimeoutError; no process outlives the call.
    """
    store = device.host_store(TIMEOUT_S)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            process, pipe = forked.start(_rank_main, rank, device.address_of(store), work, args)
            processes.append(process)
            pipes.append(pipe)
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank_main(
    pipe: Connection, rank: int, meet: Address, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    device.use_loopback()
    try:
        pipe.send((True, work(rank, meet, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _collect(pipes: Sequence[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in {TIMEOUT_S} s")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            good, value = pipe.recv()  # type: ignore[union-attr]
            if not good:
                raise RuntimeError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def ragged(count: int, vocab_size: int, seed: int, longest: int = 23) -> list[TrainSequence]:
    """Random sequences of 2 to `longest` tokens with a random prompt length, advantages and engine logprobs."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length = int(rng.integers(2, longest + 1))
        mask_T = np.arange(length) >= rng.integers(1, length)
        sequence = TrainSequence(
            token_ids_T=rng.integers(0, vocab_size, length),
            loss_mask_T=mask_T,
            loss_weight_T=(mask_T * rng.uniform(0.5, 1.5, length)).astype(np.float32),
            advantage_T=(mask_T * rng.normal(size=length)).astype(np.float32),
            engine_logp_T=(mask_T * rng.normal(size=length)).astype(np.float32),
        )
        assert sequence.advantage_T is not None
        sequences.append(replace(sequence, reward=float(sequence.advantage_T[-1])))
    return sequences


def assign(
    sequences: Sequence[TrainSequence], dp_rank: int, dp: int, micro_batches: int
) -> list[list[TrainSequence]]:
    """One data-parallel rank's uneven micro-batches: every dp-th sequence, split into `micro_batches` parts."""
    rank_sequences = list(sequences[dp_rank::dp])
    cuts = [
        round(len(rank_sequences) * (i / micro_batches) ** 1.5) for i in range(micro_batches + 1)
    ]
    return [rank_sequences[start:end] for start, end in zip(cuts[:-1], cuts[1:], strict=True)]


def planned(
    sequences: Sequence[TrainSequence], layout: TrainLayout, dp_rank: int
) -> list[list[tuple[int, int]]]:
    """One data-parallel rank's micro-batches with `train.cp: auto`: (place in sequences, ranks of the row).

    The shortest sequence has a micro-batch of its own, so that there are rows of 1, 2, ... ranks, and empty ones.
    """
    from megarl.training.batching import SampleRef, plan_updates

    budget = LONGEST // layout.max_cp
    lengths = [len(sequence.token_ids_T) for sequence in sequences]
    refs = [SampleRef(0, place, length, length - 1) for place, length in enumerate(lengths)]
    refs.sort(key=lambda ref: ref.length)
    batches = []
    for together in (refs[1:], refs[:1]):
        (update,) = plan_updates(
            together,
            updates=1,
            dp=layout.dp,
            token_budget=budget,
            aggregation="token_mean",
            work=float,
            align=layout.tokens_align,
            multiple=layout.batch_multiple,
            max_cp=layout.max_cp,
        )
        batches += update.micro_batches[dp_rank]
    return [[(ref.sample, ref.cp) for ref in batch] for batch in batches]


def assigned(
    sequences: Sequence[TrainSequence], layout: TrainLayout, dp_rank: int, micro_batches: int = 4
) -> list[list[TrainSequence]]:
    """One data-parallel rank's micro-batches in any layout: as of `planned` with `train.cp: auto`, else of `assign`."""
    if layout.max_cp == 1:
        return assign(sequences, dp_rank, layout.dp, micro_batches)
    return [
        [replace(sequences[place], cp=cp) for place, cp in batch]
        for batch in planned(sequences, layout, dp_rank)
    ]


def part(micro_batches: Sequence[Sequence[TrainSequence]], denominator: float, **more: Any) -> Any:
    """An update of these micro-batches alone: what one rank, or one of equal data-parallel ranks, is given."""
    return world_part(
        micro_batches,
        [sequence for batch in micro_batches for sequence in batch],
        denominator,
        **more,
    )


def world_part(
    micro_batches: Sequence[Sequence[TrainSequence]],
    everything: Sequence[TrainSequence],
    denominator: float,
    **more: Any,
) -> Any:
    """One rank's part of an update of all the sequences in `everything`."""
    from megarl.parallel.pipeline import Norms
    from megarl.training.policy import UpdateShare

    tokens = sum(len(sequence.token_ids_T) for sequence in everything)
    norms = Norms(
        denominator, tokens, int(sum(sequence.loss_mask_T.sum() for sequence in everything))
    )
    return UpdateShare(micro_batches, norms, **more)


def weighted_loss(
    logp_T: torch.Tensor, entropy_T: torch.Tensor, old_logp_T: torch.Tensor, targets: Any
) -> LossResult:
    """A small loss of every input, so that a misaligned one shows: sum w m (A (old - log p) - (p - e)^2 / 10)."""
    mask_T = targets.loss_mask_T
    diff_T = torch.where(mask_T, (old_logp_T - targets.engine_logp_T).abs(), 0.0)
    per_token_T = (
        targets.advantage_T * (old_logp_T - 1.0 - logp_T)
        + (logp_T - targets.engine_logp_T) ** 2 / 10
    )
    loss_sum = torch.where(mask_T, per_token_T * targets.loss_weight_T, 0.0).sum()
    return loss_sum, {TOKENS: mask_T.sum(), **over_tokens(mask_T, {DIFF: diff_T, DIFF_MAX: diff_T})}


def numbers(update: Statistics) -> dict[str, float]:
    """The statistics of one update by the last part of their published names."""
    return {name.rpartition("/")[2]: value for name, value in train_metrics([update]).items()}


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    """The weights that the optimizer steps on, by their map's names: where there are adapters, these and a head."""
    if not trainer._model.adapters:
        return trainer.params()
    heads = {shard.param for shard in _head_shards(trainer)}
    return trainer.factors() | {
        name: param for name, param in trainer.params().items() if name in heads
    }


def _head_shards(trainer: Any) -> list[Any]:
    from megarl.parallel.model import TRANSFORMER_ENGINE
    from megarl.resharding import megatron_map

    of_rank = trainer.shape, trainer.layout, trainer.rank
    return [
        shard
        for shard in megatron_map.shards(*of_rank, TRANSFORMER_ENGINE)
        if shard.name == "score.weight"
    ]


def trained_shards(trainer: Any) -> list[Any]:
    """Their map."""
    from megarl.parallel.model import TRANSFORMER_ENGINE
    from megarl.placement.roles import lora_size
    from megarl.resharding import lora_map, megatron_map

    of_rank = trainer.shape, trainer.layout, trainer.rank
    if size := lora_size(trainer._recipe.lora, trainer.shape):
        return [*lora_map.shards(*of_rank, size, TRANSFORMER_ENGINE), *_head_shards(trainer)]
    return megatron_map.shards(*of_rank, TRANSFORMER_ENGINE)


Rectangle = tuple[str, tuple[int, int], tuple[int, int], np.ndarray]


def rectangles(trainer: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> list[Rectangle]:
    """This rank's trained weights as (HF tensor, rows, cols, values); or other tensors by the names of (some) weights.

    The trained weights of a recipe with `lora` are the factors of its adapters.
    """
    from megarl.resharding.shards import cells, views

    held = trained(trainer) if tensors is None else tensors
    parts = []
    for shard in filter(lambda one: one.area, trained_shards(trainer)):
        if tensors is not None and not all(param in tensors for param, _ in cells(shard)):
            continue
        planes = [
            plane for view in views(held, shard.param, shard.at, shard.size) for plane in view
        ]
        for item, plane in zip(range(*shard.items), planes, strict=True):
            # a storage that NumPy has seen cannot be resized any more
            values = plane.float().clone().cpu().numpy()
            parts.append((shard.name.format(item), shard.rows, shard.cols, values))
    return parts


def assemble(ranks: Sequence[Sequence[Rectangle]]) -> dict[str, np.ndarray]:
    """The logical tensors, 2-D, from all ranks' rectangles; replicas must be equal and nothing may be missing."""
    extents: dict[str, tuple[int, int]] = {}
    for name, rows, cols, _ in (rectangle for rank in ranks for rectangle in rank):
        old = extents.get(name, (0, 0))
        extents[name] = (max(old[0], rows[1]), max(old[1], cols[1]))
    logical = {name: np.full(extent, np.nan, dtype=np.float32) for name, extent in extents.items()}
    for name, rows, cols, values in (rectangle for rank in ranks for rectangle in rank):
        place = logical[name][rows[0] : rows[1], cols[0] : cols[1]]
        is_new = np.isnan(place)
        assert np.array_equal(place[~is_new], values[~is_new]), f"{name}: replicas differ"
        place[...] = values
    for name, values in logical.items():
        assert not np.isnan(values).any(), f"{name} is incomplete"
    return logical
