"""A search over engine and training layouts: the fastest step that fits, for each set of things that it needs.

Engines are tried next to the recipe's training ranks, and training layouts next to its engines; the best of each are
then combined. Every candidate is judged by the functions of a plan, and what is found has the figures of `make_plan`.
The seconds of a reshard are known only then: they are a thousandth of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Literal

from megarl.algos import learns_from_answers
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.config.loading import overlaid
from megarl.parallel.option_values import has_bfloat16_moments
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.flex_dispatcher import DISPATCHER
from megarl.placement.overlaps import OTHER_EXCHANGES, PLAIN_EXCHANGE
from megarl.placement.roles import RoleName, resolve
from megarl.placement.train_layout import TrainLayout
from megarl.plan.batch import MEAN_RESPONSE_SHARE, step_samples
from megarl.plan.candidates import (
    Overlay,
    changes,
    engine_overlays,
    in_fp8,
    train_overlays,
    train_variants,
    with_exchange,
    with_fraction,
)
from megarl.plan.estimate import Estimate, Estimator, Needs, needs_of
from megarl.plan.fit import HOST
from megarl.plan.layer_sizes import LayerSizes, layer_sizes
from megarl.plan.layer_time import HIDDEN_SHARE
from megarl.plan.model_size import resized, sizes_of
from megarl.plan.run_plan import RunPlan, make_plan
from megarl.preflight.layout_checks import reshard_errors
from megarl.preflight.number_checks import number_errors
from megarl.types import UserError

Side = Literal["engine", "train", "both"]
# whether AdamW is on the host, and whether its moments are in bfloat16
_OptimizerState = tuple[bool, bool]
ENGINE_PHASES = frozenset({"rollout", "reshard"})  # whose memory the engines decide
_COMBINED = 3  # candidates of each kind that are combined with those of the other side
_TRIED = 60  # training layouts of each kind whose memory is counted in full, the fastest first
_SIMULATED = 10  # engine layouts of each kind whose rollout is simulated, the fastest by a formula
_SHOWN = 2  # of each kind
# Of a step's seconds, what another exchange saves at most: of two things side by side the shorter one is no more than
# half. DeepEP's is taken to save no more.
_MOST_SAVED = HIDDEN_SHARE / 2
# a slower candidate is shown for so much less memory, and if it is not slower than so
_LESS = 0.95
_SLOWER = 1.3


@dataclass(frozen=True)
class Found:
    """One of the best layouts: the keys to lay over the recipe, and the plan of the recipe with them."""

    overlay: Overlay
    plan: RunPlan

    @cached_property
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


def search(
    recipe: Recipe, hardware: Hardware, side: Side, response_share: float = MEAN_RESPONSE_SHARE
) -> SearchResult:
    """The best layouts of a recipe. Raises UserErrors as `make_plan`, and UserError where nothing can be found."""
    if recipe.rollout.engine.external:
        problem = f"{side}, and how long external engines take for a step is not known"
        raise UserError("--search", problem, "leave it out, or rollout.engine.external")
    sampled = not learns_from_answers(recipe.algorithm.name)
    if side == "engine" and not sampled:
        problem = f"{side}, but {recipe.algorithm.name} learns from the data's answers and samples nothing"
        raise UserError("--search", problem, "give it train")
    recipe_plan = make_plan(recipe, hardware, response_share, in_full=False)
    estimator = Estimator(
        recipe_plan.recipe,
        hardware,
        step_samples(recipe_plan.recipe, response_share),
        recipe_plan.sizes,
    )
    engines: list[Overlay] = []
    trains: list[Overlay] = []
    if side != "train" and sampled:
        engines = list(engine_overlays(recipe_plan.recipe, hardware))
    if side != "engine":
        trains = list(train_overlays(recipe_plan.recipe))
    engine_phases = train_phases = None
    if side == "both":
        engine_phases = ENGINE_PHASES
        train_phases = frozenset({*recipe_plan.memory.device, HOST}) - ENGINE_PHASES
    with ThreadPoolExecutor(1) as builder:  # whose subprocess works meanwhile
        parts = builder.submit(_parts, estimator, trains)
        best_engines = _best_engines(estimator, engines, engine_phases)
        estimator.parts = parts.result()
    fp8_engines = any(_fp8_engines(estimator.recipe, engine) for engine in ({}, *best_engines))
    best_trains = _best_trains(estimator, trains, train_phases, fp8_engines=fp8_engines)
    estimates = [
        estimator.estimate(engine | train)
        for engine in ({}, *best_engines)
        for train in ({}, *best_trains)
        if _fp8_engines(estimator.recipe, engine) or not _fp8_training(estimator.recipe, train)
    ]
    layouts = _planned(
        recipe_plan, _not_beaten([estimate for estimate in estimates if estimate.fits()])
    )
    if not layouts:
        hint = "use more GPUs" if side == "both" else "search both sides, or use more GPUs"
        raise UserError("--search", f"{side}, but no layout was found that fits", hint)
    return SearchResult(side, recipe_plan, tuple(layouts), (len(engines), len(trains)))


def _best_engines(
    estimator: Estimator, layouts: Sequence[Overlay], phases: frozenset[str] | None
) -> list[Overlay]:
    """The best of each kind next to the recipe's training ranks, with their share of memory; phases: that must fit.

    Of each kind only those with about the shortest rollouts are simulated.
    """
    best: list[Estimate] = []
    for layout in layouts:
        shares = _with_shares(estimator, layout)
        fitting = [estimate for estimate in shares if estimate.fits(phases)]
        # of those with the most room the one that takes least memory: room decides the seconds
        if fitting:
            best.append(max(fitting, key=lambda estimate: estimate.memory.kv.concurrency_mean))
    promising: list[Estimate] = []
    for kind in _kinds(best):
        kind.sort(key=lambda estimate: estimate.rough_rollout_s)
        promising += kind[:_SIMULATED]
    return _few_of_each_kind(promising)


def _kinds(estimates: Iterable[Estimate]) -> list[list[Estimate]]:
    """Those of equal needs together."""
    kinds: dict[Needs, list[Estimate]] = {}
    for estimate in estimates:
        kinds.setdefault(estimate.needs, []).append(estimate)
    return list(kinds.values())


def _with_shares(estimator: Estimator, layout: Overlay) -> Iterator[Estimate]:
    """With each share of memory, until all sequences have room in the cache: more would only fill the GPU."""
    for overlay in with_fraction(estimator.recipe, layout):
        estimate = estimator.estimate(overlay)
        yield estimate
        if estimate.memory.kv.concurrency_mean >= estimate.memory.kv.wanted:
            return


def _parts(
    estimator: Estimator, layouts: Sequence[Overlay]
) -> Mapping[tuple[RoleName, int], LayerSizes]:
    """The parts of all models that training layouts are made of."""
    if not layouts:
        return {}
    models = resolve(estimator.recipe).models
    tps = {layout["train"]["tp"] for layout in layouts} | {
        role.layout.tp for role in models.values()
    }
    return layer_sizes(models, sorted(tps))


def _fp8_engines(recipe: Recipe, overlay: Overlay) -> bool:
    engine = overlay.get("rollout", {}).get("engine", {})
    return engine.get("weights", recipe.rollout.engine.weights) == "fp8"


def _fp8_training(recipe: Recipe, overlay: Overlay) -> bool:
    return overlay.get("train", {}).get("numbers", recipe.train.numbers) == "engine"


def _takes_numbers(recipe: Recipe, overlay: Overlay) -> bool:
    """Whether training in the numbers of fp8 engines is not refused."""
    fp8_engines = {"rollout": {"engine": {"weights": "fp8"}}}
    return not number_errors(resolve(overlaid(recipe, {**overlay, **fp8_engines})))


def _best_trains(
    estimator: Estimator,
    layouts: Sequence[Overlay],
    phases: frozenset[str] | None,
    *,
    fp8_engines: bool,
) -> list[Overlay]:
    """The best of each kind next to the recipe's engines; phases: that must fit.

    All are ordered by about what they take; memory is counted in full for the fastest, until enough of them fit.
    fp8_engines: of each kind the first that fits in fp8 is among them, too.
    """
    best: list[Overlay] = []
    for overlays in _train_kinds(estimator, layouts):
        fitting: list[Estimate] = []
        for overlay in overlays[:_TRIED]:
            estimate = estimator.estimate(overlay)
            if estimate.fits(phases):
                fitting.append(estimate)
            if len(fitting) > 2 * _COMBINED:
                break
        best += _few_of_each_kind(fitting)
        if fp8_engines:
            tried = (in_fp8(estimator.recipe, overlay) for overlay in overlays[:_TRIED])
            allowed = (overlay for overlay in tried if _takes_numbers(estimator.recipe, overlay))
            fits = (overlay for overlay in allowed if estimator.estimate(overlay).fits(phases))
            best += islice(fits, 1)
    return best


def _train_kinds(estimator: Estimator, layouts: Sequence[Overlay]) -> list[list[Overlay]]:
    """All variants by the optimizer's state and by dispatcher, about the fastest of each first."""
    variants = [
        with_exchange(variant, PLAIN_EXCHANGE)
        for layout in layouts
        for variant in train_variants(estimator.recipe, layout)
    ]
    plain = _roughly(estimator, variants)
    by_kind: dict[tuple[_OptimizerState, bool], list[Overlay]] = {}
    for _, overlay in sorted([*plain, *_with_others(estimator, plain)], key=itemgetter(0)):
        has_flex = overlay["train"]["megatron"][DISPATCHER] == "flex"
        kind = (_optimizer_state(overlay), has_flex)
        by_kind.setdefault(kind, []).append(overlay)
    return [*by_kind.values()]


def _roughly(estimator: Estimator, overlays: Iterable[Overlay]) -> list[tuple[float, Overlay]]:
    """With about the seconds that they take, the fastest first, without what no GPU holds or a run refuses."""
    timed = [(estimator.rough_train_s(overlay), overlay) for overlay in overlays]
    kept = [(seconds, overlay) for seconds, overlay in timed if seconds is not None]
    return sorted(kept, key=itemgetter(0))


def _optimizer_state(overlay: Overlay) -> _OptimizerState:
    train = overlay["train"]
    return train["optimizer_offload"], has_bfloat16_moments(train.get("optimizer", {}))


def _with_others(
    estimator: Estimator, plain: Sequence[tuple[float, Overlay]]
) -> list[tuple[float, Overlay]]:
    """As `_roughly`, with other exchanges with experts, those layouts that could be tried however much is saved."""
    seconds_of: defaultdict[_OptimizerState, list[float]] = defaultdict(list)
    for seconds, overlay in plain:
        seconds_of[_optimizer_state(overlay)].append(seconds)
    slowest_s = {
        state: max(seconds[:_TRIED]) / (1 - _MOST_SAVED) for state, seconds in seconds_of.items()
    }
    overlays = [
        with_exchange(overlay, options)
        for seconds, overlay in plain
        if seconds <= slowest_s[_optimizer_state(overlay)]
        for options in OTHER_EXCHANGES
    ]
    return _roughly(estimator, overlays)


def _few_of_each_kind(estimates: Iterable[Estimate]) -> list[Overlay]:
    """Of each kind the fastest, and slower ones that take less memory of a GPU than all before them."""
    few: list[Overlay] = []
    for kind in _kinds(sorted(estimates, key=_seconds)):
        kept: list[Estimate] = []
        for estimate in kind:
            if not any(_beats(faster, estimate) for faster in kept):
                kept.append(estimate)
        few += [estimate.overlay for estimate in kept[:_COMBINED]]
    return few


def _seconds(estimate: Estimate) -> float:
    return estimate.step_s


def _beats(faster: Estimate, other: Estimate) -> bool:
    """Whether a slower candidate has too little for being slower."""
    return (
        other.memory.peak_bytes > _LESS * faster.memory.peak_bytes
        or other.step_s > _SLOWER * faster.step_s
    )


def _not_beaten(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those that no other one beats in seconds, memory of the GPU and needs, the fastest first; some of each kind.

    Without those that a reshard refuses: training ranks may cut the tiles of fp8 engines. Many have equal layouts.
    """
    refused: dict[tuple[TrainLayout, EngineLayout], bool] = {}
    kept: list[Estimate] = []
    for estimate in sorted(estimates, key=_seconds):
        beating = [faster for faster in kept if faster.needs <= estimate.needs]
        if any(_beats(faster, estimate) for faster in beating):
            continue
        same_kind = [faster for faster in kept if faster.needs == estimate.needs]
        if len(same_kind) == _SHOWN:
            continue
        layouts = estimate.roles.policy.layout, estimate.roles.engines
        if layouts not in refused:
            refused[layouts] = bool(reshard_errors(estimate.roles))
        if not refused[layouts]:
            kept.append(estimate)
    return kept


def _planned(recipe_plan: RunPlan, estimates: Sequence[Estimate]) -> list[Found]:
    """With their plans, the fastest first. Models in new layouts are built, all in one subprocess."""
    sizes = [resized(recipe_plan.sizes, estimate.roles.models) for estimate in estimates]
    to_build = [
        estimate.roles.models
        for estimate, known in zip(estimates, sizes, strict=True)
        if known is None
    ]
    built = iter(sizes_of(to_build, whole=False) if to_build else [])
    layouts = []
    tree = recipe_plan.recipe.model_dump(mode="json")
    for estimate, known in zip(estimates, sizes, strict=True):
        # no layout changes a whole model's totals
        exact = known or {
            name: replace(size, **recipe_plan.sizes[name].totals)
            for name, size in next(built).items()
        }
        plan = make_plan(
            estimate.recipe,
            recipe_plan.hardware,
            recipe_plan.response_share,
            exact,
            in_full=False,
        )
        layouts.append(Found(changes(estimate.overlay, tree), plan))
    return sorted(layouts, key=lambda row: row.plan.step.total_s)
