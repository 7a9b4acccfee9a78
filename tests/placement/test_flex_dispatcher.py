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
    first_slot: int = 0,
    gpus_per_node: int = 8,
    options: dict[str, Any] | None = None,
) -> list[str]:
    train = TrainConfig(lr=1.0, megatron={DISPATCHER: "flex", **(options or {})})
    slots = range(first_slot, first_slot + layout.world_size)
    return [
        str(error)
        for error in flex_errors(train, shape, layout, slots, gpus_per_node, "critic.ranks")
    ]


def of_experts(world: int, ep: int, etp: int = 1) -> TrainLayout:
    return TrainLayout(world, 1, 1, ep, expert_tp=etp)


@pytest.mark.parametrize(
    ("layout", "first_slot", "gpus_per_node"),
    [
        (of_experts(2, 2), 0, 8),
        (of_experts(8, 8), 0, 8),
        (of_experts(48, 24), 0, 8),
        # a node that DeepEP takes for two, of which it sends to each over the network
        (of_experts(16, 16), 0, 16),
        # neighbours that begin inside a node, and do not leave it
        (of_experts(4, 4), 2, 6),
        (of_experts(8, 2, etp=2), 4, 8),
    ],
)
def test_groups_that_deepep_takes_are_allowed(
    layout: TrainLayout, first_slot: int, gpus_per_node: int
) -> None:
    assert errors(layout=layout, first_slot=first_slot, gpus_per_node=gpus_per_node) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layout": replace(LAYOUT, ep=1)}, "no tokens go to experts of other ranks; remove it"),
        ({"shape": replace(SHAPE, num_experts=0)}, "no tokens go to experts"),
        ({"layout": of_experts(12, 12)}, "etp is 12, and DeepEP takes 2, 4"),
        (
            {"layout": of_experts(6, 6)},
            "set critic.ranks.ep so that ep x etp is 4 or 8, or remove it",
        ),
        ({"options": {"moe_flex_dispatcher_backend": "hybridep"}}, "_backend: hybridep, which"),
        ({"options": {"moe_router_dtype": "fp64"}}, "moe_router_dtype: fp64, but DeepEP"),
        ({"options": {"moe_expert_capacity_factor": 1.0}}, "moe_expert_capacity_factor: set"),
    ],
)
def test_what_deepep_cannot_send_is_refused(keys: dict[str, Any], words: str) -> None:
    (error,) = errors(**keys)
    assert error.startswith("train.megatron.moe_") and words in error


@pytest.mark.parametrize(
    ("layout", "first_slot", "gpus_per_node", "slots", "mend"),
    [
        (of_experts(4, 4), 0, 2, "0 to 3", "lower critic.ranks.ep until ep x etp divides 2"),
        (of_experts(16, 16), 0, 4, "0 to 7", "lower critic.ranks.ep until ep x etp divides 4"),
        # the first four are on one node, and the next are not
        (of_experts(8, 4), 0, 6, "4 to 7", "lower critic.ranks.ep until ep x etp divides 6"),
        (of_experts(16, 2, etp=4), 0, 12, "8 to 15", "lower critic.ranks.ep"),
        # DeepEP's arithmetic fits the nodes, but not where the ranks begin
        (of_experts(16, 16), 4, 8, "4 to 11", "set critic.ranks.first_gpu to a multiple of 8"),
        (of_experts(4, 2), 7, 8, "7 to 8", "set critic.ranks.first_gpu to a multiple of 2"),
    ],
)
def test_neighbours_on_two_nodes_are_refused(
    layout: TrainLayout, first_slot: int, gpus_per_node: int, slots: str, mend: str
) -> None:
    """DeepEP would copy over NVLink between ranks that have none."""
    (error,) = errors(layout=layout, first_slot=first_slot, gpus_per_node=gpus_per_node)
    taken = f"flex, but DeepEP takes the ranks on slots {slots} for one node"
    assert f"{DISPATCHER}: {taken}, and placement.gpus_per_node is {gpus_per_node}" in error
    assert mend in error and error.endswith("or remove it")


@pytest.mark.parametrize(("ep", "kept"), [(4, True), (1, False)])
def test_an_auxiliary_model_without_an_exchange_drops_the_dispatcher(ep: int, kept: bool) -> None:
    train = TrainConfig(lr=1.0, megatron={DISPATCHER: "flex"})
    left = without_unused(train, SHAPE, replace(LAYOUT, ep=ep), trains=True).megatron
    assert (DISPATCHER in left) == kept


@pytest.mark.parametrize(
    ("dtype", "device", "words"),
    [
        ("float32", "cuda", "DeepEP sends bfloat16, not float32; remove it"),
        ("bfloat16", "cuda", "deep_ep is not installed; install DeepEP, or remove it"),
    ],
)
def test_what_the_device_lacks_is_named(dtype: str, device: str, words: str) -> None:
    train = TrainConfig(lr=1.0, megatron={DISPATCHER: "flex"})
    (error,) = flex_device_errors(train, dtype, device, lacks_deepep=dtype == "bfloat16")
    assert words in str(error)
