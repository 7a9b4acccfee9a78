"""Which groups of ranks are started anew; they are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.failures import WorkerFailed
from megarl.fleet import rank_recovery
from megarl.fleet.rank_recovery import RecoverableRanks


class Group:
    """A model's ranks. calls: what is asked of them."""

    def __init__(self, name: str, *, shares_weights: bool = False) -> None:
        self.name = name
        self.shares_weights = shares_weights
        self.processes = self
        self.loss: str | None = None
        self.calls: list[str] = []

    def start(self) -> dict[str, str]:
        self.loss = None
        self.calls.append("start")
        return {self.name: self.name}

    def discard(self) -> None: ...

    def offload(self) -> None:
        self.calls.append("offload")

    def onload(self) -> None:
        self.calls.append("onload")


class World:
    """A policy, a critic with its frozen weights, and a reward model, whose start fails so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
        self.num_failures = num_failures
        self.policy = Group("policy")
        self.critic = Group("critic", shares_weights=True)
        self.reward_model = Group("reward model")
        monkeypatch.setattr(rank_recovery, "share_weights", self.share)
        fleet: Any = SimpleNamespace(
            trainers=self.policy,
            critic=self.critic,
            reward_model=self.reward_model,
            engines=SimpleNamespace(forget_ranks=lambda: None),
            memory=SimpleNamespace(take_back=lambda: None),
        )
        cluster: Any = SimpleNamespace(replace_dead_nodes=lambda: None, gather=self.gather)
        self.ranks = RecoverableRanks(cluster, fleet)

    def share(self, policy: Group, *others: Group) -> None:
        for group in others:
            group.calls.append("share")

    def gather(self, calls: dict[str, str]) -> None:
        if self.reward_model.name in calls and self.num_failures:
            self.num_failures -= 1
            self.reward_model.loss = "died"
            raise WorkerFailed("reward model rank 0: its process died", "", "reward model rank 0")


def test_ranks_that_were_being_started_when_others_were_lost_are_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not have the policy's weights yet, with which they compute."""
    world = World(monkeypatch, num_failures=1)
    world.policy.loss = world.reward_model.loss = "died"
    with pytest.raises(WorkerFailed):
        world.ranks.rebuild_ranks(afresh=False)
    world.ranks.rebuild_ranks(afresh=False)
    assert world.critic.calls == ["start", "start", "share", "offload"]
    assert world.policy.calls == ["start", "start", "offload", "onload"]
    world.reward_model.loss = "died"
    world.ranks.rebuild_ranks(afresh=False)
    assert world.critic.calls[4:] == ["offload"], "these have all that they need"
