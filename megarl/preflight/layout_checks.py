"""Whether training ranks and engines fit the models, the GPU slots, the nodes and each other's weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.model.quantisation import FP8_TILE
from megarl.model.shape import ModelShape
from megarl.placement.roles import Roles
from megarl.placement.train_layout import divisors, nearest
from megarl.resharding.maps import factor_maps, weight_maps
from megarl.resharding.routes import item_bytes
from megarl.resharding.shards import Part
from megarl.resharding.traffic import least_round_bytes
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, Errors, listed


def layout_errors(roles: Roles, device: str) -> Errors:
    """Errors of the policy's ranks and the engines; without a readable checkpoint, those that need no model size.

    The layouts of the critic and the reward model are checked with their checkpoints (models.py).
    """
    shape = shape_or_stand_in(roles)
    placement = roles.recipe.placement
    errors = (
        roles.policy.layout_errors(shape)
        + engine_errors(roles, shape, device)
        + most_engines_errors(roles)
        + slot_errors(roles)
    )
    # on CPU with loopback all slots are on this machine
    if placement.network == "nodes" or device != "cpu":
        errors += node_errors(roles)
    if not errors and roles.policy.model.known_shape:
        errors = reshard_errors(replace(roles, engines=roles.most_engines))
    return errors + batch_errors(roles.recipe)


def shape_or_stand_in(roles: Roles) -> ModelShape:
    """The policy's shape; where its checkpoint cannot be read, sizes that all axes divide, and a layer that drafts."""
    layout = roles.policy.layout
    engines = roles.engines
    size = FP8_TILE * math.lcm(layout.tp, layout.pp, layout.ep, engines.tp, engines.ep)
    layers = sum(layout.stage_layers) or size
    stand_in = ModelShape(layers, size, size, size, size, size, size, size, size, num_mtp_layers=1)
    return roles.policy.model.known_shape or stand_in


def engine_errors(roles: Roles, shape: ModelShape, device: str) -> Errors:
    """What the engines do not divide in the model and on the GPUs, and what SGLang refuses on the device.

    Nothing of external ones, whose layouts are their own.
    """
    if roles.recipe.rollout.engine.external:
        return []
    gpus = roles.recipe.placement.gpus
    if device != "cpu":
        return roles.engines.errors(shape, gpus) or roles.engines.gpu_errors(shape)
    return roles.engines.errors(shape, gpus) or roles.engines.cpu_errors(shape)


@listed
def most_engines_errors(roles: Roles) -> ErrorIterator:
    """A number of engines that may be asked for later, but not be had."""
    key = "rollout.engine.max_count"
    engine = roles.recipe.rollout.engine
    gpus = roles.recipe.placement.gpus
    most = roles.most_engines
    if not engine.max_count:
        return
    if engine.max_count < engine.count:
        problem = f"{engine.max_count} is less than rollout.engine.count ({engine.count})"
        yield UserError(key, problem, f"set it to at least {engine.count}")
    elif most.end > gpus and roles.engines.end <= gpus:
        problem = f"{most.count} engines of {most.tp} ranks end at GPU {most.end}, there are {gpus}"
        hint = f"set it to {(gpus - most.first) // most.tp}, or placement.gpus to {most.end}"
        yield UserError(key, problem, hint)
    taken = {slot for role in roles.models.values() for slot in role.slots}
    if shared := taken & {*range(most.first, most.end)}:
        problem = (
            f"{engine.max_count}, but engines come and go only where they share no GPU with other models, "
            f"and GPU {min(shared)} has both"
        )
        yield UserError(
            key, problem, "leave it out, or set placement.first_engine_gpu to a GPU behind those"
        )


def slot_errors(roles: Roles) -> Errors:
    """Slots that do not exist or that nothing uses. Engines beyond the last slot are in EngineLayout.errors."""
    gpus = roles.recipe.placement.gpus
    num_training = len(roles.policy.slots)
    engines = roles.engines
    errors = []
    for role in roles.models.values():
        if role.name != "policy" and role.slots.stop > gpus:
            last = role.slots.stop - 1
            errors.append(
                UserError(
                    f"{role.branch}.gpus",
                    f"its ranks are on the slots {role.first_slot} to {last}, placement.gpus is {gpus}",
                    f"lower it or {role.branch}.first_gpu",
                )
            )
    if num_training > gpus:
        errors.append(
            UserError(
                "placement.train_gpus",
                f"{num_training} is more than placement.gpus ({gpus})",
                f"set it to at most {gpus}",
            )
        )
    if engines.first > num_training:  # the members of a reshard are numbered without a gap
        errors.append(
            UserError(
                "placement.first_engine_gpu",
                f"{engines.first} leaves a gap behind the {num_training} GPUs that train",
                f"set it to at most {num_training}",
            )
        )
    used = {*range(engines.first, roles.most_engines.end)}
    used = used.union(*(role.slots for role in roles.models.values()))
    if len(used) < gpus and not errors:
        idle = min(set(range(gpus)) - used)
        if idle == len(used):
            problem = f"{gpus} GPUs, of which training and engines use the first {idle}"
            hint = f"set it to {idle}"
        else:
            problem = f"{gpus} GPUs, of which nothing uses number {idle}"
            hint = "leave no gap"
        errors.append(UserError("placement.gpus", problem, hint))
    return errors


@listed
def node_errors(roles: Roles) -> ErrorIterator:
    """Tensor-parallel ranks, which communicate in every layer, on several nodes; engines across a node's edge."""
    node = roles.recipe.placement.gpus_per_node
    if max(roles.recipe.placement.gpus, roles.engines.end) <= node:
        return
    for role in roles.models.values():
        tp = role.layout.tp
        first = role.first_slot
        if node % tp or first % tp:
            problem = f"{tp} ranks at a time, from GPU {first} on, would not all lie inside nodes of {node} GPUs"
            if node % tp:
                hint = f"set it to {nearest(tp, divisors(node))}"
            else:
                hint = f"set {role.branch}.first_gpu to a multiple of it"
            yield UserError(f"{role.branch}.tp", problem, hint)
    yield from _engine_node_errors(roles)


def _engine_node_errors(roles: Roles) -> ErrorIterator:
    node = roles.recipe.placement.gpus_per_node
    engines = roles.engines
    inside = node % engines.tp == 0 and engines.first % engines.tp == 0
    whole = engines.tp % node == 0 and engines.first % node == 0
    if not inside and not whole:
        yield UserError(
            "rollout.engine.tp",
            f"{engines.tp} ranks, from GPU {engines.first} on, neither lie in nodes of {node} GPUs nor fill them",
            f"choose a divisor or a multiple of {node}, and placement.first_engine_gpu as a multiple of it",
        )
    elif whole and engines.tp > node and roles.recipe.placement.network == "loopback":
        yield UserError(
            "placement.network",
            f"an engine of {engines.tp} ranks is on several nodes of {node} GPUs, which meet on no loopback",
            "set it to nodes, or correct placement.gpus_per_node",
        )


def reshard_errors(roles: Roles) -> Errors:
    """fp8 tiles that the training ranks cut, and rounds too small for the smallest pieces that they carry.

    With external engines nothing is exchanged.
    """
    if roles.recipe.rollout.engine.external:
        return []
    policy = roles.policy
    try:
        maps = [weight_maps(policy.shape, policy.layout, roles.engines, transformer_engine=False)]
    except UserError as error:
        return [error]
    factors = factor_maps(
        policy.shape, policy.layout, roles.engines, policy.lora, transformer_engine=False
    )
    if factors:
        maps.append(factors)
    errors = [error for each in maps for error in _round_errors(roles, *each)]
    return errors[:1]  # one key, whatever is too large for it


def _round_errors(roles: Roles, sources: Sequence[Part], targets: Sequence[Part]) -> ErrorIterator:
    members = roles.num_members
    round_bytes = roles.recipe.reshard.round_bytes
    dtype = roles.recipe.model.dtype
    # a stream each way with each peer, twice
    if 4 * (members - 1) * _largest_granule(targets, dtype) <= round_bytes:
        return
    node = roles.recipe.placement.gpus_per_node
    least = least_round_bytes(sources, targets, members, gpus_per_node=node, dtype=dtype)
    if least > round_bytes:
        yield UserError(
            "reshard.round_bytes",
            f"{round_bytes} has no room for two of the smallest pieces to and from every peer ({least} bytes)",
            f"set it to at least {least}",
        )


def _largest_granule(targets: Sequence[Part], dtype: str) -> int:
    """Bytes of the longest row, or row of tiles, that a round cannot cut."""
    sizes = (
        (shard.dtype or dtype, shard.cols[1] - shard.cols[0])
        for part in targets
        for shard in part.shards
    )
    return max(
        (FP8_TILE if kind.startswith("float8") else 1) * cols * item_bytes(kind)
        for kind, cols in sizes
    )


@listed
def batch_errors(recipe: Recipe) -> ErrorIterator:
    """More optimizer updates than a step has samples."""
    rollout = recipe.rollout
    updates = recipe.train.updates_per_step
    if learns_from_answers(recipe.algorithm.name):
        counts = {"rollout.prompts_per_step": rollout.prompts_per_step}
    else:
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        counts = {"rollout.prompts_per_step x samples_per_prompt": samples}
    if recipe.warm_start.steps:
        counts["warm_start.sequences_per_step"] = recipe.warm_start.sequences_per_step
    for name, count in counts.items():
        if count < updates:
            yield UserError(
                "train.updates_per_step",
                f"{updates} is more than {name} = {count}",
                f"set it to at most {min(counts.values())}",
            )
