"""The size of each model of a recipe and of the part that each of its ranks holds, from Megatron's own modules."""

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
from megarl.parallel.chunk_sizes import ChunkSize
from megarl.placement.roles import Role, RoleName, resolve
from megarl.plan.adapter_sizes import Stages, adapter_parameters, with_adapters
from megarl.plan.muon_cost import MuonWork, muon_work
from megarl.resharding.routes import item_bytes
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ModelSize(Role):
    """A role with the amount that its ranks hold.

    stages: the chunks of each pipeline rank; all ranks of a stage hold the same amount. parameters, routed,
    mtp_parameters: elements of the whole model (without the layers of multi-token prediction and the vocabulary's
    padding), of its routed experts, of its layers of multi-token prediction; 0 where they were not asked for.
    """

    stages: Stages
    parameters: int = 0
    routed: int = 0
    mtp_parameters: int = 0

    @staticmethod
    def of(role: Role, stages: Stages, **totals: Any) -> ModelSize:
        """stages: of the model itself, without adapters."""
        if lora := role.lora:
            stages = with_adapters(stages, role.shape, role.layout, lora)
        return ModelSize(**vars(role), stages=stages, **totals)

    @property
    def totals(self) -> dict[str, Any]:
        """What no layout changes."""
        return {name: getattr(self, name) for name in ("parameters", "routed", "mtp_parameters")}

    @property
    def adapter_parameters(self) -> int:
        """Elements of the whole model's adapters; 0: the weights themselves are trained."""
        if self.lora:
            return adapter_parameters(self.shape, self.lora)
        return 0

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: the whole embedding, and of the routed experts the chosen ones."""
        if not self.shape.num_experts:
            return self.parameters
        return (
            self.parameters
            - self.routed
            + self.routed * self.shape.experts_per_token // self.shape.num_experts
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight."""
        return item_bytes(self.recipe.model.dtype)

    def trained(self, stage: int) -> int:
        """Elements with a gradient on a rank of the stage."""
        return sum(chunk.trained for chunk in self.stages[stage])

    def optimizer_share(self, stage: int) -> float:
        """Elements that the optimizer of a rank of the stage steps on: its part of each replica's."""
        dense = self.layout.dp * self.layout.cp
        expert = self.layout.edp
        return sum(chunk.dense / dense + chunk.expert / expert for chunk in self.stages[stage])

    def muon(self, stage: int) -> MuonWork:
        """What Muon does on a rank of the stage; nothing with AdamW."""
        train = self.recipe.train
        if train.optimizer_name != "muon":
            return MuonWork()
        return muon_work(self.shape, self.layout, stage, trains_mtp=train.mtp_loss > 0)

    def layers(self, stage: int) -> tuple[int, ...]:
        """The decoder layers of all chunks of a stage."""
        layout = self.layout
        chunks = range(layout.vpp)
        return tuple(
            layer
            for chunk in chunks
            for layer in layout.layers(stage, self.shape.num_layers, chunk)
        )

    def stage_slots(self) -> list[range]:
        """The slots of each pipeline stage: neighbours, because pp is the slowest axis."""
        width = self.layout.world_size // self.layout.pp
        starts = range(0, self.layout.world_size, width)
        return [self.slots[start : start + width] for start in starts]


ModelSizes = Mapping[RoleName, ModelSize]


def model_sizes(recipe: Recipe) -> dict[RoleName, ModelSize]:
    """Every model of a recipe. Raises UserError if Megatron cannot build one; its layouts must have no error."""
    return sizes_of([resolve(recipe).models], whole=True)[0]


def sizes_of(
    recipes: Sequence[Mapping[RoleName, Role]], *, whole: bool
) -> list[dict[RoleName, ModelSize]]:
    """The models of several recipes, all built in one subprocess; whole: with the whole models' totals."""
    requests = {
        _kind(role): {
            "recipe": role.recipe.model_dump_json(),
            "scores": role.has_scores,
            "whole": whole,
        }
        for models in recipes
        for role in models.values()
    }
    answers = dict(zip(requests, _built(list(requests.values())), strict=True))
    return [
        {name: _size(role, answers[_kind(role)]) for name, role in models.items()}
        for models in recipes
    ]


def resized(
    sizes: ModelSizes, changed: Mapping[RoleName, Role]
) -> dict[RoleName, ModelSize] | None:
    """The sizes for changed ranks that hold the same amount as those of `sizes`; None: a model has to be built."""
    if any(
        name not in sizes or _kind(role) != _kind(sizes[name]) for name, role in changed.items()
    ):
        return None
    return {name: replace(sizes[name], **vars(role)) for name, role in changed.items()}


def _kind(role: Role) -> tuple[Any, ...]:
    """All that the size of a rank depends on; the number of its replicas is not part of it."""
    model = role.recipe.model
    layout = role.layout
    axes = (layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.stage_layers)
    return (model.path, model.dtype, bool(role.recipe.train.mtp_loss), role.has_scores, *axes)


def _size(role: Role, answer: JsonObject) -> ModelSize:
    chunks = tuple(tuple(ChunkSize(**chunk) for chunk in stage) for stage in answer["stages"])
    return ModelSize.of(role, chunks, **answer.get("whole", {}))


def _built(requests: Sequence[JsonObject]) -> list[JsonObject]:
    """The answers of `megarl.parallel.meta`. Raises UserError where Megatron cannot build a model."""
    answers = _asked(requests)
    for answer in answers:
        if "error" in answer:
            raise UserError(*answer["error"])
    return answers


def _asked(requests: Sequence[JsonObject]) -> list[JsonObject]:
    """`megarl.parallel.meta` runs as a subprocess because Megatron keeps global state."""
    path = os.pathsep.join(
        filter(None, [str(Path(megarl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "megarl.parallel.meta"],
        input=json.dumps(requests),
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(
            f"the models could not be built on the meta device:\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout)
