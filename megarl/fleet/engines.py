"""The SGLang engines of a run as the controller sees them: every method is one call to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl import device
from megarl.cluster.actor import Ref, Worker
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.device import address_of, host_store
from megarl.fleet.rank_groups import RolloutBatch
from megarl.fleet.sampling_phase import SamplingPhase
from megarl.fleet.step_fit import EngineHistory
from megarl.placement.engine_layout import EngineLayout
from megarl.rollout.load_balancing import RequestBalancer
from megarl.rollout.sglang.arguments import NodeSpan
from megarl.samples.buffer import Entry, RolloutBuffer
from megarl.types import Prompt
from megarl.types.sampling import Sampling


class Engines:
    """Engine e is on GPU slots from layout.first + e * tp. Engines on shared slots release memory."""

    def __init__(
        self, cluster: Cluster, recipe: Recipe, layout: EngineLayout, shared: frozenset[int]
    ) -> None:
        self._cluster = cluster
        self._recipe = recipe
        self._slots = [layout.first + index * layout.tp for index in range(layout.count)]
        self.workers = [
            cluster.worker(f"engine {index}", slot) for index, slot in enumerate(self._slots)
        ]
        # rendezvous of engines on several nodes, served by this process
        self._stores: list[Any] = []
        self._further_nodes: list[Worker] = []
        self._started: dict[Ref, str] = {}
        # SGLang's ranks release memory together: an engine with one shared GPU releases memory on all of its GPUs.
        unshared = layout.engines_without(shared)
        self._sharing = [
            worker for index, worker in enumerate(self.workers) if index not in unshared
        ]
        self._with_own_gpus = [self.workers[index] for index in unshared]
        self._history = EngineHistory()
        self._dealers: dict[
            int, RequestBalancer
        ] = {}  # of all rounds on so many engines; they know their capacity once started

    @property
    def measures_shared_memory(self) -> bool:
        """Whether engines must start after the ranks: on a GPU SGLang sizes its KV cache by the memory that is free."""
        return device.DEVICE == "cuda" and bool(self._sharing)

    def start(self) -> dict[Ref, str]:
        """Begin to start all engines, once; returns the calls to wait for."""
        for index, (worker, slot) in enumerate(zip(self.workers, self._slots, strict=True)):
            self._start(index, worker, slot)
        return self._started

    def _start(self, index: int, worker: Worker, slot: int) -> None:
        """Start an engine, with a process on each further node that it spans."""
        recipe = self._recipe
        if recipe.engine_nodes > 1:
            span = self._span(recipe)
        else:
            span = None
        self._started[worker.start("megarl.rollout.worker:RolloutWorker", recipe, index, span)] = (
            worker.name
        )
        if span is None:
            return
        for node in range(1, span.nodes):
            name = f"{worker.name}, node {node}"
            at = slot + node * recipe.placement.gpus_per_node
            part = self._cluster.worker(name, at)
            node_span = replace(span, node=node, endpoint=span.endpoint.without_secret)
            self._started[
                part.start("megarl.rollout.worker:EnginePart", recipe, index, node_span)
            ] = name
            part.watch("fail")
            self._further_nodes.append(part)

    def _span(self, recipe: Recipe) -> NodeSpan:
        """The first node of an engine, with a new store and endpoint for all of its nodes."""
        from megarl.rollout.sglang.relay import new_endpoint  # ZeroMQ comes with SGLang

        self._stores.append(host_store(recipe.run.timeout_s, self._cluster.host))
        return NodeSpan(recipe.engine_nodes, 0, address_of(self._stores[-1]), new_endpoint())

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> RolloutBatch:
        """One group of whole responses per prompt, in order."""
        fresh = RolloutBuffer[Ref]().admitted(prompts, sampling.stream, sampling.group_size)
        entries, _ = self.begin(fresh.entries, sampling).result()
        return RolloutBatch.of(entries)

    def begin(
        self, entries: Sequence[Entry[Ref]], sampling: Sampling, *, beside_training: bool = False
    ) -> SamplingPhase:
        """Begin one phase of the entries; each group goes to the engine with the fewest expected tokens.

        beside_training: on the engines that share no GPU with other models, whose memory is handed over meanwhile.
        """
        if beside_training:
            workers = self._with_own_gpus
        else:
            workers = self.workers
        if len(workers) not in self._dealers:
            capacities = self._cluster.call_all(workers, "capacity")
            self._dealers[len(workers)] = RequestBalancer(capacities, sampling.new_tokens(0))
        balancer = self._dealers[len(workers)]
        groups = self._recipe.rollout.engine.dp
        begun = SamplingPhase(
            self._cluster, workers, balancer, groups, entries, sampling, self._history
        )
        begun.begin()
        return begun

    def versions(self) -> list[int]:
        """The version of the weights in each engine, as the engine states it."""
        return self._cluster.call_all(self.workers, "version")

    def check(self) -> None:
        """Raises WorkerFailed with an engine's error if one of the engine's processes has died."""
        self._cluster.call_all(self.workers, "check")

    def release_memory(self) -> None:
        self._cluster.call_all(self._sharing, "release_memory")

    def resume_weights(self) -> None:
        self._cluster.call_all(self._sharing, "resume_weights")

    def resume_cache(self) -> None:
        self._cluster.call_all(self._sharing, "resume_cache")

    def shutdown(self) -> None:
        self._cluster.call_all([*self.workers, *self._further_nodes], "shutdown")
