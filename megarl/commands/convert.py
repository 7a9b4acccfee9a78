"""A checkpoint of a run as a Hugging Face folder, which training ranks load in any layout and write together.

Or its adapters alone, which this process reads and writes.
"""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoints import peft
from megarl.checkpoints.snapshots import Snapshot, Snapshots
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.controller.resuming import FOLDER, model_errors
from megarl.disk import output_error
from megarl.fleet.fleet import training_fleet
from megarl.model.hf_config import model_shape
from megarl.placement.roles import lora_size, resolve
from megarl.printable import Say
from megarl.types import UserError, UserErrors


def convert_run(
    recipe: Recipe, run: Path, out: Path, step: int | None, say: Say, *, fp8: bool, adapter: bool
) -> None:
    """Write the checkpoint of `step`, or the newest good one, of the run in the folder `run`.

    adapter: its adapters alone. Raises as the functions below.
    """
    if adapter:
        check_adapter(recipe, fp8=fp8)
    else:
        from megarl.preflight.checks_by_command import check_convert

        check_convert(recipe)
    snapshot = find_snapshot(recipe, run, out, step, say)
    if adapter:
        convert_adapter(recipe, snapshot, out, say)
    else:
        convert_snapshot(recipe, snapshot, out, say, fp8=fp8)


def find_snapshot(recipe: Recipe, run: Path, out: Path, step: int | None, say: Say) -> Snapshot:
    """The checkpoint to convert: of `step`, or the newest good one of the run in the folder `run`.

    Raises UserErrors: there is none, it is of another model than the recipe's, `out` cannot be written.
    """
    error = output_error(out, "", kind="folder")
    errors = [error] if error else []
    snapshot = Snapshots(run / FOLDER, say).newest(step)
    if snapshot is None:
        if step is None:
            problem = "there is no whole checkpoint"
            hint = "name another run"
        else:
            problem = f"there is no whole checkpoint of step {step}"
            hint = "leave --step out for the newest"
        errors.append(UserError(str(run / FOLDER), problem, hint))
    else:
        errors += model_errors(snapshot, recipe)
    if snapshot is None or errors:
        raise UserErrors(errors)
    return snapshot


def check_adapter(recipe: Recipe, *, fp8: bool) -> None:
    """Raises UserError where a run has no adapters to write, or they are asked for in fp8."""
    if recipe.lora is None:
        raise UserError(
            "--adapter", "the run's recipe has no lora", "leave it out to write the whole model"
        )
    if fp8:
        raise UserError(
            "--fp8",
            "adapters are written in model.dtype",
            "leave it out, or --adapter to write the merged model in fp8",
        )


def convert_adapter(recipe: Recipe, snapshot: Snapshot, out: Path, say: Say) -> None:
    """Write the adapters in PEFT's format, in this process: the model itself is not read."""
    from megarl.parallel.dist_checkpoint import read_factors

    shape = model_shape(recipe.model.path, recipe.model.family)
    size = lora_size(recipe.lora, shape)
    assert size
    factors = read_factors(snapshot.folder)
    peft.write(factors, shape, size, recipe.model.path, out)
    say(f"{out} has the adapters of {snapshot.folder}, in PEFT's format")
    if lost := peft.lost_in_transformers(factors):
        say(
            f"transformers' own class of this model does not load all of them ({lost}): use the merged model there"
        )


def convert_snapshot(
    recipe: Recipe, snapshot: Snapshot, out: Path, say: Say, *, fp8: bool = False
) -> None:
    """Write the weights with the configuration and the tokenizer of model.path; `out` gets its name when all is there.

    fp8: the weights of linear layers in tiles of 128 x 128 with scales. Raises WorkerFailed when a training rank fails.
    """
    roles = resolve(recipe, learns=False)
    with Cluster(
        roles.num_training_slots, recipe.placement.node_gpus, recipe.run.timeout_s, say
    ) as cluster:
        say("starting training ranks")
        trainers = training_fleet(cluster, roles).trainers
        trainers.load_weights(snapshot.folder.absolute())
        trainers.export(out.absolute(), fp8=fp8)
    say(f"{snapshot.folder} is a Hugging Face checkpoint in {out}")
