"""The SGLang engines of a run as the controller sees them: every method is one call to all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl import device
from megarl.cluster.actor import Ref
from megarl.cluster.failures import WorkerFailed
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.fleet.fault_members import fault_members
from megarl.fleet.rank_groups import RolloutBatch
from megarl.fleet.sampling_phase import SamplingPhase
from megarl.fleet.step_fit import EngineHistory
from megarl.placement.engine_layout import EngineLayout
from megarl.printable import Say
from megarl.recovery.engine_processes import EngineProcess, EngineProcesses
from megarl.recovery.external_engines import ExternalEngineProcesses
from megarl.rollout.load_balancing import RequestBalancer
from megarl.samples.buffer import Entry, RolloutBuffer
from megarl.samples.expert_load import ExpertLoad
from megarl.types import FaultMember, Prompt, SilentFault
from megarl.types.sampling import Sampling


class Engines:
    """Engine e is on GPU slots from layout.first + e * tp. Engines on shared slots release memory.

    Calls go to the engines that are alive; what becomes of the others is the matter of `processes`.
    """

    def __init__(
        self,
        cluster: Cluster,
        recipe: Recipe,
        layout: EngineLayout,
        shared: frozenset[int],
        say: Say,
    ) -> None:
        self._cluster = cluster
        self._recipe = recipe
        self.processes = _processes(cluster, recipe, layout, shared, say)
        self._history = EngineHistory()
        # of all rounds on so many engines
        self._balancers: dict[int, RequestBalancer] = {}
        self._last_phase: SamplingPhase | None = None

    @property
    def measures_shared_memory(self) -> bool:
        """Whether engines must start after the ranks: on a GPU SGLang sizes its KV cache by the memory that is free."""
        is_shared = any(engine.shares for engine in self.processes.engines)
        return device.DEVICE == "cuda" and is_shared

    @property
    def num_engines(self) -> int:
        """How many there are, those among them that are started anew."""
        return len(self.processes.engines)

    @property
    def have_own_gpus(self) -> bool:
        """Whether an engine shares its GPUs with no other model."""
        return not all(engine.shares for engine in self.processes.engines)

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
        engines = [
            engine for engine in self.processes.engines if not (beside_training and engine.shares)
        ]
        self.processes.is_beside_training = beside_training
        begun = SamplingPhase(
            self._cluster,
            self.processes,
            engines,
            self._balancer(engines, sampling),
            self._recipe.rollout.engine.dp,
            entries,
            sampling,
            self._history,
        )
        self._last_phase = begun
        begun.begin()
        return begun

    def finish_phase(self) -> None:
        """Wait for the phase that was begun last, of which nobody will ask for the result.

        Where it has failed, calls are open: its engines are started anew, by the next reshard.
        """
        phase = self._last_phase
        self._last_phase = None
        if phase is None or phase.is_over:
            return
        if not phase.is_asked:
            with suppress(WorkerFailed):
                phase.result()
                return
        self._cluster.end_background(phase)
        self.processes.discard_all()

    def _balancer(self, engines: Sequence[EngineProcess], sampling: Sampling) -> RequestBalancer:
        if len(engines) not in self._balancers:
            self._balancers[len(engines)] = RequestBalancer(
                [None] * len(engines), sampling.new_tokens(0)
            )
        return self._balancers[len(engines)]

    def located(self, fault: SilentFault) -> SilentFault:
        """The fault of engines, with their names, GPUs and first nodes; of external ones with their names alone."""
        workers = {
            member.number: self.processes.engines[member.number].worker
            for member in fault.members
            if member.number < len(self.processes.engines)
        }
        if self._recipe.rollout.engine.external:
            return fault.located(
                {number: FaultMember(number, worker.name) for number, worker in workers.items()}
            )
        num_gpus = self._recipe.rollout.engine.tp // self._recipe.engine_nodes
        placement = self._recipe.placement
        return fault.located(fault_members(self._cluster, placement, workers, num_gpus))

    def versions(self) -> list[int]:
        """The version of the weights in each engine that is ready, as the engine states it."""
        return self._call(self.processes.ready, "version")

    def take_expert_load(self) -> npt.NDArray[np.int64]:
        """How many tokens chose each expert since the last call, [layers, experts], over all engines."""
        load = ExpertLoad()
        for counts_LE in self._call(self.processes.ready, "take_expert_load"):
            load.merge(counts_LE)
        return load.counts_LE

    def checksums(self) -> list[str]:
        """What external engines that are ready answer to `weights_checksum`."""
        return self._call(self.processes.ready, "weights_checksum")

    def release_memory(self) -> None:
        engines = [engine for engine in self._alive if engine.shares and not engine.is_released]
        self.processes.lend_memory()
        self._call(engines, "release_memory")
        for engine in engines:
            engine.is_released = engine.state != "lost"

    def resume_weights(self) -> None:
        self.processes.have_memory = True
        self._call([engine for engine in self._alive if engine.is_released], "resume_weights")

    def resume_cache(self) -> None:
        engines = [engine for engine in self._alive if engine.is_released]
        self._call(engines, "resume_cache")
        for engine in engines:
            engine.is_released = False

    def forget_ranks(self) -> None:
        """Have the engines unmap the parameters of training ranks that are gone; the next exchange maps new ones."""
        mapping = [engine for engine in self._alive if engine.has_session]
        for engine in self.processes.engines:
            engine.has_session = False
        self._call([engine for engine in mapping if engine.shares], "forget_ranks")

    def shutdown(self) -> None:
        """End the engines in their own way."""
        workers = [worker for engine in self._alive for worker in (engine.worker, *engine.parts)]
        # one that is lost has ended already
        self._cluster.outcomes({worker.call("shutdown"): worker.name for worker in workers})

    @property
    def _alive(self) -> list[EngineProcess]:
        return [engine for engine in self.processes.engines if engine.state in ("empty", "ready")]

    def _call(self, engines: Iterable[EngineProcess], method: str) -> list[Any]:
        """The answers of these engines to a call; those that are lost meanwhile give none."""
        asked = [(engine, engine.worker) for engine in engines]
        labels = {worker.call(method): worker.name for _, worker in asked}
        answers = []
        for (engine, worker), answer in zip(asked, self._cluster.outcomes(labels), strict=True):
            if isinstance(answer, Exception):
                self.processes.lose(engine, worker, answer)
            else:
                answers.append(answer)
        return answers


def _processes(
    cluster: Cluster,
    recipe: Recipe,
    layout: EngineLayout,
    shared: frozenset[int],
    say: Say,
) -> EngineProcesses:
    """Those of the run's own engines, or of external ones."""
    if recipe.rollout.engine.external:
        return ExternalEngineProcesses(cluster, recipe, say)
    first_slots = [layout.first + index * layout.tp for index in range(layout.count)]
    # SGLang's ranks release memory together: an engine with one shared GPU releases memory on all of its GPUs.
    unshared = layout.engines_without(shared)
    return EngineProcesses(cluster, recipe, first_slots, unshared, say)
