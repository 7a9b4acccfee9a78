"""What sharing prefixes brings a training step: the same samples with `train.share_prefixes` and without, in turn.

The samples are groups of random tokens, whose prompts and responses have so many tokens, or with --samples those of a
file that `megarl rollout` wrote, with the model and layout of --recipe. The learning rate is 0: the loss and the
gradient norm of every update of every step must agree, or the bench fails. Prints the seconds of each, their ratio
(median over pairs of steps), and the tokens of all data-parallel ranks' rows in a step, padding included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from megarl import device
from megarl.algos import hyperparameters_of
from megarl.algos.statistics import GRAD_NORM, LOSS
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.controller.samples import samples_of
from megarl.device import Address
from megarl.placement.roles import resolve
from megarl.samples.parquet import open_samples
from megarl.samples.summaries import summary
from megarl.training.batching import Update, own_samples, plan_updates, refs_of
from megarl.training.calls import TrainCall
from megarl.training.flops import train_work
from megarl.types import Prompt, Row, Sample, SampleGroup, SamplePart
from scripts.bench.train import TOLERANCE, WARM_UP, make_recipe, run_world, timed, write_model

if TYPE_CHECKING:
    from megarl.training.policy import PolicyRank


def made_up(args: argparse.Namespace) -> list[SampleGroup]:
    """Groups of random tokens; half of the samples are correct."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(args.prompts):
        prompt_ids = tuple(rng.integers(0, args.vocab, args.prompt_tokens).tolist())
        samples = []
        for _ in range(args.samples_per_prompt):
            response_T = rng.integers(0, args.vocab, args.response_tokens)
            logp_T = np.full(len(response_T), -7.0, np.float32)
            row = Row.response(prompt_ids, response_T, logp_T, (SamplePart(0, len(response_T)),))
            samples.append(Sample((row,), "", finished=True))
        correct_G = np.arange(len(samples)) % 2 == 0
        prompt = Prompt(str(number), "", prompt_ids, "")
        groups.append(SampleGroup(prompt, tuple(samples), correct_G.astype(np.float32), correct_G))
    return groups


def updates_of(
    trainer: PolicyRank, recipe: Recipe, groups: Sequence[SampleGroup], *, shares: bool
) -> list[Update]:
    """The step's updates as a run plans them, for all ranks."""
    layout = trainer.layout
    return plan_updates(
        samples_of([summary(group) for group in groups], recipe.algorithm.name),
        updates=recipe.train.updates_per_step,
        dp=layout.dp,
        token_budget=recipe.train.tokens_per_micro_batch,
        aggregation=hyperparameters_of(recipe.algorithm.name, recipe.algorithm).aggregation,
        longest_response=recipe.longest_sample,
        work=train_work(trainer.shape),
        align=layout.tokens_align,
        multiple=layout.batch_multiple,
        bubble_micro_batches=layout.bubble_micro_batches,
        shares_prompts=shares,
    )


def contender(
    trainer: Any, recipe: Recipe, groups: Sequence[SampleGroup], *, shares: bool
) -> tuple[Callable[[], list[tuple[float, float]]], int]:
    """A step on this rank, and the tokens of all data-parallel ranks' rows.

    The step gives the loss and the gradient norm of each update; the loss is 0 but on the last pipeline stage.
    """
    from megarl.parallel.packing import Split, pack
    from megarl.parallel.shared_rows import pack_shared
    from megarl.training.train_sequences import train_sequences

    layout = trainer.layout
    at = layout.coords(trainer.rank)
    split = Split(layout.tp, layout.cp, at.cp, layout.tokens_align)
    planned = updates_of(trainer, recipe, groups, shares=shares)
    updates = [replace(update, micro_batches=(update.micro_batches[at.dp],)) for update in planned]
    numbers = sorted({ref.group for ref in refs_of(updates)})
    own = own_samples(updates, numbers, *(groups[number] for number in numbers))
    call: TrainCall[None] = TrainCall(recipe.algorithm.name, updates, own, 0.0, None)
    packed = partial(pack_shared if shares else pack, split=split, device=device.DEVICE)

    def step() -> list[tuple[float, float]]:
        trainer._pack = packed
        return [
            (of_update.get(LOSS, (0.0,))[0], of_update[GRAD_NORM][0])
            for of_update in trainer.train(call)
        ]

    of_all_ranks = [
        packed(sequences)
        for update in planned
        for micro_batches in update.micro_batches
        for sequences in train_sequences(micro_batches, dict(enumerate(groups)), "token_mean")
    ]
    return step, sum(len(row.token_ids_L) for row in of_all_ranks)


def work(
    rank: int, meet: Address, recipe: Recipe, groups: Sequence[SampleGroup], steps: int
) -> dict[str, Any]:
    """Both contenders on one rank; the seconds of their steps and the tokens of their rows."""
    from megarl.training.policy import PolicyRank

    trainer = PolicyRank(rank, resolve(recipe).policy, meet)
    pairs = {
        name: contender(trainer, recipe, groups, shares=shares)
        for name, shares in (("shared", True), ("plain", False))
    }
    results: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in pairs}

    def kept(name: str) -> list[tuple[float, float]]:
        results[name].append(pairs[name][0]())
        return results[name][-1]

    seconds = timed({name: partial(kept, name) for name in pairs}, steps)
    np.testing.assert_allclose(results["shared"], results["plain"], rtol=TOLERANCE, atol=1e-6)
    return {
        "seconds": {name: times[WARM_UP:] for name, times in seconds.items()},
        "tokens": {name: tokens for name, (_, tokens) in pairs.items()},
    }


def recipe_of(args: argparse.Namespace, folder: Path) -> Recipe:
    """The recipe of the options, or one for a model that is written into the folder."""
    if args.recipe:
        return load_recipe(args.recipe, args.keys)
    write_model(folder, args.layers, args.hidden, args.vocab)
    return make_recipe(str(folder), args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for axis, default in (("gpus", 1), ("tp", 1), ("pp", 1), ("ep", 1)):
        parser.add_argument(f"--{axis}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--samples", type=Path, help="of the recipe, by megarl rollout")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("keys", nargs="*", help="of the recipe: a.b=c")
    args = parser.parse_args()
    args.longest = args.prompt_tokens + args.response_tokens
    if device.DEVICE == "cpu":
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(args, Path(folder))
        groups = open_samples(args.samples).groups(1) if args.samples else made_up(args)
        result = run_world(recipe.placement.gpus, work, recipe, groups, args.steps)
    seconds = result["seconds"]
    row = {
        "ratio": statistics.median(
            plain / shared
            for plain, shared in zip(seconds["plain"], seconds["shared"], strict=True)
        ),
        **{f"{name}_s": statistics.median(times) for name, times in seconds.items()},
        **{f"{name}_tokens": tokens for name, tokens in result["tokens"].items()},
    }
    text = "\n".join(f"{name:20} {value}" for name, value in row.items())
    print(json.dumps(row) if args.json else text)


if __name__ == "__main__":
    main()
