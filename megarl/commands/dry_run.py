"""`megarl train --dry-run`: everything that can be checked of a run on a machine that has none of its GPUs.

Recipes of cluster runs are checked on machines without their weights and data; the output lists what was not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from megarl.algos import learns_from_answers
from megarl.checkpoints.quantised import weights_in_words
from megarl.config import Recipe
from megarl.device import DEVICE
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import Roles, resolve
from megarl.placement.train_layout import TrainLayout
from megarl.plan.adapter_sizes import adapters_in_words
from megarl.plan.batch import step_samples
from megarl.plan.reshard_cost import weight_file_bytes
from megarl.plan.turns import tool_load
from megarl.preflight.argument_checks import asks_megatron, asks_sglang
from megarl.preflight.checks_by_command import errors_elsewhere
from megarl.preflight.model_checks import stand_ins
from megarl.printable import Say
from megarl.resharding.maps import factor_maps, weight_maps
from megarl.resharding.reshard_plan import plan_streams
from megarl.resharding.shards import LayoutError, Part
from megarl.resharding.traffic import count_traffic
from megarl.types import UserError, UserErrors


def dry_run(recipe: Recipe, say: Say) -> None:
    """Check a recipe, launch nothing, write nothing, and say in some lines what was found.

    A recipe with placement.hardware is checked as for GPUs, any other as for this machine. Raises UserErrors with every
    error.
    """
    device = "cuda" if recipe.placement.hardware else DEVICE
    with_stand_ins, absent = stand_ins(recipe)
    roles = resolve(with_stand_ins)
    errors, of_episodes = errors_elsewhere(roles, device, absent)
    if errors:
        raise UserErrors(errors)
    for line in chain(
        _placement(roles),
        _checkpoint(roles),
        of_episodes,
        _assumed_turns(with_stand_ins),
        _reshard(roles, device),
        _not_checked(recipe, device, absent),
    ):
        say(line)


def _placement(roles: Roles) -> Iterator[str]:
    """The slots and parallel sizes of every model and of the engines."""
    for role in roles.models.values():
        name = "train" if role.name == "policy" else role.name
        yield f"{name}: {_axes(role.layout)}; slots {role.slots.start} to {role.slots.stop - 1}"
    engines = roles.engines
    if servers := roles.recipe.rollout.engine.external:
        yield f"engines: {len(servers)} SGLang servers of others: {', '.join(servers)}"
        return
    kind = engines.precision.in_words(roles.recipe.model.dtype)
    yield (
        f"engines: {engines.count} x TP{engines.tp} EP{engines.ep} DP{engines.dp} in {kind}; "
        f"slots {engines.first} to {engines.end - 1}"
    )


def _checkpoint(roles: Roles) -> Iterator[str]:
    """The weights that are read, and the adapters that are trained."""
    policy = roles.policy
    if policy.model.facts:
        yield f"model.path: {weights_in_words(policy.shape, policy.model.facts)}"
    if policy.lora:
        yield f"lora: {adapters_in_words(policy.shape, policy.lora)}"


def _assumed_turns(recipe: Recipe) -> Iterator[str]:
    """What a plan assumes of a step's episodes and needs no hardware for: their turns, and what tools have to do."""
    if recipe.episode is None or learns_from_answers(recipe.algorithm.name):
        return
    samples = step_samples(recipe)
    turns = samples.turns
    load = tool_load(recipe, turns, samples.num_drawn)
    yield f"episode: {turns.mean:g} turns in the mean, with {turns.observed_tokens:,.0f} observation tokens (assumed)"
    if load:
        each = f"each up to {load.call_s:g} s of a core ({load.limit})"
        core_s = load.calls * load.call_s
        yield f"episode: {load.calls:,.0f} calls a step (assumed), {each}: up to {core_s:,.0f} s of cores"


def _axes(layout: TrainLayout) -> str:
    """The parallel sizes that are more than 1."""
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")}
    words = " ".join(f"{axis.upper()}{size}" for axis, size in sizes.items() if size > 1)
    if layout.max_cp > 1:
        words += f" (CP {layout.cp_words})"
    return words or "one rank"


def _reshard(roles: Roles, device: str) -> Iterator[str]:
    """The traffic of the whole reshard, and of adapters on their own where engines get these."""
    if roles.recipe.rollout.engine.external:
        yield f"reshard: {weight_file_bytes(roles) / 1e9:.2f} GB of files, which every server reads"
        return
    policy = roles.policy
    engines = roles.engines
    on_gpus = device == "cuda"
    weights = weight_maps(policy.shape, policy.layout, engines, transformer_engine=on_gpus)
    yield from _exchange(roles, *weights, "reshard")
    factors = factor_maps(
        policy.shape, policy.layout, engines, policy.lora, transformer_engine=on_gpus
    )
    if factors:
        yield from _exchange(roles, *factors, "reshard of adapters, in each step")


def _exchange(
    roles: Roles, sources: Sequence[Part], targets: Sequence[Part], name: str
) -> Iterator[str]:
    """The traffic of an exchange, and the plans of some of its members."""
    recipe = roles.recipe
    members = roles.num_members
    topology = {"gpus_per_node": recipe.placement.gpus_per_node, "dtype": recipe.model.dtype}
    sample = _sample(roles.policy.layout, roles.engines, members)
    try:
        total = count_traffic(sources, targets, members, **topology)
        needed = [
            plan_streams(sources, targets, member, members, **topology).rounds_needed(
                recipe.reshard.round_bytes
            )
            for member in sample
        ]
    except LayoutError as error:
        hint = "tell us: the two maps do not fit"
        raise UserError("rollout.engine", str(error), hint) from error
    whole, local, nvlink, fabric = (
        f"{counts.max() / 1e9:.2f}"
        for counts in (total.dest, total.local, total.node_in, total.fabric_in)
    )
    yield (
        f"{name}: {len(sources)} source and {len(targets)} target parts; at most {whole} GB into a GPU "
        f"(up to {local} from its own training rank, {nvlink} inside the node, {fabric} over the fabric)"
    )
    # of each send stage all go on with the largest number
    rounds = sum(map(max, zip(*needed, strict=True)))
    yield f"{name}: planned for {len(sample)} of {members} members ({str(sample)[1:-1]}): about {rounds} rounds"


def _sample(layout: TrainLayout, engines: EngineLayout, members: int) -> list[int]:
    """The first and the last member, the first of each of a few pipeline stages, and both ends of the first engine."""
    per_stage = layout.world_size // layout.pp
    stages = (0, layout.pp // 2, layout.pp - 1)
    of_engine = (engines.first, engines.first + engines.tp - 1)
    return sorted({*(stage * per_stage for stage in stages), *of_engine, members - 1})


def _not_checked(recipe: Recipe, device: str, absent: dict[str, str]) -> Iterator[str]:
    for key, what in absent.items():
        yield f"not checked here: {key}: {what}"
    if not asks_megatron(recipe, device):
        yield "not checked here: Megatron's own classes, which get no options from this recipe"
    if recipe.rollout.engine.external:
        yield "not checked here: whether the servers answer and fit, which a run asks before it starts"
    elif not asks_sglang(recipe, device):
        yield "not checked here: SGLang's own class, which gets nothing but sizes from this recipe"
    if recipe.episode and device != DEVICE:
        key = "environment" if recipe.episode.environment else "tools"
        yield f"not checked here: episode.{key}: what is prepared before the first episode, as an index or a sandbox"
    if device != DEVICE:
        from megarl.rollout.sglang.option_check import NOT_CHECKED

        yield f"not checked here: {NOT_CHECKED}; Megatron's kernels, which ask for TransformerEngine"
    if recipe.placement.hardware:
        has_tools = recipe.episode and not recipe.episode.agent
        yield f"not checked here: memory and time{', and cores for tools' if has_tools else ''}: megarl plan"
    yield f"{recipe.run.name}: nothing to correct"
