"""What adapters (LoRA) cost and save against training all weights: the same model, batch, layout and type.

Three contenders take turns, update by update, so that other work of the machine affects all of them, each in processes
of its own: `full` trains all weights, `merged` adapters in the weights (lora.sync: merged), `adapters` adapters beside
frozen weights (lora.sync: adapters). Prints tokens per second of each, the peak of a rank's memory in updates, what
all ranks hold, and the bytes of a real exchange with engines of TP1, one on each GPU. See docs/bench/lora.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl import device
from megarl.config import Recipe
from megarl.types import TrainSequence
from scripts.bench.lora_rank import serve
from scripts.bench.resharding import wire
from scripts.bench.train import (
    TIMEOUT_S,
    WARM_UP,
    add_arguments,
    make_recipe,
    make_sequences,
    write_model,
)

Row = dict[str, float]
Pipes = Sequence[Connection]


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


def ask(pipes: Pipes, method: str) -> list[Any]:
    """What the method of all ranks returns. Raises EOFError where one has failed, which its own traceback explains."""
    for pipe in pipes:
        pipe.send(method)
    return [pipe.recv() for pipe in pipes]


def compare(
    recipes: Mapping[str, Recipe], sequences: Sequence[TrainSequence], steps: int
) -> dict[str, Row]:
    """The figures of each contender; the first one is what the others are compared with."""
    names = list(recipes)
    with ExitStack() as stack:
        worlds = {
            name: stack.enter_context(world(recipe, sequences)) for name, recipe in recipes.items()
        }
        seconds = take_turns(worlds, steps)
        rows_by_name: dict[str, Row] = {}
        for name, pipes in worlds.items():  # one after the other: each has the machine for itself
            rows_by_name[name] = (
                speed(sequences, seconds[names[0]], seconds[name]) | memory(pipes) | exchange(pipes)
            )
    return rows_by_name


def take_turns(worlds: Mapping[str, Pipes], steps: int) -> dict[str, list[float]]:
    """Seconds of each world's updates, in which each is first, second and last as often, after some that warm up."""
    names = list(worlds)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM_UP, steps):
        if number == 0:
            for pipes in worlds.values():
                ask(pipes, "begin_peak")
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            seconds[name].append(ask(worlds[name], "step")[0])
    return {name: times[WARM_UP:] for name, times in seconds.items()}


def speed(
    sequences: Sequence[TrainSequence], of_full: Sequence[float], seconds: Sequence[float]
) -> Row:
    """ratio: tokens per second over those of the first contender, the median of the updates that ran in turn."""
    tokens = sum(len(sequence.token_ids_T) for sequence in sequences)
    ratio = statistics.median(
        full / contender for full, contender in zip(of_full, seconds, strict=True)
    )
    return {"tokens_per_s": tokens / statistics.median(seconds), "ratio": ratio}


def memory(pipes: Pipes) -> Row:
    """Peaks are of the rank with the largest one, what is held is the sum over the ranks."""
    fullest = max(ask(pipes, "memory"), key=lambda rank: rank["peak_bytes"])
    held, merge_s = ask(pipes, "held"), max(ask(pipes, "merge"))
    return (
        fullest | {key: sum(rank[key] for rank in held) for key in held[0]} | {"merge_s": merge_s}
    )


def exchange(pipes: Pipes) -> Row:
    """Bytes of the exchanges at a run's start, and of that after an update, over all ranks.

    first_wire_bytes, wire_bytes: sent to other ranks. local_bytes: copied on a GPU. socket_bytes: what the ranks
    received, as the kernel counts it, the heads of messages included; NCCL may use no sockets, so that it is 0 there.
    """
    first = ask(pipes, "exchange")
    before = ask(pipes, "sockets")
    later = ask(pipes, "exchange")
    received = wire.traffic(before, ask(pipes, "sockets")).received
    stats = [cost for rank in later for cost in rank]
    return {
        "first_wire_bytes": sum(cost.wire_bytes for rank in first for cost in rank),
        "wire_bytes": sum(cost.wire_bytes for cost in stats),
        "socket_bytes": sum(map(sum, received)),
        "local_bytes": sum(cost.local_bytes for cost in stats),
        "exchange_s": max(cost.seconds for cost in stats),
    }


def make_recipes(full: Recipe, rank: int) -> dict[str, Recipe]:
    """full: the recipe that trains all weights."""
    recipes_by_name = {"full": full}
    for sync in ("merged", "adapters"):
        lora = {"rank": rank, "experts": rank, "sync": sync}
        recipes_by_name[sync] = Recipe.model_validate(full.model_dump() | {"lora": lora})
    return recipes_by_name


def table(rows_by_name: Mapping[str, Row]) -> str:
    """A line for each figure, a column for each contender."""
    lines = [" ".join(["figure".ljust(18), *(name.rjust(14) for name in rows_by_name)])]
    for key in next(iter(rows_by_name.values())):
        values = [
            f"{row[key]:,.0f}" if key.endswith("_bytes") else f"{row[key]:,.4g}"
            for row in rows_by_name.values()
        ]
        lines.append(" ".join([key.ljust(18), *(value.rjust(14) for value in values)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    # in float32 `merged` makes its sums as it sends, and trains as `adapters`
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument(
        "--rank", type=int, default=16, help="of all adapters, those of experts too"
    )
    args = parser.parse_args()
    os.environ |= (
        {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} if device.DEVICE == "cpu" else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers, args.hidden, args.vocab)
        recipes = make_recipes(make_recipe(folder, args), args.rank)
        rows_by_name = compare(
            recipes, make_sequences(args.samples, args.longest, args.vocab), args.steps
        )
    print(json.dumps(rows_by_name) if args.json else table(rows_by_name))


if __name__ == "__main__":
    main()
