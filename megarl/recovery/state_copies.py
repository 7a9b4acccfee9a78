"""Copies of the training ranks' states in the memory of the run's nodes, made while engines sample.

Every node has a keeper. A rank's state is copied by the keeper of its own node before the rank computes again, and from
there by the keeper of the next node while the rank computes: so neither the death of a process nor that of a node loses
a copy. A generation is the states of all ranks after one step. The generation before stays until the new one is with
both keepers, so that there is always a whole one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megarl.cluster.actor import Ref, Worker, failure
from megarl.cluster.deadline import ENOUGH_ALIKE, Deadline
from megarl.cluster.failures import WorkerFailed, reported
from megarl.cluster.ray_session import Cluster
from megarl.printable import Say
from megarl.recovery.restarts import Restarts
from megarl.recovery.state_keeper import CopyCost, CopyName
from megarl.types import Metrics

_LOOK_S = 1.0
_KEEPER = "megarl.recovery.state_keeper:StateKeeper"


class CopiesLost(Exception):
    """No keeper has a rank's copy any more, though one had when the generation was chosen.

    ranks_are_untouched: whether no rank has got any part of the generation.
    """

    def __init__(self, problem: str, *, ranks_are_untouched: bool) -> None:
        super().__init__(problem)
        self.ranks_are_untouched = ranks_are_untouched


@dataclass(frozen=True)
class Generation:
    """The copies after a step. version: of the weights that engines had then. holders: by rank, nodes with a copy."""

    step: int
    version: int
    holders: Mapping[str, frozenset[int]]

    @property
    def is_usable(self) -> bool:
        """Whether every rank's copy is somewhere."""
        return all(self.holders.values())

    def with_holder(self, rank: str, node: int) -> Generation:
        holders = self.holders.get(rank, frozenset()) | {node}
        return replace(self, holders={**self.holders, rank: holders})

    def without_node(self, node: int) -> Generation:
        """Without the copies of a keeper that is lost."""
        return replace(self, holders={rank: nodes - {node} for rank, nodes in self.holders.items()})


@dataclass(frozen=True)
class _CopyCall:
    """A keeper's call, which copies the state of a rank to a node."""

    ref: Ref
    rank: str
    node: int


@dataclass(frozen=True)
class _Begun:
    """A generation that is being copied. first: from the ranks; second: from keeper to keeper."""

    generation: Generation
    first: list[_CopyCall] = field(default_factory=list)
    second: list[_CopyCall] = field(default_factory=list)


class StateCopies:
    """Makes the copies and gives them back.

    A copy that fails is told in a line, and never fails the run. A keeper that is lost is started anew for the next
    generation, unless it is lost too often: then no more copies are made.
    """

    def __init__(
        self,
        cluster: Cluster,
        first_slots: Sequence[int],
        restarts: Restarts,
        say: Say,
        timeout_s: float,
    ) -> None:
        """first_slots: the first GPU slot of each node. restarts: of the keepers, by these slots.

        timeout_s: the longest that a copy may take before its keeper counts as hanging.
        """
        self._cluster = cluster
        self._first_slots = first_slots
        self._restarts = restarts
        self._say = say
        self._deadline = Deadline(timeout_s, enough=ENOUGH_ALIKE)
        self._keepers: dict[int, Worker] = {}
        # the calls that start keepers, by node
        self._starts: dict[int, Ref] = {}
        # the newest first
        self._generations: list[Generation] = []
        self._taking: _Begun | None = None
        self._spreading: _Begun | None = None
        self._is_given_up = False

    @property
    def newest(self) -> Generation | None:
        """The newest generation of which every rank's copy is there."""
        usable = [generation for generation in self._generations if generation.is_usable]
        return usable[0] if usable else None

    @property
    def safe_step(self) -> int | None:
        """The step of the oldest generation that is kept: nothing before it is needed to restore one."""
        if not self._generations:
            return None
        return self._generations[-1].step

    def begin(self, step: int, version: int, ranks: Sequence[Worker]) -> None:
        """Begin to copy the states after a step. The ranks must not compute until `settle` has returned."""
        self.settle()
        self._settle_second()
        if not self._have_keepers():
            return
        generation = Generation(step, version, {rank.name: frozenset() for rank in ranks})
        begun = _Begun(generation)
        for rank in ranks:
            name = CopyName(rank.name, step)
            node = self._node_of(rank)
            keeper = self._keepers[node]
            first = keeper.call("take", name, rank.peer)
            begun.first.append(_CopyCall(first, rank.name, node))
            following = (node + 1) % len(self._first_slots)
            if following != node:
                # Ray sends this call when its argument is there, the cost, and so when the first copy is whole
                second = self._keepers[following].call("take_second", name, keeper.peer, first)
                begun.second.append(_CopyCall(second, rank.name, following))
        self._taking = begun

    def settle(self) -> Metrics:
        """Wait until the ranks may compute: until their states are copied, or that has failed. What it cost."""
        begun = self._taking
        if begun is None:
            return {}
        self._taking = None
        began_s = time.monotonic()
        self._await(begun.first)
        waited_s = time.monotonic() - began_s
        generation = self._with_copies(begun.generation, begun.first)
        if not generation.is_usable:
            self._free()
            return {}
        self._generations.insert(0, generation)
        self._spreading = begun
        if not begun.second:
            self._settle_second()
        num_bytes = sum(cost.num_bytes for cost in self._costs(begun.first))
        return {"recovery/copy_bytes": num_bytes, "recovery/copy_wait_s": waited_s}

    def _settle_second(self) -> None:
        """Wait for the copies between keepers; earlier generations are freed then."""
        begun = self._spreading
        if begun is None:
            return
        self._spreading = None
        self._await(begun.second)
        # as it is now: a keeper may have been lost meanwhile
        generation = self._with_copies(self._generations[0], begun.second)
        if generation.is_usable:
            self._generations = [generation]
            self._free()

    def _with_copies(self, generation: Generation, calls: Sequence[_CopyCall]) -> Generation:
        """The generation with the copies that these calls have made, all of which have ended."""
        failures = []
        for call in calls:
            if error := failure(call.ref):
                failures.append((call.rank, error))
            elif call.node in self._keepers:
                generation = generation.with_holder(call.rank, call.node)
        if failures:
            (rank, error) = failures[0]
            cause = str(getattr(error, "cause", error)).strip().splitlines()[-1:] or [""]
            self._say(f"{rank} after step {generation.step} is not copied: {cause[0]}")
        return generation

    def _free(self) -> None:
        """Have the keepers free all copies that are not of a generation here."""
        steps = [generation.step for generation in self._generations]
        for keeper in self._keepers.values():
            keeper.call("keep_only", steps)

    def forget(self) -> None:
        """Free all copies: the run has gone back to a step before them."""
        self.settle()
        self._spreading = None
        self._generations = []
        self._free()

    def restore(self, generation: Generation, ranks: Sequence[Worker]) -> None:
        """Give the ranks their states of a generation, where a keeper is lost by the other one that has a copy.

        Raises CopiesLost, and WorkerFailed by a rank that does not take its own.
        """
        waiting = list(ranks)
        is_first_attempt = True
        while waiting:
            for rank in waiting:
                # a keeper may have been lost since the generation was chosen
                if not generation.holders[rank.name] & self._keepers.keys():
                    raise CopiesLost(
                        f"the copies of {rank.name} after step {generation.step} are lost",
                        ranks_are_untouched=is_first_attempt,
                    )
            is_first_attempt = False
            waiting = self._give(generation, waiting)

    def _give(self, generation: Generation, ranks: Sequence[Worker]) -> list[Worker]:
        """One attempt of `restore`; the ranks whose keeper was lost meanwhile."""
        receivers: dict[Ref, Worker] = {}
        nodes: dict[Ref, int] = {}
        for rank in ranks:
            own = self._node_of(rank)
            holders = generation.holders[rank.name] & self._keepers.keys()
            node = own if own in holders else min(holders)
            name = CopyName(rank.name, generation.step)
            call = self._keepers[node].call("give", name, rank.peer)
            receivers[call] = rank
            nodes[call] = node
        names = {call: rank.name for call, rank in receivers.items()}
        self._await_all(names, nodes, self._deadline.ceiling_s)
        failures = {call: failure(call) for call in nodes}
        errors = {nodes[call]: error for call, error in failures.items() if error}
        # a call may have failed before its keeper's end is known, or by its rank
        doubtful = {node: self._keepers[node] for node in errors if node in self._keepers}
        ended = self._cluster.ended([*doubtful.values()]) if doubtful else []
        for node, keeper in doubtful.items():
            if keeper in ended:
                self._lose(node, reported(keeper.name, errors[node]))
        unserved = [call for call, node in nodes.items() if node not in self._keepers]
        self._cluster.gather({call: names[call] for call in names if call not in unserved})
        return [receivers[call] for call in unserved]

    def start(self) -> None:
        """Begin to start the keepers that are not there."""
        for node, slot in enumerate(self._first_slots):
            if node in self._keepers or self._is_given_up:
                continue
            on_loss = partial(self._lose, node)
            keeper = self._cluster.worker(f"keeper of copies {node}", slot, on_loss, gpus=0)
            self._keepers[node] = keeper
            self._starts[node] = keeper.start(_KEEPER)

    def _have_keepers(self) -> bool:
        """Wait for the keepers; whether every node has one."""
        self.start()
        starts = self._starts
        self._starts = {}
        self._await_all(
            {ref: f"keeper of copies {node}" for node, ref in starts.items()},
            {ref: node for node, ref in starts.items()},
            self._deadline.ceiling_s,
        )
        for node, ref in starts.items():
            if node not in self._keepers:
                continue
            name = self._keepers[node].name
            if error := failure(ref):
                self._lose(node, reported(name, error))
            else:
                self._cluster.loss_log.is_back(name)
        return len(self._keepers) == len(self._first_slots)

    def _costs(self, calls: Sequence[_CopyCall]) -> list[CopyCost]:
        """Of copies that were made."""
        return self._cluster.gather({call.ref: call.rank for call in calls})

    def _await(self, calls: Sequence[_CopyCall]) -> None:
        self._await_all(
            {call.ref: f"copy of {call.rank}" for call in calls},
            {call.ref: call.node for call in calls},
            self._deadline.limit_s,
        )
        # how long one that fails takes says nothing of the others
        if calls and not any(failure(call.ref) for call in calls):
            # by the keepers' own clocks: the controller may have done other work since the copies began
            self._deadline.observe(max(cost.seconds for cost in self._costs(calls)))

    def _await_all(
        self, calls: Mapping[Ref, str], nodes: Mapping[Ref, int], limit_s: float
    ) -> None:
        """Wait until all have ended, well or not; a call of a keeper fails by the loss of a rank, too.

        nodes: of the keepers that were called. One that hangs answers heartbeats: it is given up after a while.
        """
        pending = dict(calls)
        waited_s = 0.0
        while pending:
            began_s = time.monotonic()
            for ref in self._cluster.await_any(pending, may_lose=True, patience_s=_LOOK_S):
                del pending[ref]
            # the controller may have been suspended, or have ended an engine that was lost
            waited_s += min(time.monotonic() - began_s, 2 * _LOOK_S)
            if waited_s > limit_s:
                for node in {nodes[ref] for ref in pending} & self._keepers.keys():
                    name = self._keepers[node].name
                    problem = f"{name} has not ended a call for {waited_s:.0f} s"
                    self._lose(node, WorkerFailed(problem, problem, name))

    def _lose(self, node: int, cause: Exception) -> None:
        """A keeper is lost, with its copies."""
        keeper = self._keepers.pop(node)
        self._cluster.loss_log.add(keeper.name, cause)
        self._generations = [generation.without_node(node) for generation in self._generations]
        self._is_given_up = not self._restarts.admit(self._first_slots[node])
        if self._is_given_up:
            self._say(f"{cause}; no more copies of the ranks' states are made")
        else:
            self._say(f"{cause}; it is started anew, and its copies of the ranks' states are lost")
        self._cluster.end(keeper)

    def _node_of(self, rank: Worker) -> int:
        """The last node that does not begin behind the rank's slot."""
        return max(node for node, slot in enumerate(self._first_slots) if slot <= rank.slot)
