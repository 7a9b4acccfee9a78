"""How large the models of a recipe are, and which part each of their ranks holds: from Megatron's real modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megarl
from megarl.config import Recipe
from megarl.parallel.layout import TrainLayout
from megarl.parallel.placement import train_layout
from megarl.parallel.roles import Role as RankRole
from megarl.parallel.roles import RoleName as Role
from megarl.parallel.roles import resolve
from megarl.parallel.sizes import ChunkSize
from megarl.types import ModelShape, UserFault

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ModelSize:
    """A role's model, as the ranks of its layout hold it; its ranks sit on the slots from `first_slot` on.

    stages: of each pipeline rank its chunks. The ranks of a stage all hold as much. trains: whether there are
    gradients. parameters, routed and mtp_parameters are of the whole model, 0 where they were not asked for: without
    multi-token prediction's own weights and the vocabulary's padding; of them the routed experts; those own weights.
    """

    role: Role
    shape: ModelShape
    recipe: Recipe
    layout: TrainLayout
    first_slot: int
    trains: bool
    stages: tuple[tuple[ChunkSize, ...], ...]
    parameters: int = 0
    routed: int = 0
    mtp_parameters: int = 0

    @property
    def active_parameters(self) -> int:
        """That one token meets: all but the routed experts that its router does not choose; the whole embedding."""
        if not self.shape.num_experts:
            return self.parameters
        return self.parameters - self.routed + self.routed * self.shape.experts_per_token // self.shape.num_experts

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.layout.world_size)


def roles(recipe: Recipe) -> dict[Role, Recipe]:
    """The models with ranks of their own, each with the recipe as its ranks read it."""
    return {name: role.recipe for name, role in resolve(recipe).models.items()}


def model_sizes(recipe: Recipe) -> dict[Role, ModelSize]:
    """Every model of a recipe. Raises UserFault for one that Megatron cannot build; its layouts must have no fault."""
    return sizes_of([recipe], whole=True)[0]


def sizes_of(recipes: Sequence[Recipe], *, whole: bool) -> list[dict[Role, ModelSize]]:
    """The same of several recipes, with one start of the program that builds; whole: with the whole models' totals."""
    asked = [resolve(recipe).models for recipe in recipes]
    requests: dict[Any, dict[str, Any]] = {}
    for role in (role for models in asked for role in models.values()):
        request = {"recipe": role.recipe.model_dump_json(), "scores": role.has_scores, "whole": whole}
        requests[_kind(role.recipe, role.has_scores)] = request
    answers = dict(zip(requests, _built(list(requests.values())), strict=True))
    return [
        {name: _size(role, answers[_kind(role.recipe, role.has_scores)]) for name, role in models.items()}
        for models in asked
    ]


def resized(sizes: Mapping[Role, ModelSize], recipe: Recipe) -> dict[Role, ModelSize] | None:
    """The sizes of another recipe whose ranks hold as much as those of `sizes`; None: it has to be built."""
    found: dict[Role, ModelSize] = {}
    for name, role in resolve(recipe).models.items():
        known = sizes.get(name)
        if known is None or _kind(role.recipe, role.has_scores) != _kind(known.recipe, known.shape.num_labels > 0):
            return None
        found[name] = replace(known, recipe=role.recipe, layout=role.layout, first_slot=role.first_slot)
    return found


def _kind(own: Recipe, scores: bool) -> tuple[Any, ...]:
    """What the sizes of a role's ranks depend on: not on how many of them hold the same."""
    layout = train_layout(own)
    axes = (layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.stage_layers)
    return (own.model.path, own.model.dtype, bool(own.train.mtp_loss), scores, *axes)


def _size(role: RankRole, answer: dict[str, Any]) -> ModelSize:
    chunks = tuple(tuple(ChunkSize(**chunk) for chunk in stage) for stage in answer["stages"])
    return ModelSize(
        role.name, role.shape, role.recipe, role.layout, role.first_slot, role.trains, chunks, **answer.get("whole", {})
    )


def _built(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `megarl.parallel.meta` says, in a process of its own: Megatron keeps global state."""
    path = os.pathsep.join(filter(None, [str(Path(megarl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "megarl.parallel.meta"],
        input=json.dumps(requests),
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the models could not be built on the meta device:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout)
    for one in found:
        if "fault" in one:
            raise UserFault(*one["fault"])
    return found
