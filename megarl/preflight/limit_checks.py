"""Errors of sizes that exceed a machine, of folders and the hardware file, and of secrets in a recipe."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.config import PlacementConfig, Recipe, RunConfig
from megarl.config.hardware import load_hardware
from megarl.disk import is_writable
from megarl.placement.roles import train_layout
from megarl.tracking.secrets import secrets_in
from megarl.types import UserError, UserErrors
from megarl.types.listed import ErrorIterator, listed

_MOST_SAMPLES = 2**24  # of a step: the controller holds a summary of each
_LONGEST_FOLDER = 3500  # bytes of a path, of which Linux takes 4095
_RANK_BYTES = 200_000_000  # the least memory of a training rank on CPU
_NO_SECRET = "give the name of an environment variable instead, and let the function read that"


@listed
def limit_errors(recipe: Recipe, device: str) -> ErrorIterator:
    """Batches too large for one process, GPUs that a machine cannot have, unusable folders and files."""
    prompts = recipe.rollout.prompts_per_step
    samples = recipe.rollout.samples_per_prompt
    if prompts * samples > _MOST_SAMPLES:
        yield UserError(
            "rollout.prompts_per_step",
            f"{prompts} prompts of {samples} samples each are {prompts * samples} samples a step",
            f"bring the product with rollout.samples_per_prompt to at most {_MOST_SAMPLES}",
        )
    if recipe.placement.network != "nodes":
        yield from _gpu_errors(recipe.placement, device)
        yield from _spare_errors(recipe.placement)
    if recipe.placement.hardware:
        yield from _hardware_errors(recipe.placement.hardware)
    yield from _folder_errors(recipe.run)
    yield from _timeline_errors(recipe)


def _timeline_errors(recipe: Recipe) -> ErrorIterator:
    """Steps that the run does not have, and ranks that the policy does not have."""
    steps = recipe.run.steps
    if late := [step for step in recipe.run.timeline.steps if step > steps]:
        problem = f"step {late[0]} is not one of the run's {steps}"
        yield UserError("run.timeline.steps", problem, f"name steps from 1 to {steps} (run.steps)")
    num_ranks = train_layout(recipe).world_size
    if absent := [rank for rank in recipe.run.timeline.profile_ranks if rank >= num_ranks]:
        problem = f"there is no rank {absent[0]} among {num_ranks} training ranks"
        yield UserError(
            "run.timeline.profile_ranks", problem, f"name ranks from 0 to {num_ranks - 1}"
        )


def _gpu_errors(placement: PlacementConfig, device: str) -> ErrorIterator:
    """More GPUs than a run on one machine can have; on CPU each simulated GPU is a process."""
    if device == "cpu":
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        most = max(1, room // _RANK_BYTES)
        problem = (
            f"{placement.gpus} simulated GPUs are as many processes of {_RANK_BYTES / 1e9:g} GB and more, "
            f"and this machine has {room / 1e9:.0f} GB"
        )
        hint = f"set it to at most {most}"
    else:
        most = placement.gpus_per_node
        problem = f"{placement.gpus} GPUs on one machine (placement.network is loopback), whose nodes have {most}"
        hint = (
            f"set it to at most {most}, or placement.gpus_per_node to {placement.gpus}, "
            "or placement.network to nodes"
        )
    if placement.gpus > most:
        yield UserError("placement.gpus", problem, hint)


def _spare_errors(placement: PlacementConfig) -> ErrorIterator:
    if placement.spare_nodes:
        yield UserError(
            "placement.spare_nodes",
            f"{placement.spare_nodes} of a run on this machine alone (placement.network is loopback)",
            "set it to 0, or placement.network to nodes",
        )


def _hardware_errors(path: str) -> ErrorIterator:
    try:
        load_hardware(path)
    except UserErrors as raised:
        for error in raised.errors:
            yield UserError(
                "placement.hardware",
                f"{error.where}: {error.problem}",
                f"{error.hint}, or leave the key out",
            )


def _folder_errors(run: RunConfig) -> ErrorIterator:
    """run.dir must be a folder that exists or can be made, and short enough for the names of the files in it."""
    folder = Path(run.dir).absolute()
    length = len(os.fsencode(folder / run.name))
    if length > _LONGEST_FOLDER:
        yield UserError(
            "run.dir",
            f"with run.name it makes a path of {length} bytes, to which the names of files are added",
            f"name a folder of at most {_LONGEST_FOLDER} bytes",
        )
        return
    while not os.path.lexists(folder):
        folder = folder.parent
    if not is_writable(folder):
        yield UserError(
            "run.dir", f"{folder} is not a folder that can be written to", "name another folder"
        )


@listed
def secret_errors(recipe: Recipe) -> ErrorIterator:
    """Secrets in arguments that are passed through, found by the names of their keys, and passwords in URLs.

    A run saves its recipe in its folder, for everybody who may read that folder.
    """
    free = [("reward.arguments", recipe.reward.arguments, _NO_SECRET)]
    for source, function in recipe.reward.by_source.items():
        free.append((f"reward.by_source.{source}.arguments", function.arguments, _NO_SECRET))
    free.append(
        ("rollout.engine.sglang", recipe.rollout.engine.sglang, "remove it from the recipe")
    )
    for where, arguments, hint in free:
        for place, what in secrets_in(arguments, where):
            yield UserError(place, f"{what}, and the run saves its recipe", hint)
