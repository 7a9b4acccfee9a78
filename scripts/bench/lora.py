"""What adapters (LoRA) cost and save against training all weights: the same model, batch, layout and processes.

Two worlds of ranks take turns, step by step, so that other work of the machine affects both. Prints tokens per second
of each, and the bytes that all ranks hold of weights, factors, gradients and optimizer. Merging the factors into the
weights, as a reshard does in float32 and an update in 16-bit types, is timed beside a copy of these weights. The bytes
that a reshard brings to all engines, one on each GPU, are those of its maps: of merged weights, of adapters alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from megarl import device
from megarl.config import Recipe
from megarl.device import Address
from megarl.parallel.engine_layout import EngineLayout
from megarl.parallel.hf_config import model_shape
from megarl.parallel.roles import lora_size
from megarl.resharding import lora_slots, sglang_map
from megarl.resharding.routes import item_bytes
from megarl.training import flops
from megarl.training.batching import SampleRef, plan_updates
from megarl.types import TrainSequence
from scripts.bench.train import (
    LR,
    TIMEOUT_S,
    WARM_UP,
    add_arguments,
    cross_entropy,
    make_recipe,
    make_sequences,
    write_model,
)


class Rank:
    """A training rank that steps when it is told to."""

    def __init__(self, rank: int, meet: Address, recipe: Recipe, sequences: Sequence[TrainSequence]) -> None:
        from megarl.parallel.pipeline import Norms
        from megarl.training.policy import PolicyRank, UpdateShare

        self._rank, self._recipe = rank, recipe
        self._trainer = PolicyRank(rank, recipe, meet)
        lengths = [(len(one.token_ids_T), int(one.loss_mask_T.sum())) for one in sequences]
        refs = [SampleRef(index, 0, tokens, learnt) for index, (tokens, learnt) in enumerate(lengths)]
        layout, budget = self._trainer.layout, recipe.train.tokens_per_micro_batch
        work = flops.train_work(self._trainer.shape)
        how = {"updates": 1, "dp": layout.dp, "token_budget": budget, "aggregation": "token_mean", "work": work}
        (update,) = plan_updates(refs, **how)
        mine = update.micro_batches[layout.coords(rank).dp]
        batches = [[sequences[ref.group] for ref in batch] for batch in mine]
        self._part = UpdateShare(batches, Norms(update.denominator, update.tokens, update.loss_tokens))

    def step(self) -> float:
        """Seconds of an update, until all ranks have ended it."""
        import torch.distributed as dist

        dist.barrier()
        started = time.perf_counter()
        self._trainer.train_step(self._part, LR, cross_entropy)
        dist.barrier()
        return time.perf_counter() - started

    def figures(self) -> dict[str, float]:
        """Bytes that this rank holds, and seconds to copy its weights and to merge its adapters into them."""
        params, factors = self._trainer.params(), self._trainer.factors()
        chunks, model = self._trainer._model.chunks, self._trainer._model
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        optimizers = [one.optimizer for one in model.optimizer.chained_optimizers]
        shards = [shard for one in optimizers for group in one.param_groups for shard in group["params"]]
        own = {tensor.untyped_storage().data_ptr() for tensor in (*params.values(), *factors.values())}
        masters = [shard for shard in shards if shard.untyped_storage().data_ptr() not in own]
        states = [value for one in optimizers for state in one.state.values() for value in state.values()]
        moments = [value for value in states if torch.is_tensor(value) and value.dim()]
        return {
            "weights_bytes": _bytes([*params.values(), *factors.values()]),
            "grads_bytes": _bytes([buffer.grad_data for buffer in buffers]),
            "optimizer_bytes": _bytes([*masters, *moments]),
            "factors_bytes": _bytes([*factors.values()]),
            **self._merging(params, factors),
        }

    def _merging(self, params: dict[str, torch.Tensor], factors: dict[str, torch.Tensor]) -> dict[str, float]:
        from megarl.parallel.model import TRANSFORMER_ENGINE
        from megarl.resharding.lora_merge import Merge

        of_rank = self._trainer.shape, self._trainer.layout, self._rank
        size = lora_size(self._recipe, self._trainer.shape)
        if size is None:
            return {}
        merged = Merge.of_rank(size, *of_rank, TRANSFORMER_ENGINE, factors).all_boxes(params)
        targets = [torch.empty(box.shape, dtype=box.weight.dtype, device=device.DEVICE) for box in merged]
        started = time.perf_counter()
        for box, target in zip(merged, targets, strict=True):
            target.copy_(box.weight)  # a box is a whole shard here
        copied = time.perf_counter()
        for box, target in zip(merged, targets, strict=True):
            box.write(target)
        return {"copy_s": copied - started, "merge_s": time.perf_counter() - copied}


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def serve(pipe: Connection, *arguments: Any) -> None:
    """Answer with the results of a rank's methods, until None comes."""
    rank = Rank(*arguments)
    for method in iter(pipe.recv, None):
        pipe.send(getattr(rank, method)())


@contextmanager
def world(recipe: Recipe, sequences: Sequence[TrainSequence]) -> Iterator[list[Connection]]:
    """The pipes to the ranks of a recipe."""
    context = multiprocessing.get_context("spawn")
    store, processes, pipes = device.host_store(TIMEOUT_S), [], []
    try:
        for rank in range(recipe.placement.gpus):
            ours, theirs = context.Pipe()
            arguments = theirs, rank, device.address_of(store), recipe, sequences
            processes.append(context.Process(target=serve, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ask(pipes: Sequence[Connection], method: str) -> list[Any]:
    """What the method of all ranks returns. Raises EOFError where one has failed, which its own traceback explains."""
    for pipe in pipes:
        pipe.send(method)
    return [pipe.recv() for pipe in pipes]


def compare(full: Recipe, adapters: Recipe, sequences: Sequence[TrainSequence], steps: int) -> dict[str, Any]:
    tokens = sum(len(one.token_ids_T) for one in sequences)
    seconds: dict[str, list[float]] = {"full": [], "adapters": []}
    with world(full, sequences) as first, world(adapters, sequences) as second:
        for number in range(steps + WARM_UP):
            order = [("full", first), ("adapters", second)]
            for name, pipes in order if number % 2 else order[::-1]:
                seconds[name].append(ask(pipes, "step")[0])
        held = {"full": ask(first, "figures"), "adapters": ask(second, "figures")}
    kept = {name: times[WARM_UP:] for name, times in seconds.items()}
    pairs = zip(kept["full"], kept["adapters"], strict=True)
    row: dict[str, Any] = {"ratio": statistics.median(whole / part for whole, part in pairs)}
    for name, ranks in held.items():
        row[f"{name}_tokens_per_s"] = tokens / statistics.median(kept[name])
        for key in ("weights_bytes", "grads_bytes", "optimizer_bytes"):
            row[f"{name}_{key}"] = sum(rank[key] for rank in ranks)
    ranks = held["adapters"]
    row["factors_bytes"] = sum(rank["factors_bytes"] for rank in ranks)
    row |= {key: max(rank[key] for rank in ranks) for key in ("copy_s", "merge_s")}
    return row


def reshard_bytes(recipe: Recipe) -> dict[str, int]:
    """Bytes that a reshard brings to all engines, one of TP1 on each GPU."""
    shape = model_shape(recipe.model.path)
    size = lora_size(recipe, shape)
    assert size
    engines = EngineLayout(count=recipe.placement.gpus, tp=1, ep=1)
    maps = {"merged": sglang_map.parts(shape, engines), "adapters": lora_slots.target_parts(shape, engines, size)}
    return {
        f"{name}_reshard_bytes": sum(
            shard.area * item_bytes(shard.dtype or recipe.model.dtype) * len(part.members)
            for part in parts
            for shard in part.shards
        )
        for name, parts in maps.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters, also of each expert's")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} if device.DEVICE == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers, args.hidden, args.vocab)
        full = make_recipe(folder, args)
        adapters = Recipe.model_validate(full.model_dump() | {"lora": {"rank": args.rank, "experts": args.rank}})
        row = compare(full, adapters, make_sequences(args.samples, args.longest, args.vocab), args.steps)
        row |= reshard_bytes(adapters)
    print(json.dumps(row) if args.json else "\n".join(f"{name:26} {value:,.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
