"""The bytes of a reshard by link, and its seconds, from the maps and routes that a run uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config.hardware import Hardware
from megarl.model.tensors import hf_tensors
from megarl.placement.roles import Roles
from megarl.resharding import fp8
from megarl.resharding.maps import factor_maps, weight_maps
from megarl.resharding.reshard_plan import plan_streams
from megarl.resharding.routes import SEND_STAGES, item_bytes
from megarl.resharding.shards import Part
from megarl.resharding.traffic import Traffic, count_traffic
from megarl.types import IntArray

_WATCHED = 8  # members whose rounds are planned: the longest queues, and some at even distances


@dataclass(frozen=True)
class Spread:
    """One figure over all GPUs that take part."""

    mean: float
    max: float

    @staticmethod
    def of(values: IntArray) -> Spread:
        return Spread(float(values.mean()), float(values.max()))


@dataclass(frozen=True)
class ReshardPlan:
    """Bytes per GPU, and seconds.

    dest: of the engine's weights on a GPU. local: what of them the GPU's own training rank holds. nvlink: what comes
    over the links of the node; fabric_in, fabric_out: what comes from and goes to other nodes. gather_everything: what
    a GPU receives where every rank gathers every weight in the model's type and keeps its part (verl's way).

    bound_s, gather_bound_s: see `bound_s` and `gather_bound_s`. expected_s: see `expected_s`. rounds: of at most
    reshard.round_bytes in flight, as far as `_WATCHED` members tell; 0 where they were not asked for.
    """

    dest_bytes: Spread
    local_bytes: Spread
    nvlink_bytes: Spread
    fabric_in_bytes: Spread
    fabric_out_bytes: Spread
    gather_everything_bytes: Spread
    rounds: int
    bound_s: float
    expected_s: float
    gather_bound_s: float


def plan_reshard(roles: Roles, hardware: Hardware, *, counts_rounds: bool = True) -> ReshardPlan:
    """The traffic of a step's reshard, and its seconds. Raises UserError as `weight_maps` does.

    Where engines get adapters on their own it has these alone; the frozen weights travel once, as the run starts.
    """
    if roles.recipe.rollout.engine.external:
        return _plan_files(roles, hardware)
    sources, targets = _parts(roles)
    members = roles.num_members
    node = roles.recipe.placement.gpus_per_node
    dtype = roles.recipe.model.dtype
    traffic = _traffic(roles, sources, targets)
    gathered = gathered_bytes(sources, targets, members, dtype)
    wanting = traffic.dest > 0
    return ReshardPlan(
        dest_bytes=Spread.of(traffic.dest[wanting]),
        local_bytes=Spread.of(traffic.local[wanting]),
        nvlink_bytes=Spread.of(traffic.node_in[wanting]),
        fabric_in_bytes=Spread.of(traffic.fabric_in[wanting]),
        fabric_out_bytes=Spread.of(traffic.fabric_out),
        gather_everything_bytes=Spread.of(gathered),
        rounds=_num_rounds(sources, targets, traffic, roles) if counts_rounds else 0,
        bound_s=bound_s(traffic, node, hardware),
        expected_s=expected_s(traffic, hardware),
        gather_bound_s=gather_bound_s(float(gathered.max()), members, node, hardware),
    )


def minimum_wire_bytes(roles: Roles) -> int:
    """What all members of a reshard get from others, at least: the bytes that they want and do not hold themselves.

    Raises UserError as `weight_maps` does.
    """
    return int(_traffic(roles, *_parts(roles)).minimum_wire.sum())


def _parts(roles: Roles) -> tuple[Sequence[Part], Sequence[Part]]:
    """Sources and targets of a step's reshard."""
    policy = roles.policy
    engines = roles.engines
    factors = factor_maps(
        policy.shape, policy.layout, engines, policy.lora, transformer_engine=True
    )
    return factors or weight_maps(policy.shape, policy.layout, engines, transformer_engine=True)


def _traffic(roles: Roles, sources: Sequence[Part], targets: Sequence[Part]) -> Traffic:
    return count_traffic(
        sources,
        targets,
        roles.num_members,
        gpus_per_node=roles.recipe.placement.gpus_per_node,
        dtype=roles.recipe.model.dtype,
    )


def _plan_files(roles: Roles, hardware: Hardware) -> ReshardPlan:
    """External engines: all nodes write the weights as files, then every server reads all of them (assumed as fast)."""
    nodes = -(-roles.recipe.placement.gpus // roles.recipe.placement.gpus_per_node)
    num_bytes = weight_file_bytes(roles)
    nothing = Spread(0.0, 0.0)
    return ReshardPlan(
        dest_bytes=nothing,
        local_bytes=nothing,
        nvlink_bytes=nothing,
        fabric_in_bytes=nothing,
        fabric_out_bytes=nothing,
        gather_everything_bytes=nothing,
        rounds=0,
        bound_s=0.0,
        expected_s=num_bytes * (1 + 1 / nodes) / hardware.disk_bytes_per_s,
        gather_bound_s=0.0,
    )


def weight_file_bytes(roles: Roles) -> int:
    """Bytes of the files with which external engines get a version of the weights."""
    elements = sum(math.prod(size) for size in hf_tensors(roles.policy.shape).values())
    return elements * item_bytes(roles.recipe.model.dtype)


def gathered_bytes(
    sources: Sequence[Part], targets: Sequence[Part], members: int, dtype: str
) -> IntArray:
    """[members] the model's bytes that each does not hold itself, of the tensors that the engines want.

    In the model's type: quantising comes behind a gather. The distinct boxes of all parts are the model, for parts
    overlap only where they are replicas.
    """
    target_names = {shard.name for part in targets for shard in part.shards}
    boxes: dict[tuple[str, object], int] = {}
    held = np.zeros(members, np.int64)
    for part in sources:
        part_boxes: dict[tuple[str, object], int] = {}
        for shard in part.shards:
            if shard.name in target_names and not shard.name.endswith(fp8.SCALE_SUFFIX):
                part_boxes[shard.name, shard.box] = shard.area * item_bytes(shard.dtype or dtype)
        boxes |= part_boxes
        held[list(part.members)] += sum(part_boxes.values())
    return sum(boxes.values()) - held


def bound_s(traffic: Traffic, gpus_per_node: int, hardware: Hardware) -> float:
    """A lower bound of any plan: the bytes that must move, over links at their nominal speed.

    The distinct bytes that a node lacks come in over all its network cards; what a GPU's own slot does not hold comes
    in over its network card and its NVLink together.
    """
    cards = gpus_per_node * hardware.nic_bytes_per_s
    of_nodes = float(traffic.minimum_fabric.max()) / cards
    of_gpus = float(traffic.minimum_wire.max()) / (
        hardware.nic_bytes_per_s + hardware.nvlink_bytes_per_s
    )
    return max(of_nodes, of_gpus)


def expected_s(traffic: Traffic, hardware: Hardware) -> float:
    """The planned bytes of the busiest GPU, over links at the share that large messages reach.

    What one send stage brings to a node is forwarded inside it in the next: the shorter of the two ways is hidden but
    for one send stage (docs/architecture.md). Everything is written once more, out of buffers into parameters.
    """
    fabric = max(traffic.fabric_in.max(), traffic.fabric_out.max()) / hardware.nic_reached_per_s
    inside = max(traffic.node_in.max(), traffic.node_out.max()) / hardware.nvlink_reached_per_s
    copied = 2 * traffic.dest.max() / hardware.hbm_reached_per_s
    return float(max(fabric, inside) + min(fabric, inside) / SEND_STAGES + copied)


def gather_bound_s(num_bytes: float, members: int, gpus_per_node: int, hardware: Hardware) -> float:
    """Gathering at its best: each byte enters a node once, and goes on from GPU to GPU at the same time.

    Over links at the share that large messages reach, as in `expected_s`, with which it is compared.
    """
    per_node = min(gpus_per_node, members)
    if members > gpus_per_node:
        fabric = num_bytes / (per_node * hardware.nic_reached_per_s)
    else:
        fabric = 0.0
    inside = num_bytes * (per_node - 1) / per_node / hardware.nvlink_reached_per_s
    return max(fabric, inside)


def _num_rounds(
    sources: Sequence[Part], targets: Sequence[Part], traffic: Traffic, roles: Roles
) -> int:
    """All members go on with the largest number that anyone needs of each send stage (`Streams.rounds_needed`)."""
    busiest = np.argsort(-(traffic.wire_in + traffic.wire_out), kind="stable")[: _WATCHED // 2]
    recipe = roles.recipe
    members = roles.num_members
    watched = {*busiest.tolist(), *range(0, members, max(1, members * 2 // _WATCHED))}
    node = recipe.placement.gpus_per_node
    dtype = recipe.model.dtype
    needed = [
        plan_streams(
            sources, targets, member, members, gpus_per_node=node, dtype=dtype
        ).rounds_needed(recipe.reshard.round_bytes)
        for member in sorted(watched)
    ]
    return sum(map(max, zip(*needed, strict=True)))
