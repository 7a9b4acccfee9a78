"""Where SGLang looks for an expert: its tables, written in place after a reshard that moved experts.

Facts from SGLang 0.5.21, in which no model's router knows of places: it chooses experts by their numbers, and the
routes that samples carry are recorded then (layers/moe/topk.py, `capture_routed_experts_if_allowed`).
- Where all ranks of an engine have all tokens, `StandardDispatcher.local_expert_mapping` [experts] has the local slot
  of each expert of this rank and -1 for others (layers/moe/token_dispatcher/standard.py). SGLang makes it in the first
  forward pass; kernels that find their experts by number skip it (`skip_local_expert_mapping`).
- With DeepEP and `ep_dispatch_algorithm` static the router's choices are replaced by slots from
  `logical_to_rank_dispatch_physical_map` [layers, experts] (eplb/expert_location.py); a layer is the decoder's, dense
  ones among them. A draft model's layers do not read it.
Captured graphs read both by their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megarl.config import Recipe
from megarl.placement.expert_places import Places
from megarl.resharding.shards import LayoutError
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

_OTHER_BACKEND = "set rollout.engine.sglang.moe_runner_backend to triton"


@listed
def place_errors(recipe: Recipe) -> ErrorIterator:
    """Settings that do not go with experts that move (rollout.engine.place_experts)."""
    engine = recipe.rollout.engine
    if not engine.place_experts:
        return
    key = "rollout.engine.place_experts"
    off = f"or {key} to false"
    if engine.ep == 1:
        problem = "true, but each slot of an engine has all experts: rollout.engine.ep is 1"
        yield UserError(key, problem, "set it to false, or rollout.engine.ep to 2 or more")
    if recipe.train.replay != "r3":
        problem = f"{recipe.train.replay}, but {key} needs the routes of a rollout"
        yield UserError("train.replay", problem, f"set it to r3, {off}")
    if recipe.rollout.seeded:
        problem = f"true, but {key} changes the order in which experts' outputs are added"
        yield UserError("rollout.seeded", problem, f"set it to false, {off}")
    if recipe.lora and recipe.lora.sync == "adapters":
        problem = "adapters: the frozen weights are sent once, so that experts cannot move"
        yield UserError("lora.sync", problem, f"set it to merged, {off}")


def error(model: torch.nn.Module, places: Places | None) -> LayoutError | None:
    """The reason why SGLang would not find the experts of this model in these places; else None."""
    if not places:
        return None
    layers = list(_expert_layers(model))
    if len(layers) != len(places):
        return LayoutError(
            f"places of experts are of {len(places)} layers, SGLang's model has {len(layers)}"
        )
    for name, layer in layers:
        if _has_all_tokens(layer):
            if layer.dispatcher.skip_local_expert_mapping:
                why = "this MoE backend of SGLang finds experts by their numbers"
                return LayoutError(f"{name}: {why}; {_OTHER_BACKEND}")
        elif _location() is None or _location().logical_to_rank_dispatch_physical_map is None:
            return LayoutError(f"{name}: SGLang has no table of experts for this model")
    return None


@torch.no_grad()
def write(model: torch.nn.Module, places: Places) -> None:
    """Have SGLang find each expert in its place; `error` must have found none. model: the target model."""
    for (_, layer), row in zip(_expert_layers(model), places, strict=True):
        slot_E = torch.tensor(row).argsort()  # of each expert, in the whole engine
        if _has_all_tokens(layer):
            _write_local(layer, slot_E)
        else:
            _write_location(layer.layer_id, torch.tensor(row), slot_E)


def _write_local(layer: Any, slot_E: torch.Tensor) -> None:
    dispatcher = layer.dispatcher
    num_local = dispatcher.num_local_routed_experts
    local_E = slot_E - dispatcher.moe_ep_rank * num_local
    local_E[(local_E < 0) | (local_E >= num_local)] = -1
    if dispatcher.local_expert_mapping is None:
        dispatcher.local_expert_mapping = torch.empty(
            len(slot_E), dtype=torch.int32, device=layer.w13_weight.device
        )
    dispatcher.local_expert_mapping.copy_(local_E)


def _write_location(layer: int, expert_S: torch.Tensor, slot_E: torch.Tensor) -> None:
    """expert_S: in each slot."""
    location = _location()
    location.physical_to_logical_map[layer].copy_(expert_S)
    location.physical_to_logical_map_cpu[layer].copy_(expert_S)
    location.logical_to_all_physical_map[layer, :, 0].copy_(slot_E)
    location.logical_to_all_physical_map_cpu[layer, :, 0].copy_(slot_E)
    location.logical_to_rank_dispatch_physical_map[layer].copy_(slot_E)


def _expert_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of routed experts, in the order of the decoder."""
    layers: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "dispatcher") and hasattr(module, "w13_weight")
    ]
    yield from sorted(layers, key=lambda named: named[1].layer_id)


def _has_all_tokens(layer: Any) -> bool:
    return hasattr(layer.dispatcher, "local_expert_mapping")


def _location() -> Any:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()
