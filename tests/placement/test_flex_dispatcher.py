"""Which recipes Megatron's flex dispatcher may run, and in what words the others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.config.models import TrainConfig
from megarl.model.shape import ModelShape
from megarl.placement.flex_dispatcher import DISPATCHER, flex_device_errors, flex_errors
from megarl.placement.overlaps import without_unused
from megarl.placement.train_layout import TrainLayout

SHAPE = ModelShape(4, 64, 4, 2, 16, 100, num_experts=48, experts_per_token=2, moe_ffn_size=32)
LAYOUT = TrainLayout(8, 1, 1, 4)


def errors(
    *,
    shape: ModelShape = SHAPE,
    layout: TrainLayout = LAYOUT,
    gpus_per_node: int = 8,
    options: dict[str, Any] | None = None,
) -> list[str]:
    train = TrainConfig(lr=1.0, megatron={DISPATCHER: "flex", **(options or {})})
    return [str(error) for error in flex_errors(train, shape, layout, gpus_per_node, "train")]


@pytest.mark.parametrize("world", [2, 8, 16])
def test_groups_that_deepep_takes_are_allowed(world: int) -> None:
    assert errors(layout=TrainLayout(world, 1, 1, world)) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layout": replace(LAYOUT, ep=1)}, "no tokens go to experts of other ranks; remove it"),
        ({"shape": replace(SHAPE, num_experts=0)}, "no tokens go to experts"),
        ({"layout": TrainLayout(12, 1, 1, 12)}, "not 12; set train.ep"),
        ({"gpus_per_node": 2}, "takes 4 neighbours for one node, of 2 GPUs"),
        ({"layout": TrainLayout(16, 1, 1, 16), "gpus_per_node": 4}, "takes 8 neighbours"),
        ({"options": {"moe_router_dtype": "fp64"}}, "moe_router_dtype: fp64, but DeepEP"),
        ({"options": {"moe_expert_capacity_factor": 1.0}}, "moe_expert_capacity_factor: set"),
    ],
)
def test_what_deepep_cannot_send_is_refused(keys: dict[str, Any], words: str) -> None:
    (error,) = errors(**keys)
    assert error.startswith("train.megatron.moe_") and words in error


@pytest.mark.parametrize(("ep", "kept"), [(4, True), (1, False)])
def test_an_auxiliary_model_without_an_exchange_drops_the_dispatcher(ep: int, kept: bool) -> None:
    train = TrainConfig(lr=1.0, megatron={DISPATCHER: "flex"})
    left = without_unused(train, SHAPE, replace(LAYOUT, ep=ep), trains=True).megatron
    assert (DISPATCHER in left) == kept


@pytest.mark.parametrize(
    ("dtype", "device", "backend", "words"),
    [
        ("float32", "cpu", "hybridep", "only DeepEP has a stand-in on CPU; set it to deepep"),
        ("float32", "cuda", "hybridep", "DeepEP sends bfloat16, not float32; remove it"),
        ("bfloat16", "cuda", "deepep", "deep_ep is not installed; install DeepEP, or remove it"),
    ],
)
def test_what_the_device_lacks_is_named(dtype: str, device: str, backend: str, words: str) -> None:
    options = {DISPATCHER: "flex", "moe_flex_dispatcher_backend": backend}
    train = TrainConfig(lr=1.0, megatron=options)
    (error,) = flex_device_errors(train, dtype, device, lacks_deepep=device == "cuda")
    assert words in str(error)
