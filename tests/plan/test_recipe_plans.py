"""The shipped recipes by plan: each fits, with its overlays too; made too large, it is told what helps, and that does.

All models are built in one start of the program that builds them; what several recipes have in common is planned once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.hardware import load_hardware
from megarl.model.hf_config import HfModel
from megarl.placement.roles import Role, Roles, resolve, train_layout
from megarl.plan import model_size, run_plan
from megarl.plan.batch import MEAN_RESPONSE_SHARE
from megarl.plan.estimate import needs_of
from megarl.plan.layout_search import SearchResult, Side, search
from megarl.plan.phase_memory import MemoryPlan
from megarl.preflight.model_checks import stand_ins
from tests.config.test_recipes import CLUSTER, DEBUG, OVERLAYS, RECIPES, ROOT, kept, load, model_of
from tests.plan import plans

pytestmark = pytest.mark.slow

CASES = [
    (name, over)
    for name in CLUSTER
    for over in OVERLAYS[model_of(RECIPES / f"{name}.yaml")]
    if not set(over) & set(DEBUG)
]
IDS = [(name, *over) for name, over in CASES]
# whole plans, of each algorithm and each number of roles; tests/config/test_recipes.py counts every recipe's exchange
PLANNED_BY_DAY = [
    ("dapo_deepseek671b", ()),
    ("vapo_qwen3_30b", ()),
    ("grpo_lora_kimi_k2_64gpus", ()),
]
SMALLEST = "dapo_qwen2_5_32b"  # whose engines are searched by day
# Engines of too few GPUs, in place of the recipe's; the phase that they fill; what helps. By model or recipe.
_TOO_FEW_30B = (
    {"tp": 1, "ep": 1, "dp": 1, "sglang.mem_fraction_static": 0.8},
    ["rollout"],
    "rollout.engine.weights",
)
TOO_FEW: dict[str, tuple[dict[str, float], list[str], str]] = {
    "retool_qwen3_30b": _TOO_FEW_30B,
    "search_r1_qwen3_30b": _TOO_FEW_30B,
    "qwen3_30b": _TOO_FEW_30B,
    "qwen3_235b": ({"tp": 4, "ep": 4, "dp": 1}, ["rollout", "reshard"], "rollout.engine.tp"),
    "vapo_qwen3_235b": (
        {"tp": 4, "ep": 4, "dp": 1},
        ["rollout", "reshard"],
        "rollout.engine.weights",
    ),
    **dict.fromkeys(
        ("vapo_deepseek671b", "deepseek671b"),
        ({"tp": 16, "ep": 16, "dp": 8}, ["rollout", "reshard"], "rollout.engine.weights"),
    ),
    "qwen3_30b_128k": _TOO_FEW_30B,
    "glm4_6": ({"tp": 8, "ep": 8, "dp": 1}, ["rollout", "reshard"], "rollout.engine.tp"),
    "glm4_5_air": ({"tp": 2, "ep": 2, "dp": 1}, ["rollout", "reshard"], "rollout.engine.tp"),
    "qwen3_next": ({"tp": 2, "ep": 2, "dp": 1}, ["rollout", "reshard"], "rollout.engine.tp"),
    "qwen3_5_35b": ({"tp": 1, "ep": 1, "dp": 1}, ["rollout"], "rollout.engine.tp"),
    "qwen3_5_397b": ({"tp": 8, "ep": 8, "dp": 1}, ["rollout", "reshard"], "rollout.engine.tp"),
    "minimax_m2": ({"tp": 4, "ep": 4, "dp": 1}, ["rollout", "reshard"], "rollout.engine.tp"),
    "hy_v3": ({"tp": 4, "ep": 4}, ["rollout", "reshard"], "rollout.engine.tp"),
    "qwen2_5_32b": ({"tp": 1}, ["rollout"], "rollout.engine.weights"),
    "kimi_k2_64gpus": ({"tp": 32, "ep": 32, "dp": 4}, ["rollout", "reshard"], "rollout.engine.tp"),
}


def kind_of(request: dict[str, Any]) -> Any:
    recipe = Recipe.model_validate_json(request["recipe"])
    model = HfModel(recipe.model.path)
    return model_size._kind(
        Role("policy", recipe, train_layout(recipe), 0, request["scores"], model)
    )


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """Sizes by what they depend on, without the totals that memory has no part of, and exchanges by their layouts."""
    built: dict[Any, dict[str, Any]] = {}
    build = model_size._built

    def remembered(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        new = {
            kind_of(request): request | {"whole": False}
            for request in requests
            if kind_of(request) not in built
        }
        built.update(zip(new, build(list(new.values())) if new else [], strict=True))
        return [built[kind_of(request)] for request in requests]

    def places(roles: Roles, *_: Any) -> Any:
        recipe = roles.recipe
        exchange = (
            recipe.reshard.round_bytes,
            recipe.placement.gpus_per_node,
            recipe.model.path,
            recipe.model.dtype,
        )
        return exchange, roles.policy.layout, roles.policy.lora, roles.engines

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the recipes' own paths are relative to it
        patch.setattr(model_size, "_built", remembered)
        patch.setattr(run_plan, "plan_reshard", kept(run_plan.plan_reshard, places))
        model_size.sizes_of(
            [resolve(stand_ins(load(*case))[0]).models for case in CASES], whole=False
        )
        yield


@cache
def planned(name: str, over: tuple[str, ...] = (), *, in_full: bool = False) -> run_plan.RunPlan:
    """Without advice and the rounds of a reshard, which take most of the time, where nobody asks for them."""
    recipe = load(name, over)
    return run_plan.make_plan(recipe, load_hardware(recipe.placement.hardware), in_full=in_full)


@pytest.mark.parametrize(("name", "over"), CASES, ids=map("+".join, IDS))
def test_it_fits(name: str, over: tuple[str, ...]) -> None:
    recipe = load(name, over)
    memory = held(recipe)
    assert memory.errors == []
    assert memory.kv.concurrency_mean > 2 * recipe.rollout.samples_per_prompt


@pytest.mark.parametrize(
    ("name", "over"),
    [
        pytest.param(*case, marks=() if case in PLANNED_BY_DAY else pytest.mark.nightly)
        for case in CASES
    ],
    ids=map("+".join, IDS),
)
def test_a_whole_plan_fits_too(name: str, over: tuple[str, ...]) -> None:
    """With the step's own micro-batches, fewer of which may be in flight than `held` takes; by night with advice."""
    assert planned(name, over, in_full=(name, over) not in PLANNED_BY_DAY).fits


@pytest.mark.parametrize(("over", "cores"), [((), 56), (("retool_qwen3_235b.yaml",), 101)])
def test_the_cores_that_programs_need_are_those_that_the_page_says(
    over: tuple[str, ...], cores: int
) -> None:
    """If each used the whole 5 s that the recipe gives it, which call_timeout_s would not end."""
    plan = planned("retool_qwen3_30b", over)
    assert plan.tool_load and (plan.tool_load.call_s, plan.tool_load.limit) == (
        5.0,
        "episode.arguments.timeout_s",
    )
    assert round(plan.tool_load.cores(plan.rollout.total_s)) == cores
    (section,) = re.findall(
        r"\*\*Programs\.\*\*.*?\n\n", (ROOT / "docs/environments.md").read_text(), re.DOTALL
    )
    assert re.search(rf"\b{cores}\b", section)


@pytest.mark.parametrize(
    ("over", "limit_s"), [((), 2100), (("fp8_rollout_deepseek671b.yaml",), 1300)]
)
def test_deepseek_takes_less_than_it_did(over: tuple[str, ...], limit_s: int) -> None:
    """With engines of 32 GPUs and groups of four it was 3,180 s, five sixths of it to sample."""
    plan = planned("dapo_deepseek671b", over)
    assert plan.step.total_s < limit_s
    assert plan.rollout.total_s / plan.step.total_s < 0.75


@pytest.mark.parametrize("name", CLUSTER)
def test_the_recipe_says_how_much_memory_a_host_needs(name: str) -> None:
    match = re.search(r"a node's host needs ([0-9.]+) TB", (RECIPES / f"{name}.yaml").read_text())
    assert match
    recipe = load(name)
    # with rows over several ranks each of them has a copy of its samples, which only a whole plan counts
    memory = planned(name).memory if recipe.train.cp == "auto" else held(recipe)
    needed = memory.host_bytes / 1e12
    assert needed <= float(match[1]) < needed + 0.1


ON_128 = ("placement.gpus=128", "rollout.engine.count=2")
KIMI_ON_128 = (
    *("lora=null", "algorithm.rollout_correction=null", *ON_128),
    *("train.tp=2", "train.pp=16", "train.optimizer_offload=true"),
    "train.layers_per_stage=[4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3]",
)


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("grpo_deepseek671b", (*ON_128, "train.ep=8")),
        ("grpo_lora_kimi_k2_64gpus", KIMI_ON_128),
    ],
    ids=["deepseek-v3", "kimi-k2"],
)
def test_a_checkpoint_leaves_room_on_hosts_of_128_gpus(name: str, over: tuple[str, ...]) -> None:
    """All weights are trained, with the optimizer on the host. Gathering its state took 1.3 and 2.2 TB."""
    plan = planned(name, over)
    assert plan.fits, [str(error) for error in plan.errors]
    assert plan.memory.host["checkpoint"] < plan.memory.host_bytes / 11


def test_all_weights_of_a_trillion_are_not_trained_on_64_gpus() -> None:
    """The phases that are too full are named; a host would have room on 256, a GPU whatever key is set."""
    errors = by_phase(planned("grpo_lora_kimi_k2_64gpus", ("lora=null",)).memory)
    assert {*errors} == {"train", "host"}
    assert "nothing alone is enough" in errors["train"].hint
    assert "set placement.gpus to 256" in errors["host"].hint


def test_adapters_alone_are_gigabytes_not_terabytes() -> None:
    """What comes from other GPUs in a step of Kimi-K2: into the one with the most of it, and into all 64."""

    def wire(*over: str) -> tuple[float, float]:
        reshard = planned("grpo_lora_kimi_k2_64gpus", over).reshard
        links = reshard.nvlink_bytes, reshard.fabric_in_bytes
        return sum(link.max for link in links), 64 * sum(link.mean for link in links)

    alone, merged = wire("adapters_kimi_k2.yaml"), wire()
    assert alone[0] < 1e9 and alone[1] < 10e9
    assert 30e9 < merged[0] < 40e9 and merged[1] > 2e12


def since_november() -> Iterator[Any]:
    """Each row of the table in docs/plan.md: recipe, overlays, (rollout, training, step) in seconds, times as fast.

    A recipe's first row is what it was in November; those of Qwen3-30B are planned by day.
    """
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    number = r"([\d,.]+) "
    rows = re.findall(rf"\| `(\w+)` \| (`.*`) \| {number}\| {number}\| {number}\| {number}\|", page)
    assert len(rows) > 6
    first_step_s: dict[str, float] = {}
    for name, overlays, *texts in rows:
        over = tuple(f"{overlay}.yaml" for overlay in re.findall(r"`(\w+)`", overlays))
        *seconds, gain = [float(text.replace(",", "")) for text in texts]
        assert gain == pytest.approx(
            first_step_s.setdefault(name, seconds[-1]) / seconds[-1], abs=0.01
        )
        marks = [] if name == "dapo_qwen3_30b" else [pytest.mark.nightly]
        yield pytest.param(name, over, tuple(seconds), id="+".join([name, *over]), marks=marks)


@pytest.mark.parametrize(("name", "over", "seconds"), list(since_november()))
def test_overlays_take_by_plan_what_the_page_says(
    name: str, over: tuple[str, ...], seconds: tuple[float, ...]
) -> None:
    step = planned(name, over).step
    assert (step.rollout_s, step.train_s, step.total_s) == pytest.approx(seconds, rel=0.02)


def held(recipe: Recipe) -> MemoryPlan:
    there = stand_ins(recipe)[0]
    hardware = load_hardware(recipe.placement.hardware)
    return plans.memory(there, hardware, model_size.model_sizes(there), MEAN_RESPONSE_SHARE)


def by_phase(memory: MemoryPlan) -> dict[str, Any]:
    """The faults, by the phase that their words name."""
    names = [re.search(r"the (\w+) phase|node's (host)", error.problem) for error in memory.errors]
    return {
        name[1] or name[2]: error for name, error in zip(names, memory.errors, strict=True) if name
    }


def hints(hint: str) -> list[str]:
    """The overrides that a mend tells: `set a.b to 1, c to 2 and d.e to 3: ...`, where c is beside b."""
    changes, branch = (
        re.findall(r"([\w.]+) to (\{[^}]*\}|\[\]|[\w.]+)", hint.partition(": then")[0]),
        "",
    )
    overrides = []
    for key, value in changes:
        branch = key.rpartition(".")[0] or branch
        overrides.append(f"{key if '.' in key else f'{branch}.{key}'}={value}")
    return overrides


# adapters leave too much room
@pytest.mark.parametrize("name", [name for name in CLUSTER if "lora" not in name])
def test_micro_batches_that_are_too_long_fill_training(name: str) -> None:
    tokens = f"train.tokens_per_micro_batch={16 * load(name).train.tokens_per_micro_batch}"
    errors = by_phase(held(load(name, (), tokens)))
    expected = {"train": "train.tokens_per_micro_batch"}
    if name.startswith("vapo"):
        expected["critic"] = "critic.ranks.tokens_per_micro_batch"
    assert {phase: error.where for phase, error in errors.items()} == expected
    for phase, error in errors.items():
        assert phase not in by_phase(held(load(name, (), tokens, *hints(error.hint))))
    together = [override for error in errors.values() for override in hints(error.hint)]
    assert held(load(name, (), tokens, *together)).errors == []


@pytest.mark.parametrize("name", CLUSTER)
def test_engines_that_are_too_small_fill_the_rollout(name: str) -> None:
    sizes, phases, knob = TOO_FEW[model_of(RECIPES / f"{name}.yaml")]
    count = load(name).placement.gpus // sizes["tp"]
    overrides = [
        f"rollout.engine.{key}={value}" for key, value in (sizes | {"count": count}).items()
    ]
    errors = by_phase(held(load(name, (), *overrides)))
    assert {phase: error.where for phase, error in errors.items()} == dict.fromkeys(phases, knob)
    assert held(load(name, (), *overrides, *hints(errors["rollout"].hint))).errors == []


def test_without_attention_groups_the_best_number_of_them_is_advised() -> None:
    """And what a step then takes, as a plan of such engines says itself."""
    alone = planned("dapo_deepseek671b", ("rollout.engine.dp=1",), in_full=True)
    (advised,) = [
        re.search(r"rollout.engine.dp (\d+) would make it ([\d,]+) s a step", line)
        for line in alone.advice
    ]
    assert advised and float(advised[2].replace(",", "")) < alone.step.total_s / 2
    groups = planned("dapo_deepseek671b", (f"rollout.engine.dp={advised[1]}",))
    assert groups.step.total_s == pytest.approx(float(advised[2].replace(",", "")), rel=0.02)


def seconds_over_the_best(result: SearchResult, plan: run_plan.RunPlan) -> float:
    """A step of a plan over one of the fastest layout that needs no more."""
    return plan.step.total_s / min(
        row.plan.step.total_s for row in result.found if row.needs <= needs_of(plan.recipe)
    )


def searched(name: str, side: Side) -> SearchResult:
    recipe = load(name)
    return search(recipe, load_hardware(recipe.placement.hardware), side)


@pytest.mark.parametrize(
    "name",
    [
        name if name == SMALLEST else pytest.param(name, marks=pytest.mark.nightly)
        for name in CLUSTER
    ],
)
def test_no_engines_are_more_than_a_twentieth_behind_the_best_of_their_kind(name: str) -> None:
    """A minute of one core for a large model. Overlays for other engines on as many GPUs are of other kinds."""
    result = searched(name, "engine")
    assert seconds_over_the_best(result, result.own) <= 1.05
    for over in OVERLAYS[model_of(RECIPES / f"{name}.yaml")]:
        if len(over) == 1 and over[0].startswith("fp8"):
            assert (
                seconds_over_the_best(result, planned(name, (*over, "train.mtp_loss=0"))) <= 1.05
            ), over


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLUSTER)
def test_no_training_layout_is_more_than_a_twentieth_behind_the_best_of_its_kind(name: str) -> None:
    """A minute of one core for a large model."""
    result = searched(name, "train")
    assert seconds_over_the_best(result, result.own) <= 1.05
