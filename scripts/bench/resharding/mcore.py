"""megatron-core's own exchange: the planner and the gloo copy service of `megatron.core.resharding`.

Its planner looks at a module's parameters and at the process groups beside them, never at what the module computes. So
it is given modules that hold the parameters of a GPTModel with grouped experts (the only kind whose experts it can tell
apart) under their names, with the attributes that Megatron's layers set on them: TransformerEngine, which would make
these modules itself, does not run without a GPU. The engine is a second Megatron layout with the engine's TP and EP.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import torch
from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

from megarl.cpu.megatron_patches import patch_megatron
from megarl.placement.train_layout import TrainLayout

from .case import Case, Params
from .groups import axis_group

SPLIT_DIMS = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
}
LAYER = re.compile(r"decoder\.layers\.(\d+)$")
patch_megatron()  # the copy service asks for a CUDA stream


def module(layout: TrainLayout, rank: int, params: Params, num_layers: int) -> torch.nn.Module:
    """A module with these parameters; every rank of the world must call this, for its process groups."""
    root = torch.nn.Module()
    for name, tensor in params.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, _parameter(name, tensor))
    layers = layout.layers(layout.coords(rank).pp, num_layers)
    for name, child in root.named_modules():
        match = LAYER.match(name)
        if match:
            child.layer_number = layers[int(match.group(1))] + 1  # type: ignore[assignment]
    root.pg_collection = SimpleNamespace(  # type: ignore[assignment]
        tp=axis_group(layout, "tp"),
        ep=axis_group(layout, "ep"),
        expt_tp=axis_group(layout, "etp"),
        dp=axis_group(layout, "dp"),
        pp=axis_group(layout, "pp"),
    )
    return root


def _parameter(name: str, tensor: torch.Tensor) -> torch.nn.Parameter:
    param = torch.nn.Parameter(tensor, requires_grad=False)
    kind = ".".join(name.rstrip("0123456789").split(".")[-2:])
    attributes = {
        "allreduce": ".experts." not in name,
        "tensor_model_parallel": kind in SPLIT_DIMS,
        "partition_dim": SPLIT_DIMS.get(kind, -1),
        "partition_stride": 2 if kind == "linear_fc1.weight" else 1,  # [gate; up]
    }
    for key, value in attributes.items():
        setattr(param, key, value)
    return param


class MegatronCore:
    """One rank's side. The targets are parameters of the Megatron layout."""

    def __init__(self, case: Case, rank: int, sources: Params, targets: Params) -> None:
        layers, self._num_experts = case.shape.num_layers, case.shape.num_experts
        self._source = module(case.train, rank, sources, layers)
        self._target = module(case.engine_as_megatron, rank, targets, layers)
        self._service = GlooCopyService()

    def plan(self) -> None:
        """Rank 0 plans for everyone and broadcasts the plans."""
        self._plan = build_centralized_reshard_plan(
            self._source, self._target, num_experts=self._num_experts
        )

    def run(self) -> None:
        """Fill the targets."""
        execute_reshard_plan(self._plan, self._source, self._target, service=self._service)
