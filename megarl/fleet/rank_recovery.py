"""The ranks of a fleet as `megarl.recovery.repetition` brings them back: rebuilt, and with an earlier state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.cluster.actor import Ref, Worker
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.fleet.fleet import Fleet, share_weights
from megarl.fleet.rank_groups import RankGroup
from megarl.placement.roles import trains_merged
from megarl.recovery.rank_processes import RankProcesses
from megarl.recovery.repetition import Checkpoints, Repetition
from megarl.recovery.restarts import Restarts
from megarl.recovery.state_copies import StateCopies
from megarl.types.losses import Losses


class RecoverableRanks:
    """All groups of ranks of a fleet. A group is rebuilt on its slots in the run's Ray session."""

    def __init__(self, cluster: Cluster, fleet: Fleet) -> None:
        self._cluster = cluster
        self._fleet = fleet
        # groups that were being rebuilt when another loss came in between
        self._unfinished: list[RankGroup] = []

    @property
    def version(self) -> int:
        return self._fleet.version

    @property
    def _groups(self) -> list[RankGroup]:
        fleet = self._fleet
        return [ranks for ranks in (fleet.trainers, fleet.critic, fleet.reward_model) if ranks]

    @property
    def rank_processes(self) -> Sequence[RankProcesses]:
        return [ranks.processes for ranks in self._groups]

    @property
    def loss_log(self) -> Losses:
        return self._cluster.loss_log

    @property
    def trained_ranks(self) -> Sequence[Worker]:
        fleet = self._fleet
        critic = fleet.critic.workers if fleet.critic else []
        return [*fleet.trainers.workers, *critic]

    def rebuild_ranks(self, *, afresh: bool) -> None:
        """Start the groups that are lost, and those that compute with the weights of one; the memory is the policy's.

        afresh: also the others that train, so that all have the weights with which they began.
        """
        fleet = self._fleet
        self._cluster.replace_dead_nodes()
        is_policy_lost = (
            afresh
            or fleet.trainers.processes.loss is not None
            or fleet.trainers in self._unfinished
        )
        anew = [
            ranks
            for ranks in self._groups
            if ranks.processes.loss
            or ranks in self._unfinished
            or (afresh and ranks is not fleet.reward_model)
            or (is_policy_lost and ranks.shares_weights)
        ]
        self._unfinished = anew
        for ranks in anew:
            ranks.processes.discard()
        if is_policy_lost:
            # what they have mapped would keep the memory of ranks that are gone
            fleet.engines.forget_ranks()
        fleet.memory.take_back()
        for ranks in self._groups:
            if ranks not in anew:
                ranks.offload()
        starting: dict[Ref, str] = {}
        for ranks in anew:
            starting |= ranks.processes.start()
        self._cluster.gather(starting)
        share_weights(fleet.trainers, *(ranks for ranks in anew if ranks is not fleet.trainers))
        for ranks in anew:
            ranks.offload()
        fleet.trainers.onload()
        self._unfinished = []

    def load_state(self, folder: Path) -> None:
        self._fleet.load(folder)

    def state_restored(self, version: int) -> None:
        if trains_merged(self._fleet.roles.policy.recipe):
            self._fleet.trainers.round_weights(version)


def repetition(
    cluster: Cluster, recipe: Recipe, fleet: Fleet, checkpoints: Checkpoints
) -> Repetition:
    """What repeats the steps of a run, as its recipe says."""
    run = recipe.run
    restarts = Restarts(run.restarts, run.restart_window_s) if run.restarts else None
    copies = None
    if restarts and recipe.checkpoint.memory_copies:
        gpus = recipe.placement.gpus
        first_slots = range(0, gpus, recipe.placement.node_gpus or gpus)
        # keepers fail apart from ranks
        copies = StateCopies(
            cluster,
            first_slots,
            Restarts(run.restarts, run.restart_window_s),
            fleet.say,
            run.timeout_s,
        )
        copies.start()
    return Repetition(RecoverableRanks(cluster, fleet), checkpoints, copies, restarts, fleet.say)
