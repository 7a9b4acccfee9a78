"""What one step costs the controller: planning, calls to all ranks, and waiting for their results. No rank computes.

Ray, the calls and their arguments are those of a run: 8,192 samples of 512 groups, 16 updates, dealt to the ranks by
megarl.training.batching. Ranks are simulated: a few processes stand for all of them and get the calls of each, so that
calls, arguments, references and results are those of that many ranks, but not the processes, their memory and network.
docs/bench/controller.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.cluster.actor import at_arrival
from megarl.training.calls import TrainCall

sys.path.insert(0, str(Path(__file__).parents[2]))

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.controller.samples import samples_of
from megarl.fleet.engines import Engines
from megarl.fleet.fleet import Fleet
from megarl.fleet.memory import MemoryScheduler
from megarl.fleet.rank_groups import (
    AuxiliaryRanks,
    PerTokenResults,
    PolicyRanks,
    RolloutBatch,
    _merged,
    _share,
)
from megarl.fleet.step_fit import EngineHistory
from megarl.placement.train_layout import TrainLayout
from megarl.recovery.engine_processes import EngineProcess, EngineProcesses
from megarl.rollout.load_balancing import Capacity
from megarl.training.batching import SampleRef, Update, refs_of
from megarl.types import Prompt
from megarl.types.sampling import Sampling
from scripts.bench.batching import QWEN3_30B
from scripts.bench.controller_answers import PROMPT_TOKENS
from scripts.bench.counted_calls import COUNTS, Counted, CountedCluster, CountedEngine, size_of

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    8: (TrainLayout(8, tp=2, pp=2, ep=2), 4),
    16: (TrainLayout(16, tp=2, pp=2, ep=2), 4),
    64: (TrainLayout(64, tp=4, pp=4, ep=4), 8),
    512: (TrainLayout(512, tp=4, pp=16, ep=16), 16),
}  # by ranks, with the number of engines
GPUS_PER_NODE = 8
LONGEST, SAMPLES = 20_000, 16
MEAN, SIGMA = 7.5, 0.8  # of the logarithm of a response's tokens: median 1,800
TOKEN_BYTES = 13  # its id, its logprob and whether it was sampled; texts are left out
Figures = dict[str, float]
COLUMNS = (
    "dispatch_s", "dispatch_cpu_s", "collect_s", "collect_cpu_s", "calls", "references", "puts", "pickled_bytes",
    "stored_bytes", "node_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Clock:
    """Wall seconds, and the driver process's own on a core: Ray's threads in it included."""

    wall_s: float
    cpu_s: float

    @staticmethod
    def now() -> Clock:
        return Clock(time.perf_counter(), time.process_time())

    def since(self, name: str) -> Figures:
        end = Clock.now()
        return {f"{name}_s": end.wall_s - self.wall_s, f"{name}_cpu_s": end.cpu_s - self.cpu_s}


def tell(figures: Mapping[str, Any]) -> None:
    """At once, to who waits: with 512 ranks a part may take minutes."""
    print({key: value for key, value in figures.items() if value}, file=sys.stderr, flush=True)


class Step:
    """Everything of one step for `ranks` simulated ranks on the processes that there are."""

    def __init__(
        self, cluster: Cluster, hosts: Sequence[Worker], ranks: int, recipe: Recipe
    ) -> None:
        layout, num_engines = LAYOUTS[ranks]
        self.layout, self.count, self.weighs = layout, dict.fromkeys(COUNTS, 0.0), False
        self.cluster: Any = CountedCluster(cluster, self)
        workers = [Counted(f"rank {rank}", hosts[rank % len(hosts)], self) for rank in range(ranks)]
        self.trainers, self.critic = (
            self._ranks(kind, recipe, workers) for kind in (PolicyRanks, AuxiliaryRanks)
        )
        self.engines: Any = Engines.__new__(Engines)
        processes: Any = EngineProcesses.__new__(EngineProcesses)
        processes.engines = [
            EngineProcess(
                index=index,
                slot=index,
                shares=True,
                worker=CountedEngine(f"engine {index}", hosts[index % len(hosts)], self),
                state="ready",
                capacity=Capacity(sequences=sys.maxsize, tokens=sys.maxsize),
            )
            for index in range(num_engines)
        ]
        self.engines.__dict__.update(
            _cluster=self.cluster, _recipe=recipe, processes=processes, _balancers={},
            _history=EngineHistory(),
        )  # fmt: skip

    def _ranks(self, kind: type[Any], recipe: Recipe, workers: Sequence[Worker]) -> Any:
        ranks = object.__new__(kind)
        ranks.__dict__.update(
            _cluster=self.cluster, _recipe=recipe, _shape=QWEN3_30B, _layout=self.layout,
            processes=SimpleNamespace(workers=workers),
            _shared=frozenset(worker.slot for worker in workers),
        )  # fmt: skip
        return ranks

    def counted(self, work: Callable[[], Any]) -> tuple[Any, Figures]:
        """What it returns; its seconds and counts."""
        self.count.update(dict.fromkeys(COUNTS, 0.0))
        start = Clock.now()
        result = work()
        tell(figures := start.since("step") | self.count)
        return result, figures

    def fan_out(self, send: Callable[[], dict[Ref, str]]) -> Figures:
        """One call to every rank, the two halves apart."""
        self.count.update(dict.fromkeys(COUNTS, 0.0))
        start = Clock.now()
        calls = send()
        tell(figures := start.since("dispatch"))
        start = Clock.now()
        for parts in zip(*self.cluster.gather(calls), strict=True):
            _merged(parts)
        return figures | start.since("collect") | self.count


def _groups(share: Sequence[Update]) -> list[int]:
    """The groups whose samples are in a share, in ascending order."""
    return sorted({ref.group for ref in refs_of(share)})


def inline(step: Step, updates: Sequence[Update], refs: Sequence[Ref]) -> dict[Ref, str]:
    """Each call carries its rank's share and a reference to each group of it."""
    calls = {}
    for rank, worker in enumerate(step.trainers.workers):
        share = _share(updates, step.layout.coords(rank).dp)
        needed = _groups(share)
        call = worker.call("train_listed", share, needed, *(refs[group] for group in needed))
        calls[call] = worker.name
    return calls


def shares_put(step: Step, updates: Sequence[Update], refs: Sequence[Ref]) -> dict[Ref, str]:
    """Shares and lists of groups once for all ranks that have the same; groups by reference as before."""
    shares = [_share(updates, dp) for dp in range(step.layout.dp)]
    needed = [_groups(share) for share in shares]
    put = [
        (step.cluster.put(share), step.cluster.put(ids))
        for share, ids in zip(shares, needed, strict=True)
    ]
    calls = {}
    for rank, worker in enumerate(step.trainers.workers):
        dp = step.layout.coords(rank).dp
        share, ids = put[dp]
        call = worker.call("train_listed", share, ids, *(refs[group] for group in needed[dp]))
        calls[call] = worker.name
    return calls


def assigned(step: Step, updates: Sequence[Update], refs: Sequence[Ref]) -> dict[Ref, str]:
    """megarl's: the first rank of those with the same share makes one object of its samples for all of them."""
    shares = step.trainers._shares(updates, refs)
    calls = {}
    for rank, worker in enumerate(step.trainers.workers):
        share = shares[step.layout.coords(rank).dp]
        call = TrainCall(
            algorithm="grpo",
            updates=at_arrival(share.updates),
            groups=at_arrival(share.groups),
            lr=1e-6,
            state=None,
        )
        calls[worker.call("train", call)] = worker.name
    return calls


def everything(step: Step, updates: Sequence[Update], refs: Sequence[Ref]) -> dict[Ref, str]:
    """The whole plan and every group to every rank, which picks what is its own."""
    calls = {}
    for rank, worker in enumerate(step.trainers.workers):
        call = worker.call("train_own", updates, step.layout.coords(rank).dp, *refs)
        calls[call] = worker.name
    return calls


WAYS = {"dealt": assigned, "shares_put": shares_put, "inline": inline, "everything": everything}


def node_bytes(
    way: str, layout: TrainLayout, updates: Sequence[Update], group_bytes: Sequence[int]
) -> int:
    """Bytes of samples that come to all nodes' object stores together, wherever the engines put them."""
    total = 0
    for first in range(0, layout.world_size, GPUS_PER_NODE):
        node_coords = [
            layout.coords(rank)
            for rank in range(first, min(first + GPUS_PER_NODE, layout.world_size))
        ]
        fetching = {
            at.dp for at in node_coords if way != "dealt" or (at.tp, at.cp, at.pp) == (0, 0, 0)
        }
        total += sum(own_bytes(updates, dp) for dp in {at.dp for at in node_coords} - fetching)
        groups = {group for dp in fetching for group in _groups(_share(updates, dp))}
        groups = range(len(group_bytes)) if way == "everything" else groups
        total += sum(group_bytes[group] for group in groups)
    return total


def own_bytes(updates: Sequence[Update], dp: int) -> int:
    """Of the samples that a share names."""
    refs = [ref for update in updates for batch in update.micro_batches[dp] for ref in batch]
    return sum(TOKEN_BYTES * ref.response_length for ref in refs)


def prompts_of(groups: int, seed: int) -> tuple[list[Prompt], dict[str, list[int]]]:
    """Prompts, and the lengths of the responses to each."""
    drawn = (
        np.random.default_rng(seed)
        .lognormal(MEAN, SIGMA, (groups, SAMPLES))
        .clip(1, LONGEST - PROMPT_TOKENS)
    )
    ids = tuple(range(PROMPT_TOKENS))
    prompts = [Prompt(str(index), "word" * PROMPT_TOKENS, ids, "42") for index in range(groups)]
    return prompts, {
        prompt.id: lengths
        for prompt, lengths in zip(prompts, drawn.astype(int).tolist(), strict=True)
    }


def measure(
    step: Step, prompts: Sequence[Prompt], updates: int, with_all: bool
) -> dict[str, Figures]:
    """The figures of each part of a step, and of each way to send the updates."""
    figures_by_part: dict[str, Figures] = {}
    sampling = Sampling(SAMPLES, LONGEST, stream=(1, 1))
    rollout, figures_by_part["sample"] = step.counted(
        lambda: step.engines.sample(prompts, sampling)
    )
    figures_by_part["sample"]["result_bytes"] = float(
        sum(size_of(summary) for summary in rollout.summaries)
    )
    samples = samples_of(rollout.summaries, "grpo")
    plan, figures_by_part["plan"] = step.counted(lambda: step.trainers.plan_of("grpo", samples))
    assert len(plan) == updates
    figures_by_part |= rest(step, samples, rollout, plan)
    return figures_by_part | ways(step, plan, rollout, with_all)


def ways(
    step: Step, plan: Sequence[Update], rollout: RolloutBatch, with_all: bool
) -> dict[str, Figures]:
    """Each way to send the updates: what is pickled is weighed without a call, then the calls are made and timed.

    everything: only weighed, unless `with_all`.
    """
    group_bytes = [
        TOKEN_BYTES * int(summary.response_lengths_G.sum()) for summary in rollout.summaries
    ]
    figures_by_way = {}
    for name, way in WAYS.items():
        step.weighs = True
        step.counted(lambda way=way: way(step, plan, rollout.refs))
        step.weighs, weighed = False, dict(step.count)
        is_timed = with_all or name != "everything"
        timed = step.fan_out(lambda way=way: way(step, plan, rollout.refs)) if is_timed else {}
        figures_by_way[name] = timed | weighed
        figures_by_way[name]["node_bytes"] = float(node_bytes(name, step.layout, plan, group_bytes))
        tell({name: figures_by_way[name]})
    return figures_by_way


def rest(
    step: Step, samples: Sequence[SampleRef], rollout: RolloutBatch, plan: Sequence[Update]
) -> dict[str, Figures]:
    """The other calls of a step: memory that changes hands, an exchange, and what a critic adds."""
    scheduler = MemoryScheduler(step.trainers, step.engines)
    fleet: Any = Fleet.__new__(Fleet)
    message = {"run_id": "0" * 16, "version": 1, "attempt": 1}
    sessions = SimpleNamespace(trainers={}, engine_message=lambda *_: message)
    fleet.__dict__.update(
        engines=step.engines,
        trainers=step.trainers,
        attempts=0,
        _have_sessions=True,
        _sessions=sessions,
    )

    values: list[PerTokenResults] = []

    def exchange() -> None:
        step.cluster.gather(fleet._exchange(1, ["weights"]))
        step.engines.versions()

    parts: dict[str, Callable[[], Any]] = {
        "to_train": lambda: scheduler.onload_for("train"),
        "to_reshard": lambda: scheduler.onload_for("reshard"),
        "exchange": exchange,
        "to_rollout": lambda: scheduler.onload_for("rollout"),
        "values": lambda: values.append(
            step.critic._per_token("values", "ppo", plan, rollout.refs, plan)
        ),
        "train_on_values": lambda: step.trainers.train(
            "grpo", samples, rollout.refs, 1e-6, token_values=values.pop()
        ),
    }
    return {name: step.counted(work)[1] for name, work in parts.items()}


def show(rows_by_ranks: Mapping[str, Mapping[str, Figures]]) -> None:
    """A table for each number of ranks; sizes in MB, seconds of the wall and of the driver's own process."""
    for ranks, rows in rows_by_ranks.items():
        print(f"\n{ranks} ranks\n{'':16}", *(f"{name:>15}" for name in COLUMNS))
        for name, row in rows.items():
            seconds = {
                "dispatch_s": row.get("step_s", 0.0),
                "dispatch_cpu_s": row.get("step_cpu_s", 0.0),
            } | row
            cells = [
                (seconds.get(key, 0.0) / 1e6 if "bytes" in key else seconds.get(key, 0.0))
                for key in COLUMNS
            ]
            print(f"{name:16}", *(f"{cell:15.4g}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], choices=LAYOUTS)
    parser.add_argument(
        "--hosts", type=int, default=8, help="processes that stand for all ranks and engines"
    )
    parser.add_argument("--groups", type=int, default=512, help="of 16 samples")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument(
        "--everything", action="store_true", help="time the way that gives each rank all too"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: ranks, part, figure"
    )
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    recipe = load_recipe(
        ROOT / "recipes/quickstart.yaml",
        [
            f"rollout.prompts_per_step={args.groups}", f"rollout.samples_per_prompt={SAMPLES}",
            f"train.updates_per_step={args.updates}", "train.tokens_per_micro_batch=32768",
        ],
    )  # fmt: skip
    prompts, lengths = prompts_of(args.groups, args.seed)
    rows_by_ranks = {}
    with Cluster(args.hosts) as cluster:
        hosts = [cluster.worker(f"process {index}", index) for index in range(args.hosts)]
        target = "scripts.bench.controller_answers:Answers"
        cluster.gather({host.start(target, lengths): host.name for host in hosts})
        for ranks in args.ranks:
            rows_by_ranks[str(ranks)] = measure(
                Step(cluster, hosts, ranks, recipe), prompts, args.updates, args.everything
            )
    if args.json:
        print(json.dumps(rows_by_ranks))
    else:
        show(rows_by_ranks)


if __name__ == "__main__":
    main()
