"""One micro-batch through the training ranks and an engine, or one rank: the first operation whose outputs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.checkpoints.snapshots import Snapshot, Snapshots
from megarl.cluster.ray_session import Cluster
from megarl.commands.compared_tokens import compared_tokens
from megarl.config import Recipe
from megarl.controller.resuming import FOLDER, model_errors
from megarl.disk import writing
from megarl.fleet.external_fleet import make_fleet
from megarl.fleet.fleet import training_fleet
from megarl.fleet.rank_groups import PolicyRanks
from megarl.model.shape import ModelShape
from megarl.numerics import operations
from megarl.numerics.differences import compare, first_difference
from megarl.numerics.parts import ENGINE, TRAINING, OutputPart, read_side
from megarl.numerics.report import NamedSide, Sides, table_lines, verdict
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import Roles, resolve
from megarl.placement.train_layout import RankCoords, TrainLayout
from megarl.printable import Say
from megarl.training.calls import RecordLayersCall
from megarl.types import IntArray, UserError, UserErrors

_OUTPUTS = "layers"  # the folder of a run with the files of outputs
# 1 is a process that failed, 2 an option
_NOTHING_COMPARED = 1
_DIFFERS = 3


@dataclass(frozen=True)
class CompareOptions:
    """What `megarl compare-layers` was asked.

    step: of the checkpoint, 0 for the weights that the run began with; None: the newest, or these where there is none.
    samples: a file of `megarl rollout`. num_tokens: at most. has_engine: else the other side is one training rank.
    """

    run: Path
    step: int | None
    samples: Path | None
    num_tokens: int
    has_engine: bool


def compare_run(
    recipe: Recipe, asked: CompareOptions, print_result: Say, print_progress: Say
) -> int:
    """Compare; the exit code: 0 all agree, 3 something differs, 1 no operation was recorded on both sides.

    Raises UserErrors, and WorkerFailed of a process.
    """
    from megarl.preflight.checks_by_command import check_compare_layers

    roles = resolve(recipe, learns=False)
    has_engine = asked.has_engine
    check_compare_layers(roles, has_engine=has_engine)
    checkpoint = find_checkpoint(recipe, asked.run, asked.step, print_progress)
    shape = roles.policy.shape
    sequences = compared_tokens(
        recipe=recipe,
        run=asked.run,
        samples=asked.samples,
        step=asked.step or None,
        weights_step=checkpoint.step if checkpoint else 0,
        num_tokens=asked.num_tokens,
        vocab_size=shape.vocab_size,
        say=print_progress,
    )
    weights = checkpoint.folder.absolute() if checkpoint else None
    folder = asked.run.absolute() / _OUTPUTS
    recording = _LayerRecording(roles, folder, weights, sequences, print_progress)
    with writing(asked.run, _OUTPUTS):
        recording.clear()
    if has_engine:
        ours, theirs = recording.with_engine()
        dtype = "fp8" if roles.engines.fp8 else recipe.model.dtype
    else:
        ours, theirs = recording.with_one_rank()
        dtype = recipe.model.dtype
    differences = compare(ours, theirs, dtype)
    lengths = [len(token_ids_T) for token_ids_T in sequences]
    print_result(verdict(differences, recording.sides(has_engine), lengths))
    for line in table_lines(differences):
        print_result(line)
    print_result(
        f"in units of each output's RMS; explained: by rounding in {dtype}, growing with the root of the operations"
    )
    print_result(f"the outputs are in {folder}")
    if not differences:
        return _NOTHING_COMPARED
    return _DIFFERS if first_difference(differences) else 0


def find_checkpoint(recipe: Recipe, run: Path, step: int | None, say: Say) -> Snapshot | None:
    """The checkpoint whose weights compute; None: those of model.path do. step: None, the newest. Raises UserErrors."""
    if step == 0:
        return None
    snapshot = Snapshots(run / FOLDER, say).newest(step)
    if snapshot is None and step is not None:
        raise UserError(
            "--step",
            f"{run / FOLDER} has no whole checkpoint of step {step}",
            "leave it out for the newest, or set it to 0 for the weights of model.path",
        )
    if snapshot is None:
        say("the run has no checkpoint: the weights are those of model.path")
        return None
    if errors := model_errors(snapshot, recipe):
        raise UserErrors(errors)
    say(f"the weights are those of {snapshot.folder}")
    return snapshot


@dataclass
class _LayerRecording:
    """Starts the processes of one comparison and has them record; the files of outputs lie in `folder`."""

    roles: Roles
    folder: Path
    weights: Path | None
    sequences: list[IntArray]
    say: Say

    def clear(self) -> None:
        """Make the folder, without files of an earlier comparison."""
        for folder in (self.folder, self.folder / "one-rank"):
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("*.npz"):
                file.unlink()

    def with_engine(self) -> tuple[list[OutputPart], list[OutputPart]]:
        """The outputs of the training ranks and of the first engine, whose choices of experts they replay."""
        recipe = self.roles.recipe
        layout = self.roles.policy.layout
        num_terms = math.lcm(layout.tp, self.roles.engines.tp)
        with self._cluster(recipe.placement.gpus) as cluster:
            self.say("starting training ranks and engines")
            fleet = make_fleet(cluster, recipe, self.say, learns=False)
            if self.weights:
                fleet.onload_for("train")
                fleet.trainers.load_weights(self.weights)
            fleet.reshard()
            worker = fleet.engines.processes.engines[0].worker
            tokens = [token_ids_T.tolist() for token_ids_T in self.sequences]
            call = worker.call("record_layers", self.folder, tokens, num_terms)
            (logprobs,) = cluster.gather({call: worker.name})
            theirs = [*read_side(self.folder, ENGINE), self._logprobs(logprobs)]
            fleet.onload_for("train")
            self._record(cluster, fleet.trainers, self.folder, self._experts(theirs), num_terms)
            fleet.shutdown()
        return read_side(self.folder, TRAINING), theirs

    def with_one_rank(self) -> tuple[list[OutputPart], list[OutputPart]]:
        """The outputs of the training ranks and of one rank with the same weights, whose choices they replay."""
        num_terms = self.roles.policy.layout.tp
        alone = self.folder / "one-rank"
        self._of_ranks(resolve(one_rank(self.roles.recipe), learns=False), alone, None, num_terms)
        theirs = read_side(alone, TRAINING)
        self._of_ranks(self.roles, self.folder, self._experts(theirs), num_terms)
        return read_side(self.folder, TRAINING), theirs

    def sides(self, has_engine: bool) -> Sides:
        """How the ranks of both sides are called."""
        shape = self.roles.policy.shape
        ours = training_side(self.roles.policy.layout, shape)
        if has_engine:
            return ours, engine_side(self.roles.engines, shape)
        return ours, NamedSide("reference rank", [""], lambda layer, expert: (0,))

    def _of_ranks(
        self, roles: Roles, folder: Path, experts: list[np.ndarray] | None, num_terms: int
    ) -> None:
        with self._cluster(roles.num_training_slots) as cluster:
            count = roles.policy.layout.world_size
            self.say(f"starting {count} training rank{'s' * (count != 1)}")
            trainers = training_fleet(cluster, roles).trainers
            if self.weights:
                trainers.load_weights(self.weights)
            self._record(cluster, trainers, folder, experts, num_terms)

    def _record(
        self,
        cluster: Cluster,
        trainers: PolicyRanks,
        folder: Path,
        experts: list[np.ndarray] | None,
        num_terms: int,
    ) -> None:
        call = RecordLayersCall(folder, self.sequences, experts, num_terms)
        cluster.gather(
            {worker.call("record_layers", call): worker.name for worker in trainers.workers}
        )

    def _cluster(self, num_slots: int) -> Cluster:
        recipe = self.roles.recipe
        return Cluster(num_slots, recipe.placement.node_gpus, recipe.run.timeout_s, self.say)

    def _logprobs(self, logprobs: Sequence[Sequence[float]]) -> OutputPart:
        """The engine's, each at the token before it."""
        first_tokens = np.cumsum([0, *map(len, self.sequences)])[:-1]
        numbers = [
            np.arange(first, first + len(of_sequence))
            for first, of_sequence in zip(first_tokens, logprobs, strict=True)
        ]
        values = np.array([logp for of_sequence in logprobs for logp in of_sequence], np.float32)
        return OutputPart(
            layer=operations.AFTER_LAYERS,
            operation=operations.LOGPROBS,
            rank=0,
            tokens_N=np.concatenate(numbers).astype(np.int64),
            values_NF=values[:, None],
        )

    def _experts(self, parts: Sequence[OutputPart]) -> list[np.ndarray] | None:
        """Of each sequence the experts [T, layers with experts, K] that a side chose; None: not recorded."""
        shape = self.roles.policy.shape
        lengths = [len(token_ids_T) for token_ids_T in self.sequences]
        chosen = chosen_experts(parts, shape, sum(lengths))
        if chosen is None:
            return None
        return np.split(chosen, np.cumsum(lengths)[:-1])


def chosen_experts(
    parts: Sequence[OutputPart], shape: ModelShape, num_tokens: int
) -> np.ndarray | None:
    """[T, layers with experts, K], int16: -1 where a token's choice is not known; None for a model without experts."""
    layers = [layer for layer in range(shape.num_layers) if not shape.is_dense(layer)]
    of_layers: dict[int, list[OutputPart]] = {layer: [] for layer in layers}
    for part in parts:
        if part.operation == operations.ROUTER_CHOICES:
            of_layers[part.layer].append(part)
    num_chosen = max(
        (int(part.values_NF.sum(1).max(initial=0)) for of in of_layers.values() for part in of),
        default=0,
    )
    if not num_chosen:
        return None
    chosen_TMK = np.full((num_tokens, len(layers), num_chosen), -1, np.int16)
    for place, layer in enumerate(layers):
        for part in reversed(of_layers[layer]):
            is_whole_N = part.values_NF.sum(1) == num_chosen
            _, experts = np.nonzero(part.values_NF[is_whole_N])
            chosen_TMK[part.tokens_N[is_whole_N], place] = experts.reshape(-1, num_chosen)
    return chosen_TMK


def one_rank(recipe: Recipe) -> Recipe:
    """The recipe with its training on one rank."""
    alone = {"tp": 1, "pp": 1, "ep": 1, "cp": 1, "vpp": 1, "etp": None, "layers_per_stage": ()}
    train = recipe.train.model_copy(update=alone)
    placement = recipe.placement.model_copy(update={"gpus": 1, "train_gpus": None})
    return recipe.model_copy(update={"train": train, "placement": placement})


def training_side(layout: TrainLayout, shape: ModelShape) -> NamedSide:
    """The training ranks."""
    at = [layout.coords(rank) for rank in range(layout.world_size)]

    def experts_on(layer: int, expert: int) -> tuple[int, ...]:
        ep = expert * layout.ep // max(shape.num_experts, 1)
        return tuple(
            coords.rank
            for coords in at
            if coords.ep == ep
            and any(
                layer in layout.layers(coords.pp, shape.num_layers, chunk)
                for chunk in range(layout.vpp)
            )
        )

    return NamedSide("training rank", [_coordinates(coords, layout) for coords in at], experts_on)


def _coordinates(at: RankCoords, layout: TrainLayout) -> str:
    axes = ("tp", "cp", "dp", "pp", "ep")
    return ", ".join(f"{axis} {getattr(at, axis)}" for axis in axes if getattr(layout, axis) > 1)


def engine_side(engine: EngineLayout, shape: ModelShape) -> NamedSide:
    """The ranks of one engine."""

    def experts_on(layer: int, expert: int) -> tuple[int, ...]:
        ep = expert * engine.ep // max(shape.num_experts, 1)
        return tuple(range(ep * engine.moe_tp, (ep + 1) * engine.moe_tp))

    return NamedSide("engine rank", [""] * engine.tp, experts_on)
