"""A search over engine and training layouts: the fastest step that fits, for each set of things that it needs.

Engines are tried next to the recipe's training ranks, and training layouts next to its engines; the best of each are
then combined. Every candidate is judged by the functions of a plan, and what is found has the figures of `make_plan`.
The seconds of a reshard are known only then: they are a thousandth of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.placement.roles import resolve
from megarl.plan.batch import MEAN_RESPONSE_SHARE, step_samples
from megarl.plan.candidates import (
    Overlay,
    changes,
    engine_overlays,
    train_overlays,
    train_variants,
    with_fraction,
)
from megarl.plan.estimate import Estimate, Estimator
from megarl.plan.fit import HOST
from megarl.plan.layer_sizes import layer_sizes
from megarl.plan.model_size import ModelSize, resized, sizes_of
from megarl.plan.run_plan import RunPlan, make_plan
from megarl.preflight.layout_checks import reshard_errors
from megarl.types import UserError

Side = Literal["engine", "train", "both"]
Need = Literal["fp8", "deepep", "draft", "offload"]
Needs = frozenset[Need]
ENGINE_PHASES = frozenset({"rollout", "reshard"})  # whose memory the engines decide
_COMBINED = 3  # candidates of each kind that are combined with those of the other side
_TRIED = 60  # training layouts of each kind whose memory is counted in full, the fastest first
_SIMULATED = 10  # engine layouts of each kind whose rollout is simulated, the fastest by a formula
_SHOWN = 2  # of each kind
# a slower candidate is shown for so much less memory, and if it is not slower than so
_LESS = 0.95
_SLOWER = 1.3


@dataclass(frozen=True)
class Found:
    """One of the best layouts: the keys to lay over the recipe, and the plan of the recipe with them."""

    overlay: Overlay
    plan: RunPlan

    @property
    def needs(self) -> Needs:
        return needs_of(self.plan.recipe)


@dataclass(frozen=True)
class SearchResult:
    """own: the recipe's plan. found: the fastest first; no row is beaten in seconds, memory of the GPU and needs.

    tried: numbers of engine layouts and of training layouts that were tried.
    """

    side: Side
    own: RunPlan
    found: tuple[Found, ...]
    tried: tuple[int, int]

    @cached_property
    def best(self) -> dict[Needs, Found]:
        """The fastest of each kind, by its needs."""
        fastest: dict[Needs, Found] = {}
        for row in self.found:
            fastest.setdefault(row.needs, row)
        return fastest


def needs_of(recipe: Recipe) -> Needs:
    """What a recipe needs besides GPUs.

    fp8: a correction of the samples' probabilities; deepep: its kernels; draft: an MTP layer; offload: host memory.
    """
    engine = recipe.rollout.engine
    found: dict[Need, bool] = {
        "fp8": engine.fp8,
        "deepep": engine.experts == "deepep",
        "draft": engine.draft > 0,
    }
    found["offload"] = recipe.train.optimizer_offload
    return frozenset(need for need, is_needed in found.items() if is_needed)


def search(
    recipe: Recipe, hardware: Hardware, side: Side, response_share: float = MEAN_RESPONSE_SHARE
) -> SearchResult:
    """The best layouts of a recipe. Raises UserErrors as `make_plan`, and UserError where nothing can be found."""
    sampled = not learns_from_answers(recipe.algorithm.name)
    if side == "engine" and not sampled:
        problem = f"{side}, but {recipe.algorithm.name} learns from the data's answers and samples nothing"
        raise UserError("--search", problem, "give it train")
    own = make_plan(recipe, hardware, response_share)
    estimator = Estimator(own.recipe, hardware, step_samples(own.recipe, response_share), own.sizes)
    if side != "train" and sampled:
        engines = list(engine_overlays(own.recipe, hardware))
    else:
        engines = []
    if side != "engine":
        trains = list(train_overlays(own.recipe))
    else:
        trains = []
    best_engines = _best_engines(estimator, engines, ENGINE_PHASES if side == "both" else None)
    training_phases = frozenset({*own.memory.device, HOST}) - ENGINE_PHASES
    best_trains = _best_trains(estimator, trains, training_phases if side == "both" else None)
    pairs = product([{}, *best_engines], [{}, *best_trains])
    estimates = [estimator.estimate(one | other) for one, other in pairs]
    found = _planned(own, _not_beaten([found for found in estimates if found.fits()]))
    if not found:
        if side == "both":
            hint = "use more GPUs"
        else:
            hint = "search both sides, or use more GPUs"
        raise UserError("--search", f"{side}, but no layout was found that fits", hint)
    return SearchResult(side, own, tuple(found), (len(engines), len(trains)))


def _best_engines(
    estimator: Estimator, layouts: Sequence[Overlay], phases: frozenset[str] | None
) -> list[Overlay]:
    """The best of each kind next to the recipe's training ranks, with their share of memory; phases: that must fit."""
    best = []
    for layout in layouts:
        fitting = [found for found in _with_shares(estimator, layout) if found.fits(phases)]
        # of those with the most room the one that takes least memory: room decides the seconds
        if fitting:
            best.append(max(fitting, key=lambda found: found.memory.kv.concurrency_mean))
    return [found.overlay for found in _few_of_each_kind(_promising(best), _COMBINED)]


def _promising(engines: Sequence[Estimate]) -> list[Estimate]:
    """The engines of each kind with about the shortest rollouts: the others are not simulated."""
    kinds: dict[Needs, list[Estimate]] = {}
    for found in engines:
        kinds.setdefault(needs_of(found.recipe), []).append(found)
    fastest = [
        sorted(kind, key=lambda found: found.rough_rollout_s)[:_SIMULATED]
        for kind in kinds.values()
    ]
    return [found for kind in fastest for found in kind]


def _with_shares(estimator: Estimator, layout: Overlay) -> Iterator[Estimate]:
    """With each share of memory, until all sequences have room in the cache: more would only fill the GPU."""
    for overlay in with_fraction(estimator.recipe, layout):
        found = estimator.estimate(overlay)
        yield found
        if found.memory.kv.concurrency_mean >= found.memory.kv.wanted:
            return


def _best_trains(
    estimator: Estimator, layouts: Sequence[Overlay], phases: frozenset[str] | None
) -> list[Overlay]:
    """The best of each kind next to the recipe's engines; phases: that must fit. Their parts become the estimator's.

    All are ordered by about what they take; memory is counted in full for the fastest, until enough of them fit.
    """
    if not layouts:
        return []
    models = resolve(estimator.recipe).models
    tps = {layout["train"]["tp"] for layout in layouts} | {
        role.layout.tp for role in models.values()
    }
    estimator.parts = layer_sizes(models, sorted(tps))
    variants = [
        overlay for layout in layouts for overlay in train_variants(estimator.recipe, layout)
    ]
    by_offload: dict[bool, list[tuple[float, Overlay]]] = {False: [], True: []}
    for overlay in variants:
        rough_s = estimator.rough_train_s(overlay)
        if rough_s is not None:
            by_offload[overlay["train"]["optimizer_offload"]].append((rough_s, overlay))
    best = []
    for rough in by_offload.values():
        fitting: list[Estimate] = []
        for _, overlay in sorted(rough, key=lambda pair: pair[0])[:_TRIED]:
            found = estimator.estimate(overlay)
            fitting += [found] if found.fits(phases) else []
            if len(fitting) > 2 * _COMBINED:
                break
        best += _few_of_each_kind(fitting, _COMBINED)
    return [found.overlay for found in best]


def _few_of_each_kind(estimates: Sequence[Estimate], number: int) -> list[Estimate]:
    """Of each kind the fastest, and slower ones that take less memory of a GPU than all before them."""
    kept: dict[Needs, list[Estimate]] = {}
    for found in sorted(estimates, key=lambda found: found.step_s):
        same_kind = kept.setdefault(needs_of(found.recipe), [])
        if len(same_kind) < number and not any(_beats(faster, found) for faster in same_kind):
            same_kind.append(found)
    return [found for same_kind in kept.values() for found in same_kind]


def _beats(faster: Estimate, other: Estimate) -> bool:
    """Whether a slower candidate has too little for being slower."""
    return (
        other.memory.peak_bytes > _LESS * faster.memory.peak_bytes
        or other.step_s > _SLOWER * faster.step_s
    )


def _not_beaten(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those that no other one beats in seconds, memory of the GPU and needs, the fastest first; some of each kind.

    Without those that a reshard refuses: training ranks may cut the tiles of fp8 engines.
    """
    kept: list[Estimate] = []
    for found in sorted(estimates, key=lambda found: found.step_s):
        needs = needs_of(found.recipe)
        beaten = any(needs_of(faster.recipe) <= needs and _beats(faster, found) for faster in kept)
        same_kind = [faster for faster in kept if needs_of(faster.recipe) == needs]
        if not beaten and len(same_kind) < _SHOWN and not reshard_errors(found.roles):
            kept.append(found)
    return kept


def _planned(own: RunPlan, estimates: Sequence[Estimate]) -> list[Found]:
    """With their plans, the fastest first. Models in new layouts are built, all in one subprocess."""
    models = [found.roles.models for found in estimates]
    sizes = [resized(own.sizes, changed) for changed in models]
    to_build = [changed for changed, known in zip(models, sizes, strict=True) if known is None]
    built = iter(sizes_of(to_build, whole=False) if to_build else [])
    found = []
    tree = own.recipe.model_dump(mode="json")
    for estimate, known in zip(estimates, sizes, strict=True):
        exact = known or {
            name: _with_totals(own.sizes[name], size) for name, size in next(built).items()
        }
        plan = make_plan(estimate.recipe, own.hardware, own.response_share, exact)
        found.append(Found(changes(estimate.overlay, tree), plan))
    return sorted(found, key=lambda row: row.plan.step.total_s)


def _with_totals(known: ModelSize, size: ModelSize) -> ModelSize:
    """A size with the whole model's totals, which no layout changes."""
    return replace(size, **known.totals)
