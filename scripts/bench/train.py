"""What megarl's training step costs over a bare megatron-core loop: same model, batch, layout, processes.

The two take turns, step by step, so that other work of the machine affects both. Prints tokens per second of each,
the ratio (median over pairs of steps), and the share of the GPUs' peak where it is known. Losses and gradient norms of
every step must agree, or the bench fails. One option at most names another step that megarl's is compared with. Keys of
a recipe (train.recompute.moe=1) are those of megarl's step, which is compared with megarl's step without them, in the
same layout, with weights of its own in the same process. --without compares it with megarl's own step without the
comparison of replicas (run.compare_replicas_every), or without all of the search for silent faults, which also looks
for numbers that are not finite. --old-logprobs compares it with a step of --updates updates before which all old
log-probabilities are computed, and not those alone which that setting needs. With --cp-auto rows are split by their
length over up to --longest / --budget data-parallel ranks, and the step that it is compared with splits all rows over
so many, as a fixed train.cp would: both have --budget tokens on a rank.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from megarl.placement.roles import resolve
from megarl.placement.train_layout import TrainLayout

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import yaml

from megarl import device
from megarl.algos.statistics import GRAD_NORM, LOSS, TOKENS, Statistic
from megarl.config import Recipe
from megarl.config.loading import overlaid
from megarl.device import Address
from megarl.training import flops
from megarl.training.batching import SampleRef, Update, plan_updates
from megarl.types import TrainSequence

if TYPE_CHECKING:
    from megarl.training.policy import PolicyRank
    from megarl.training.shares import UpdateShare

TIMEOUT_S = 600.0
LR = 1e-4
WARM_UP = 2
TOLERANCE = 1e-3
# of the steps that megarl's is compared with, those that have the same loss and gradient norm in every step
WITH_OWN_WEIGHTS = {"bare", "without_keys"}


def write_model(folder: Path, layers: int, hidden: int, vocab_size: int) -> None:
    """A Qwen3-MoE checkpoint with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,  # type: ignore[call-arg]
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden // 2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=32768,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Comparison:
    """What megarl's step is compared with.

    num_own: of the step's updates, those without a pass of old logprobs. plain: the recipe without the given keys.
    """

    other: str = "bare"
    updates: int = 1
    num_own: int = 1
    plain: Recipe | None = None


def make_recipe(path: str, args: argparse.Namespace, cp: int | str = 1) -> Recipe:
    axes = {"tp": args.tp, "pp": args.pp, "ep": args.ep, "cp": cp}
    return Recipe.model_validate(
        {
            "run": {"name": "bench", "steps": 1, "timeout_s": TIMEOUT_S},
            "model": {"path": path, "dtype": args.dtype},
            "data": {"train": "none", "max_prompt_tokens": args.longest - 1},
            "reward": {"function": "none"},
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 1},
            "train": {**axes, "lr": LR, "tokens_per_micro_batch": args.budget},
            "placement": {"gpus": args.gpus},
        }
    )


def make_sequences(count: int, longest: int, vocab_size: int) -> list[TrainSequence]:
    """Random tokens of log-normal lengths; the latter three quarters of each are learnt from."""
    rng = np.random.default_rng(0)
    sequences = []
    for drawn in rng.lognormal(np.log(longest / 4), 0.6, count):
        length = int(np.clip(drawn, 8, longest))
        mask_T = np.arange(length) >= length // 4
        weight_T = mask_T.astype(np.float32)
        tokens_T = rng.integers(0, vocab_size, length)
        sequences.append(
            TrainSequence(tokens_T, mask_T, weight_T, 0 * weight_T, advantage_T=weight_T)
        )
    return sequences


def cross_entropy(
    logp_T: Any, entropy_T: Any, old_logp_T: Any, targets: Any
) -> tuple[Any, dict[Statistic, Any]]:
    """Megatron's own loss, as megarl's steps take one."""
    return -(logp_T * targets.loss_mask_T).sum(), {TOKENS: targets.loss_mask_T.sum()}


@contextmanager
def without(what: str, trainer: Any) -> Iterator[None]:
    """Train inside the block without comparing replicas, or without any search for silent faults."""
    finiteness = trainer._model.finiteness
    with ExitStack() as stack:
        if what == "comparison":
            stack.enter_context(patch.object(trainer._guard, "_every", None))
            yield
            return
        for owner, name in (
            (trainer._guard, "check"),
            (finiteness, "_see"),
            (finiteness, "_see_gradients"),
        ):
            stack.enter_context(patch.object(owner, name, lambda *_: None))
        yield


def planned(
    recipe: Recipe,
    sequences: Sequence[TrainSequence],
    updates: int,
    layout: TrainLayout,
    work_of: Callable[[int], float],
    cp: int = 1,
) -> Sequence[Update]:
    """The updates of a step on these sequences; work_of: the operations of one by its length.

    cp: ranks that have the micro-batches of each data-parallel rank of the plan, and split all of their rows.
    """
    refs = [
        SampleRef(index, 0, len(sequence.token_ids_T), int(sequence.loss_mask_T.sum()))
        for index, sequence in enumerate(sequences)
    ]
    return plan_updates(
        refs,
        updates=updates,
        dp=layout.dp // cp,
        token_budget=cp * recipe.train.tokens_per_micro_batch,
        aggregation="token_mean",
        work=work_of,
        align=layout.tokens_align,
        max_cp=layout.max_cp // cp,
    )


def parts_of(
    plans: Sequence[Update], sequences: Sequence[TrainSequence], dp_rank: int, cp: int = 1
) -> list[Any]:
    """What a data-parallel rank has of the updates; cp: as of `planned`."""
    from megarl.parallel.pipeline import Norms
    from megarl.training.policy import UpdateShare

    parts = []
    for update in plans:
        batches = [
            [replace(sequences[ref.group], cp=cp * ref.cp) for ref in batch]
            for batch in update.micro_batches[dp_rank // cp]
        ]
        norms = Norms(update.denominator, update.tokens, update.loss_tokens)
        parts.append(UpdateShare(batches, norms))
    return parts


def timed(contenders: Mapping[str, Callable[[], Any]], steps: int) -> dict[str, list[float]]:
    """The seconds of each contender's steps, those to warm up first; they take turns, in changing order."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for step in range(steps + WARM_UP):
        order = list(contenders) if step % 2 else list(contenders)[::-1]
        results_by_name = {}
        for name in order:
            dist.barrier()
            started = time.perf_counter()
            results_by_name[name] = contenders[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
        if WITH_OWN_WEIGHTS & contenders.keys():
            np.testing.assert_allclose(*results_by_name.values(), rtol=TOLERANCE)
    return seconds


def step_of(
    trainer: PolicyRank, parts: Sequence[UpdateShare], num_own: int = 1
) -> Callable[[], tuple[float, float]]:
    """A step of these updates, which gives the last one's loss and gradient norm; num_own: as of Comparison."""

    def step() -> tuple[float, float]:
        metrics: dict[Statistic, Any] = {}
        passes = [trainer.token_outputs(part.micro_batches) for part in parts[num_own:]]
        for part, old_logp in zip(parts, [None] * num_own + passes, strict=True):
            metrics = trainer.train_step(replace(part, old_logp=old_logp), LR, cross_entropy)
        return metrics.get(LOSS, (0.0,))[0], metrics[GRAD_NORM][0]

    return step


def with_other_keys(meet: Address, recipe: Recipe, first: PolicyRank) -> PolicyRank:
    """A second rank of this process, in the groups of the first one, whose layout it shares."""
    from megarl.parallel import groups
    from megarl.training.policy import PolicyRank

    with (
        patch.object(groups, "join"),
        patch.object(groups, "open_communicators", return_value=first.communicator_bytes()),
    ):
        return PolicyRank(first.rank, resolve(recipe).policy, meet)


def work(
    rank: int,
    meet: Address,
    recipe: Recipe,
    sequences: Sequence[TrainSequence],
    steps: int,
    comparison: Comparison,
) -> dict[str, Any]:
    """Both contenders on one rank; the seconds of their steps."""
    from megarl.training.policy import PolicyRank

    trainer = PolicyRank(rank, resolve(recipe).policy, meet)
    layout, shape = trainer.layout, trainer.shape
    work_of = flops.train_work(shape)
    plan_of = partial(planned, recipe, sequences, comparison.updates, layout, work_of)
    plans = plan_of()
    dp_rank = layout.coords(rank).dp
    parts = parts_of(plans, sequences, dp_rank)
    rows = [trainer._pack(batch) for part in parts for batch in part.micro_batches]
    ours = step_of(trainer, parts, comparison.num_own)
    other = comparison.other

    def with_less() -> tuple[float, float]:
        with without(other.removeprefix("without_"), trainer):
            return ours()

    theirs: Callable[[], tuple[float, float]] = with_less
    if other == "bare":
        from scripts.bench.train_bare import Bare

        bare = Bare(recipe, shape, layout, rank, trainer.params())
        theirs = partial(bare.step, rows, LR)
    elif comparison.plain:
        theirs = step_of(with_other_keys(meet, comparison.plain, trainer), parts)
    elif other == "whole_pass":
        theirs = step_of(trainer, parts, num_own=0)
    elif other == "fixed_cp":
        fixed_parts = parts_of(plan_of(layout.max_cp), sequences, dp_rank, layout.max_cp)
        theirs = step_of(trainer, fixed_parts, comparison.num_own)
    seconds = timed({"megarl": ours, other: theirs}, steps)
    kept = {name: times[WARM_UP:] for name, times in seconds.items()}
    tokens = sum(update.tokens for update in plans)
    total = sum(work_of(len(sequence.token_ids_T)) for sequence in sequences)
    return {"seconds": kept, "tokens": tokens, "flops": total, "micro_batches": len(rows)}


def run_rank(
    rank: int, meet: Address, pipe: Connection, work: Callable[..., Any], *args: Any
) -> None:
    pipe.send(work(rank, meet, *args))


def run_world(world_size: int, work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Rank 0's figures of `work(rank, address of the store, *args)`, which every rank runs.

    Raises RuntimeError when a rank fails, which its own traceback explains.
    """
    context = multiprocessing.get_context("spawn")
    store = device.host_store(TIMEOUT_S)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=run_rank, args=(rank, device.address_of(store), theirs, work, *args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        figures_by_rank: dict[int, dict[str, Any]] = {}
        while len(figures_by_rank) < world_size:
            for pipe in wait(
                [pending for rank, pending in enumerate(pipes) if rank not in figures_by_rank],
                TIMEOUT_S,
            ):
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                figures_by_rank[rank] = pipes[rank].recv()
        return figures_by_rank[0]
    except EOFError as error:
        raise RuntimeError("a rank ended without figures: see above") from error
    finally:
        for process in processes:
            process.kill()
            process.join()


def figures(result: dict[str, Any], gpus: int, other: str) -> dict[str, Any]:
    """What is told of a run; seconds are of whole steps."""
    ours, others = result["seconds"]["megarl"], result["seconds"][other]
    row = {
        "ratio": statistics.median(b / a for a, b in zip(ours, others, strict=True)),
        "megarl_tokens_per_s": result["tokens"] / statistics.median(ours),
        f"{other}_tokens_per_s": result["tokens"] / statistics.median(others),
        "tokens": result["tokens"],
        "micro_batches": result["micro_batches"],
        "flops": result["flops"],
        "tflops_per_gpu": result["flops"] / statistics.median(ours) / gpus / 1e12,
        "mfu": None,
    }
    peak = flops.peak_flops(torch.cuda.get_device_name()) if device.DEVICE == "cuda" else None
    if peak:
        row["mfu"] = flops.mfu(result["flops"], statistics.median(ours), gpus, peak)
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes of the model, the batch and the layout."""
    for axis, default in (("gpus", 1), ("tp", 1), ("pp", 1), ("ep", 1)):
        parser.add_argument(f"--{axis}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    # 1,024 give the output layer a tenth of all FLOPs, its share in Qwen3-30B-A3B. Megatron's own loss counts padding.
    parser.add_argument("--vocab", type=int, default=1024, help="a multiple of 128 x TP")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")


def add_comparisons(parser: argparse.ArgumentParser) -> None:
    """What megarl's step is compared with."""
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--without", choices=["guard", "comparison"], help="its cost alone")
    other.add_argument("--old-logprobs", choices=["train", "engine"], help="their pass alone")
    other.add_argument("--cp-auto", action="store_true", help="rows split by their length")
    other.add_argument("keys", nargs="*", default=[], help="of the recipe: train.a.b=c")
    parser.add_argument("--updates", type=int, default=4, help="of a step with --old-logprobs")


def comparison_of(args: argparse.Namespace, plain: Recipe) -> Comparison:
    """What the options compare megarl's step with; plain: the recipe without keys."""
    if args.keys:
        return Comparison("without_keys", plain=plain)
    if args.cp_auto:
        return Comparison("fixed_cp")
    if args.old_logprobs:
        num_own = 1 if args.old_logprobs == "train" else args.updates
        return Comparison("whole_pass", args.updates, num_own)
    return Comparison(f"without_{args.without}" if args.without else "bare")


def overlay_of(keys: Sequence[str]) -> dict[str, Any]:
    """The tree of `a.b=c`, whose values are YAML."""
    tree: dict[str, Any] = {}
    for key in keys:
        names, _, value = key.partition("=")
        *branches, leaf = names.split(".")
        branch = tree
        for name in branches:
            branch = branch.setdefault(name, {})
        branch[leaf] = yaml.safe_load(value)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    add_comparisons(parser)
    args = parser.parse_args()
    os.environ |= (
        {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} if device.DEVICE == "cpu" else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers, args.hidden, args.vocab)
        plain = make_recipe(folder, args, cp="auto" if args.cp_auto else 1)
        recipe = overlaid(plain, overlay_of(args.keys))
        if resolve(recipe).policy.layout != resolve(plain).policy.layout:
            parser.error("the keys change the layout, which both steps have to share")
        sequences = make_sequences(args.samples, args.longest, args.vocab)
        comparison = comparison_of(args, plain)
        result = run_world(args.gpus, work, recipe, sequences, args.steps, comparison)
        row = figures(result, args.gpus, comparison.other)
    print(
        json.dumps(row)
        if args.json
        else "\n".join(f"{name:20} {value}" for name, value in row.items())
    )


if __name__ == "__main__":
    main()
