"""A weight loader for tests, by name in SGLang: checks the map, scales every parameter, or fails on one rank."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import engine_model, sglang_map
from megarl.resharding.shards import verify_params


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """The message's keys: shape and engine (verify the map of this rank), scale, refresh (False: derive nothing anew),
    fail_on (a rank, which raises when it has scaled half of its parameters), work_s (seconds to take), slots (fill the
    adapter's with waves of this height), plant (a factor of a parameter's first row: [the end of its name, a rank, the
    factor]), and rest_in_next_round_s (seconds that the next forward pass takes)."""
    (name, content), *_ = named_tensors
    message = json.loads(bytes(content.tolist()))
    model = engine_model.language_model(model)
    params = list(engine_model.params(model).values())
    _work(message.get("work_s", 0.0))
    if seconds := message.get("rest_in_next_round_s"):
        # SGLang calls the whole model's forward itself, past its hooks
        decoder = next(model.children())
        decoder.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    if "shape" in message:
        verify(model, message["shape"], message["engine"])
    if plant := message.get("plant"):
        _plant(model, *plant)
    half = len(params) // 2
    with torch.no_grad():
        for parameter in params[:half]:
            parameter.mul_(message.get("scale", 1.0))
        if message.get("fail_on") == dist.get_rank():
            raise ValueError(f"shard of {name} is wrong")
        for parameter in params[half:]:
            parameter.mul_(message.get("scale", 1.0))
    if height := message.get("slots"):
        for tensor in engine_model.adapter_slots(model).values():
            waves = torch.arange(tensor.numel()).sin().mul(height)
            tensor.copy_(waves.view(tensor.shape))
    if message.get("refresh", True):
        engine_model.refresh_derived(model)
    if errors := engine_model.derived_errors(model):
        raise ValueError(errors[0])


@torch.no_grad()
def _plant(model: torch.nn.Module, name: str, rank: int, factor: float) -> None:
    (parameter,) = [
        value for key, value in engine_model.params(model).items() if key.endswith(name)
    ]
    if dist.get_rank() == rank:
        parameter[0] *= factor


def verify(model: torch.nn.Module, shape: dict, engine: dict) -> None:
    model_shape = TypeAdapter(ModelShape).validate_python(shape)
    shards = sglang_map.shards(
        model_shape, TypeAdapter(EngineLayout).validate_python(engine), dist.get_rank()
    )
    verify_params(shards, engine_model.params(model))
    if error := engine_model.unknown_layout(model):
        raise error
    wrong = [
        s.param
        for s in shards
        if s.dtype and not str(model.get_parameter(s.param).dtype).endswith(s.dtype)
    ]
    if wrong:
        raise ValueError(f"{wrong[0]} has another type than the map says")


def _work(seconds: float) -> None:
    """For so long, a fifth of the time."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < seconds:
        if passed_s % 0.1 > 0.02:
            time.sleep(0.08)
