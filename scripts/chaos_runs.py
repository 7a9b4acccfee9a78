"""The kinds of runs that chaos.py hits: the quickstart's model with tiny steps, and what each kind has besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import soak_resume as soak
from chaos_faults import NODES

SMALL = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=24",
    "rollout.seeded=true",
    "rollout.engine.tp=1",
    "rollout.engine.count=2",
    "warm_start.steps=0",
    "train.tp=1",
    "train.pp=1",
    "train.ep=2",
    "train.updates_per_step=2",
    # so low that responses stay as long as they are
    "train.lr=1e-5",
    "placement.gpus=2",
    "evaluation.max_prompts=4",
    "evaluation.every=3",
    "reward.function=odd_reward:score",
    "run.trackers=[]",
    "run.restarts=1000",
    "run.timeout_s=60",
    "checkpoint.every=2",
]
PHASED = [
    "rollout.phase_tokens=6",
    "rollout.prompts_in_flight=16",
    "algorithm.rollout_correction=tis",
]
COPIES = ["checkpoint.memory_copies=true"]
AHEAD = [*PHASED, *COPIES, "rollout.ahead=1", "placement.gpus=4", "placement.first_engine_gpu=2"]
CRITIC = [
    "algorithm.name=vapo",
    "algorithm.critic_warmup_steps=2",
    "critic.ranks.gpus=1",
    "critic.ranks.ep=1",
]
SCORED = [
    *CRITIC,
    "reward_model.path=classifier",
    "reward_model.weight=0.5",
    "reward_model.ranks.gpus=1",
    "reward_model.ranks.ep=1",
    "reward_model.ranks.first_gpu=1",
]
ADAPTERS = [
    "lora.rank=4",
    "train.lr=0.01",
    "train.ep=1",
    "lora.sync=adapters",
    "lora.experts=0",
    "lora.targets=[q_proj, k_proj, v_proj, o_proj]",
]
# the recipe itself, but for what makes its samples repeatable and its losses many
QUICKSTART = [
    "rollout.seeded=true",
    "run.restarts=1000",
    "run.timeout_s=60",
    "run.trackers=[]",
    "checkpoint.every=1",
    "checkpoint.memory_copies=true",
]
PHASES = ("start", "rollout", "train", "save", "reshard", "eval")
ROLES = ("engine", "scheduler", "rank", "reward worker", "Ray worker", "raylet")


@dataclass(frozen=True)
class Kind:
    """A kind of run: its overrides, and the roles and phases that it has more than others."""

    overrides: Sequence[str]
    roles: Sequence[str] = ROLES
    phases: Sequence[str] = PHASES
    episodes: bool = False


RUNS = {
    "plain": Kind(SMALL),
    "phases": Kind([*SMALL, *PHASED, *COPIES], (*ROLES, "keeper")),
    "ahead": Kind([*SMALL, *AHEAD], (*ROLES, "keeper"), (*PHASES, "ahead")),
    "critic": Kind([*SMALL, *SCORED], (*ROLES, "critic", "reward model"), (*PHASES, "critic", "score")),
    "lora": Kind([*SMALL, *soak.LORA, *COPIES], (*ROLES, "keeper")),
    "adapters": Kind([*SMALL, *ADAPTERS]),
    "episodes": Kind(
        [*SMALL, *(key for key in soak.EPISODES if not key.startswith("reward.")), "reward.function=null"],
        tuple("tool worker" if role == "reward worker" else role for role in ROLES),
        episodes=True,
    ),
    "disk": Kind([*SMALL, "checkpoint.may_fail=20"], ("disk",), PHASES[1:]),
    "quickstart": Kind(QUICKSTART, (*ROLES, "keeper")),
    "nodes": Kind(
        [*SMALL, *COPIES, "placement.node_gpus=1", "placement.spare_nodes=1"], NODES, PHASES[1:]
    ),
}  # fmt: skip
