"""The search against plans: equal figures, nothing that does not fit, and nothing better left out of its space."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megarl import cli
from megarl.config import Recipe
from megarl.config.hardware import Hardware, load_hardware
from megarl.config.loading import load_recipe, overlaid, overlay_yaml
from megarl.model.shape import ModelShape
from megarl.placement.overlaps import OTHER_EXCHANGES, PAIRED_PASSES, PLAIN_EXCHANGE
from megarl.placement.recomputation import ladder, recomputed_parts
from megarl.placement.roles import resolve
from megarl.placement.train_layout import TrainLayout
from megarl.plan import candidates
from megarl.plan.batch import step_samples
from megarl.plan.candidates import (
    FP8_CACHE,
    Overlay,
    engine_overlays,
    in_fp8,
    train_overlays,
    train_variants,
    with_exchange,
    with_fraction,
)
from megarl.plan.estimate import SPARE, Estimator, needs_of
from megarl.plan.layer_sizes import composed, layer_sizes
from megarl.plan.layout_search import _MOST_SAVED, SearchResult, Side, search
from megarl.plan.model_size import sizes_of
from megarl.plan.report import amount
from megarl.plan.run_plan import RunPlan, make_plan
from megarl.plan.search_report import search_json
from megarl.preflight.layout_checks import reshard_errors
from megarl.preflight.model_checks import stand_ins
from megarl.preflight.number_checks import number_errors
from megarl.types import UserError
from tests.plan import plans
from tests.plan import recipes as planning

CARD = load_hardware(planning.H800)
SMALL_CARD = Hardware.model_validate({**CARD.model_dump(), "memory_bytes": 8_000_000_000})
KEYS = (
    "train.tp=2", "train.ep=4", "rollout.engine.ep=2", "rollout.engine.sglang={mem_fraction_static: 0.6}",
    "rollout.prompts_per_step=64", "rollout.samples_per_prompt=4", "data.max_prompt_tokens=2048",
    "rollout.max_response_tokens=16384", "train.tokens_per_micro_batch=24576", "train.updates_per_step=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("searched")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Recipe:
    return stand_ins(planning.small(folder, *KEYS))[0]


@pytest.fixture(scope="module")
def result(recipe: Recipe) -> SearchResult:
    return search(recipe, SMALL_CARD, "both")


@pytest.fixture(scope="module")
def estimator(recipe: Recipe, result: SearchResult) -> Estimator:
    models = resolve(recipe).models
    return Estimator(
        recipe, SMALL_CARD, step_samples(recipe), result.own.sizes, layer_sizes(models, [1, 2, 4])
    )


def fits(plan: RunPlan) -> bool:
    """With the memory that a search leaves free."""
    most = (1 - SPARE) * plan.memory.capacity_bytes
    return plan.fits and all(parts.total_bytes <= most for parts in plan.memory.device.values())


def planned(estimator: Estimator, overlay: Overlay) -> RunPlan:
    changed = overlaid(estimator.recipe, overlay)
    sizes = estimator.sizes_of(resolve(changed))
    return make_plan(changed, SMALL_CARD, sizes=sizes, in_full=False)


def every_engine(recipe: Recipe) -> Iterator[Overlay]:
    for layout in engine_overlays(recipe, SMALL_CARD):
        yield from with_fraction(recipe, layout)


def every_train(recipe: Recipe) -> Iterator[Overlay]:
    """Every variant of every layout, with each overlap that is not refused there."""
    for layout in train_overlays(recipe):
        for variant in train_variants(recipe, layout):
            for options in (PLAIN_EXCHANGE, *OTHER_EXCHANGES):
                overlay = with_exchange(variant, options)
                if not resolve(overlaid(recipe, overlay)).overlap_errors():
                    yield overlay


@pytest.mark.slow
def test_what_is_found_fits_and_is_faster(result: SearchResult) -> None:
    assert result.own.fits
    assert all(fits(row.plan) for row in result.found)
    seconds = [row.plan.step.total_s for row in result.found]
    assert seconds == sorted(seconds)
    assert seconds[0] < result.own.step.total_s
    same_needs = [row for row in result.found if row.needs <= needs_of(result.own.recipe)]
    assert min(row.plan.step.total_s for row in same_needs) <= 1.001 * result.own.step.total_s
    assert all(
        row.plan.recipe.algorithm.rollout_correction == "tis"
        for row in result.found
        if "fp8" in row.needs
    )


@pytest.mark.slow
def test_layouts_are_tried_without_an_overlap_that_is_refused_there(
    recipe: Recipe, estimator: Estimator
) -> None:
    """Also where the recipe has one: it is laid over again where it is allowed."""
    paired = overlaid(recipe, {"train": {"megatron": {PAIRED_PASSES: True}}})
    layouts = list(train_overlays(paired))
    assert layouts == list(train_overlays(recipe))
    assert {layout["train"]["ep"] for layout in layouts} > {1}
    of_pairs, *_ = OTHER_EXCHANGES
    variants = [
        with_exchange(variant, of_pairs)
        for layout in layouts
        for variant in train_variants(recipe, layout)
    ]
    allowed = [variant for variant in variants if estimator.rough_train_s(variant) is not None]
    assert allowed
    for variant in allowed:
        assert variant["train"]["ep"] > 1
        assert not {"layer", "moe"} & overlaid(recipe, variant).train.recompute.keys()
        plain_s = estimator.rough_train_s(with_exchange(variant, PLAIN_EXCHANGE))
        paired_s = estimator.rough_train_s(variant)
        assert plain_s and paired_s and (1 - _MOST_SAVED) * plain_s <= paired_s <= plain_s


@pytest.mark.slow
def test_no_row_beats_another_in_everything(result: SearchResult) -> None:
    def peak(plan: RunPlan) -> int:
        return plan.memory.device[plan.memory.peak_phase].total_bytes

    for place, row in enumerate(result.found):
        needing_no_more = [faster for faster in result.found[:place] if faster.needs <= row.needs]
        assert all(peak(row.plan) < peak(faster.plan) for faster in needing_no_more)


@pytest.mark.slow
def test_an_overlay_that_is_pasted_has_the_figures_of_its_row(
    result: SearchResult, folder: Path, tmp_path: Path
) -> None:
    row = result.found[0]
    file = tmp_path / "overlay.yaml"
    file.write_text(overlay_yaml(row.overlay), encoding="utf-8")
    pasted = make_plan(planning.small(folder, *KEYS, str(file)), SMALL_CARD)
    assert pasted.step == row.plan.step
    assert pasted.memory == row.plan.memory


@pytest.mark.slow
def test_an_estimate_is_the_plan_without_its_reshard(recipe: Recipe, estimator: Estimator) -> None:
    overlays = [*list(every_engine(recipe))[::17], *list(every_train(recipe))[::43]]
    overlays = [
        overlay for overlay in overlays if not reshard_errors(resolve(overlaid(recipe, overlay)))
    ]
    assert len(overlays) > 6
    for overlay in overlays:
        estimate, plan = estimator.estimate(overlay), planned(estimator, overlay)
        assert estimate.step_s == pytest.approx(plan.step.total_s - plan.step.reshard_s)
        assert estimate.memory == plan.memory.__class__(**{**vars(plan.memory), "errors": []})
        assert estimate.fits() == fits(plan)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["engine", "train"])
def test_nothing_better_is_left_out(side: Side, recipe: Recipe, estimator: Estimator) -> None:
    """Against every candidate of one side, each kind's best; the reshard's seconds are not part of the choice."""
    searched = search(recipe, SMALL_CARD, side)
    best: dict[Any, float] = {}
    for overlay in every_engine(recipe) if side == "engine" else every_train(recipe):
        estimate = estimator.estimate(overlay)
        # training ranks may cut the tiles of fp8 engines
        if estimate.fits() and not reshard_errors(estimate.roles):
            needs = needs_of(estimate.recipe)
            best[needs] = min(best.get(needs, estimate.step_s), estimate.step_s)
    for needs, row in searched.best.items():
        step = row.plan.step
        assert step.total_s - step.reshard_s == pytest.approx(best[needs], rel=1e-3)
    for needs, seconds in best.items():  # what is not shown is beaten by what needs less
        assert any(
            row.needs <= needs
            and row.plan.step.total_s - row.plan.step.reshard_s <= 1.001 * seconds
            for row in searched.found
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param(
            "tiny",
            [{"tp": 2, "pp": 2, "ep": 4}, {"pp": 2, "vpp": 2, "ep": 2}, {"tp": 2, "ep": 1}, {"ep": 8}],
            marks=pytest.mark.nightly,
        ),
        ("qwen3-next", [{"ep": 8}, {"tp": 2, "pp": 2, "ep": 4}]),
        (
            "tiny",
            [{"ep": 2, "mtp_loss": 0.1}, {"tp": 2, "pp": 2, "layers_per_stage": [3, 1], "ep": 2}],
        ),
        pytest.param(
            "tiny-tied",
            [{"tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "vpp": 2}],
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_sizes_added_up_are_megatrons(
    model: str, layouts: list[dict[str, Any]], tmp_path: Path
) -> None:
    models = [resolve(plans.recipe(tmp_path, model, 8, **sizes)).models for sizes in layouts]
    for changed, exact in zip(models, sizes_of(models, whole=False), strict=True):
        parts = layer_sizes(changed, [changed["policy"].layout.tp])
        assert composed(exact, changed, parts) == exact


@given(
    layers=st.integers(1, 100),
    pp=st.sampled_from([1, 2, 4, 8, 16]),
    vpp=st.integers(1, 4),
    extra=st.floats(0, 5),
)
def test_stages_hold_all_layers_and_differ_little(
    layers: int, pp: int, vpp: int, extra: float
) -> None:
    shape = ModelShape(layers, 64, 4, 4, 16, 300)
    stage_layers = candidates._stage_layers(
        TrainLayout(16, 1, 1, 1), shape, pp, vpp if pp > 1 else 1, extra
    )
    if stage_layers is None:
        return
    layout = TrainLayout(16, 1, pp, 1, vpp=vpp if pp > 1 else 1, stage_layers=stage_layers)
    assert not layout._stage_errors(shape)
    held = [
        sum(len(layout.layers(rank, layers, chunk)) for chunk in range(layout.vpp))
        for rank in range(pp)
    ]
    assert sum(held) == layers
    work = [*held[:-1], held[-1] + extra]
    most = candidates.MOST_UNEVEN / pp
    assert max(held) <= most * layers or max(work) <= most * (layers + extra)
    if pp > 1:
        assert held[-1] <= min(held[:-1])


def test_the_recipes_own_stages_stay() -> None:
    shape, stages = ModelShape(61, 64, 4, 4, 16, 300), (4,) * 13 + (3,) * 3
    layout = TrainLayout(16, 1, 16, 1, stage_layers=stages)
    assert candidates._stage_layers(layout, shape, 16, 1, 0.0) == stages
    assert candidates._stage_layers(layout, shape, 8, 1, 0.0) == (8,) * 5 + (7,) * 3
    assert candidates._stage_layers(layout, shape, 32, 2, 0.0) is None  # 64 stages


def test_the_last_stage_has_fewer_layers_beside_output_and_prediction_layers() -> None:
    shape, layout = ModelShape(61, 64, 4, 4, 16, 300), TrainLayout(16, 1, 1, 1)
    assert candidates._stage_layers(layout, shape, 8, 1, 1.5) == (8,) * 6 + (7, 6)
    assert candidates._stage_layers(layout, shape, 8, 1, 4.0) == (8,) * 7 + (5,)
    assert candidates._stage_layers(layout, shape, 16, 2, 1.5) == (2,) * 30 + (1, 0)
    divided = ModelShape(48, 64, 4, 4, 16, 300)
    assert candidates._stage_layers(layout, divided, 8, 1, 0.0) == ()
    assert candidates._stage_layers(layout, divided, 8, 1, 4.9) == (7, 7, 7, 7, 6, 6, 6, 2)
    assert candidates._stage_layers(layout, shape, 16, 2, 4.0) == (*[2] * 15, 1, *[2] * 15, 0)


def test_virtual_stages_are_tried_as_far_as_the_layers_reach() -> None:
    shape = ModelShape(61, 64, 4, 4, 16, 300)
    counts = {pp: candidates._chunk_counts(shape, pp) for pp in (1, 4, 8, 16, 64)}
    assert counts == {1: [1], 4: [1, 2, 3, 4], 8: [1, 2, 3, 4], 16: [1, 2, 3], 64: []}


def test_candidates_are_valid_and_keep_their_gpus(tmp_path: Path) -> None:
    small_recipe = stand_ins(planning.small(tmp_path, *KEYS))[0]
    engines, trains = list(engine_overlays(small_recipe, CARD)), list(train_overlays(small_recipe))
    # 8 would need a network
    assert {overlay["rollout"]["engine"]["tp"] for overlay in engines} == {1, 2, 4}
    assert {overlay["rollout"]["engine"]["experts"] for overlay in engines} == {"gather", "deepep"}
    for overlay in engines:
        roles = resolve(overlaid(small_recipe, overlay))
        assert roles.engines.count * roles.engines.tp == 8
        assert roles.engines.ep == roles.engines.tp or not roles.engines.deepep
    cached = [overlay["rollout"] for overlay in engines if "sglang" in overlay["rollout"]["engine"]]
    assert cached and all(rollout["engine"]["weights"] == "fp8" for rollout in cached)
    fractions = with_fraction(small_recipe, {"rollout": cached[0]})
    assert all(
        FP8_CACHE.items() <= over["rollout"]["engine"]["sglang"].items() for over in fractions
    )
    assert {overlay["train"]["pp"] for overlay in trains} == {1, 2, 4}
    assert {overlay["train"]["tp"] for overlay in trains} == {1, 2, 4}  # 8 would leave a node
    assert {overlay["train"]["ep"] for overlay in trains} == {1, 2, 4, 8}
    without = Hardware.model_validate({**CARD.model_dump(), "fp8_flops": None})
    assert not [
        overlay
        for overlay in engine_overlays(small_recipe, without)
        if overlay["rollout"]["engine"]["weights"] == "fp8"
    ]


def test_variants_recompute_or_keep_and_move_the_optimizer(tmp_path: Path) -> None:
    small_recipe = stand_ins(planning.small(tmp_path, *KEYS))[0]
    layout = next(iter(train_overlays(small_recipe)))
    variants = [overlay["train"] for overlay in train_variants(small_recipe, layout)]
    assert {variant["optimizer_offload"] for variant in variants} == {False, True}
    states = {
        (variant["optimizer_offload"], len(variant.get("optimizer", {}))) for variant in variants
    }
    # masters as remainders; moments in bfloat16 and the beta2 that they need besides
    assert states == {(True, 0), (False, 1), (False, 4)}
    rows = {(variant["cp"], variant["tokens_per_micro_batch"]) for variant in variants}
    assert {tokens for cp, tokens in rows if cp == 1} == {18432, 24576, 49152}
    assert {tokens for cp, tokens in rows if cp == "auto"} == {9216, 4608}
    steps = set(ladder(resolve(small_recipe).policy.shape))
    assert len(steps) > 2
    full = overlaid(small_recipe, {"train": {"megatron": {"recompute_granularity": "full"}}})
    for recipe in (small_recipe, full):
        overlays = train_variants(recipe, layout)
        tried = [overlaid(recipe, overlay).train for overlay in overlays]
        assert {recomputed_parts(train, 0) for train in tried} == steps


def test_variants_split_the_longest_sequence_where_ranks_divide(tmp_path: Path) -> None:
    """18,432 tokens over two and four data-parallel ranks; a row of a fixed cp has whole sequences."""
    recipe = stand_ins(planning.small(tmp_path, *KEYS))[0]
    parts: dict[int, set[int]] = {1: set(), 2: {9216}, 4: {9216, 4608}, 8: {9216, 4608}}
    seen: set[int] = set()
    for layout in train_overlays(recipe):
        sizes = layout["train"]
        dp = recipe.placement.gpus // (sizes["tp"] * sizes["pp"] * sizes["cp"])
        rows = {
            (variant["train"]["cp"], variant["train"]["tokens_per_micro_batch"])
            for variant in train_variants(recipe, layout)
        }
        by_length = {budget for cp, budget in rows if cp == "auto"}
        assert by_length == (parts[dp] if sizes["cp"] == 1 else set())
        assert all(budget >= 18432 for cp, budget in rows if cp != "auto")
        seen.add(dp)
    assert seen == {1, 2, 4, 8}


def test_an_overlay_has_only_what_it_changes() -> None:
    tree = {"train": {"tp": 4, "ep": 8, "layers_per_stage": [], "megatron": {"a": 1}}}
    overlay = {
        "train": {"tp": 4, "ep": 2, "layers_per_stage": [2, 1], "megatron": {"a": 1, "b": None}}
    }
    assert candidates.changes(overlay, tree) == {"train": {"ep": 2, "layers_per_stage": [2, 1]}}
    assert candidates.changes({"train": {"tp": 4}}, tree) == {}


@pytest.mark.slow
def test_the_command_prints_a_table_and_overlays(folder: Path, tmp_path: Path) -> None:
    card, file, pasted = tmp_path / "card.yaml", tmp_path / "recipe.yaml", tmp_path / "pasted.yaml"
    card.write_text(json.dumps(SMALL_CARD.model_dump(exclude={"deepep_token_s"})), encoding="utf-8")
    file.write_text(planning.small(folder, *KEYS).dump_yaml(), encoding="utf-8")
    options = [str(file), "--hardware", str(card), "--search", "engine"]
    done = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "plan", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in ("the recipe", "rollout:", "engine layouts"))
    _, first, overlay, *_ = re.split(r"^(# .* s a step).*\n", done.stdout, flags=re.MULTILINE)
    pasted.write_text(overlay.split("\n\n")[0], encoding="utf-8")
    again = make_plan(load_recipe(file, [str(pasted)]), SMALL_CARD, in_full=False)
    assert first == f"# {amount(again.step.total_s)} s a step"


@pytest.mark.slow
def test_json_is_what_was_found(result: SearchResult) -> None:
    content = json.loads(json.dumps(search_json(result)))
    assert content["own"]["step_s"] == result.own.step.total_s
    assert [row["step_s"] for row in content["found"]] == [
        row.plan.step.total_s for row in result.found
    ]
    assert content["found"][0]["overlay"] == json.loads(json.dumps(result.found[0].overlay))
    assert (content["engines_tried"], content["trains_tried"]) == result.tried


def test_a_side_that_is_none_and_engines_of_sft_are_refused(folder: Path) -> None:
    shown = CliRunner().invoke(cli.app, ["plan", "recipes/quickstart.yaml", "--search", "sideways"])
    assert shown.exit_code == 2
    assert all(side in shown.output for side in get_args(Side))
    supervised = planning.small(folder, *KEYS, "algorithm.name=sft")
    with pytest.raises(UserError, match="samples nothing"):
        search(supervised, CARD, "engine")


@pytest.mark.slow
def test_where_nothing_fits_one_line_says_so(recipe: Recipe) -> None:
    tiny = Hardware.model_validate({**CARD.model_dump(), "memory_bytes": 1_000_000_000})
    with pytest.raises(UserError, match="no layout was found that fits"):
        search(recipe, tiny, "engine")


def test_rows_of_linear_attention_divide_its_heads(tmp_path: Path) -> None:
    """Four key heads: TP2 leaves two to CP ranks, TP4 one, and no engine is in fp8."""
    small_recipe = stand_ins(planning.small(tmp_path, *KEYS, config=planning.SMALL_LINEAR))[0]
    seen: dict[int, set[int]] = {}
    for layout in train_overlays(small_recipe):
        if layout["train"]["pp"] > 1:
            continue
        rows = seen.setdefault(layout["train"]["tp"], set())
        for overlay in train_variants(small_recipe, layout):
            role = resolve(overlaid(small_recipe, overlay)).policy
            assert not role.layout_errors()
            rows.add(role.layout.max_cp)
    assert seen == {1: {1, 2, 4}, 2: {1, 2}, 4: {1}}
    engines = [over["rollout"]["engine"] for over in engine_overlays(small_recipe, SMALL_CARD)]
    assert engines and not any(engine["weights"] == "fp8" for engine in engines)


@pytest.mark.slow
def test_what_is_found_with_linear_attention_is_the_plan_of_the_same_layout(tmp_path: Path) -> None:
    """By models that are built in the found layouts, of which the search added up the parts."""
    recipe = stand_ins(planning.small(tmp_path, *KEYS, config=planning.SMALL_LINEAR))[0]
    result = search(recipe, SMALL_CARD, "both")
    assert result.found[0].plan.step.total_s < result.own.step.total_s
    models = resolve(recipe).models
    parts = layer_sizes(models, [1, 2, 4])
    estimator = Estimator(recipe, SMALL_CARD, step_samples(recipe), result.own.sizes, parts)
    for row in result.found:
        plan = make_plan(row.plan.recipe, SMALL_CARD, in_full=False)
        estimate = estimator.estimate(row.overlay)
        assert fits(plan) and estimate.fits()
        assert plan.step == row.plan.step
        assert estimate.step_s == pytest.approx(plan.step.total_s - plan.step.reshard_s)
        assert estimate.memory == plan.memory
    states = [row.plan.memory.kv.most_states for row in result.found]
    assert all(states)


def test_training_in_fp8_is_searched_as_runs_may_have_it(tmp_path: Path) -> None:
    """With latent attention kv_b_proj stays plain, as engines need it."""
    stages = {"pp": 4, "ep": 8, "layers_per_stage": (16, 15, 15, 15)}
    recipe = plans.recipe(tmp_path, "deepseek-v3", 32, **stages)
    overlay = in_fp8(recipe, {"train": {}, "rollout": {"engine": {"weights": "fp8"}}})
    searched = overlaid(recipe, overlay)
    assert searched.train.numbers == "engine"
    assert searched.precision.plain == ("kv_b_proj",)
    assert number_errors(resolve(searched)) == []
