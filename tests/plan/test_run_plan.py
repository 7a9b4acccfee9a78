"""The whole plan: of a small recipe by hand, of DeepSeek-V3 on 512 GPUs against what is published; and its faces."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl import cli
from megarl.config import Recipe
from megarl.config.hardware import load_hardware
from megarl.config.loading import overlaid
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import RoleName, resolve
from megarl.placement.train_layout import TrainLayout
from megarl.plan import run_plan
from megarl.plan.model_size import ModelSize
from megarl.plan.picture import draw
from megarl.plan.report import amount, plan_json, show, spans
from megarl.plan.run_plan import RunPlan, make_plan, slot_map
from megarl.preflight.checks_by_command import plan_errors as plan_errors_of
from megarl.preflight.model_checks import stand_ins
from megarl.types import UserError, UserErrors
from tests.plan import plans
from tests.plan import recipes as planning

pytestmark = pytest.mark.slow

CARD = load_hardware(planning.H800)
SHAPE = ModelShape(8, 64, 4, 4, 16, 300)
PARTS = [
    "weights", "grads", "optimizer", "activations", "logits", "engine_weights", "kv_cache", "reshard", "other", "total",
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    return make_plan(planning.small(tmp_path_factory.mktemp("small")), CARD)


@pytest.fixture(scope="module")
def phased(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """On the second node's GPUs engines alone, and on the first's ranks alone."""
    keys = [
        "rollout.max_response_tokens=400",
        "rollout.phase_tokens=100",
        "rollout.prompts_in_flight=256",
    ]
    split = [
        "placement.gpus=8",
        "placement.train_gpus=4",
        "rollout.engine.count=1",
        "placement.first_engine_gpu=4",
    ]
    folder = tmp_path_factory.mktemp("phased")
    return make_plan(
        planning.small(folder, *keys, *split, "algorithm.rollout_correction=tis"), CARD
    )


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    recipe = planning.deepseek(tmp_path_factory.mktemp("deepseek"))
    return make_plan(recipe, CARD, in_full=False)  # test_recipe_plans.py has a whole one of it


def plan_errors(recipe: Recipe) -> list[UserError]:
    return plan_errors_of(resolve(stand_ins(recipe)[0]))


def report_of(plan: RunPlan, width: int = 140) -> str:
    page = io.StringIO()
    show(plan, Console(file=page, width=width))
    return page.getvalue()


def test_a_small_plan_says_who_sits_where(small: RunPlan) -> None:
    policy = small.sizes["policy"]
    assert (list(small.sizes), policy.first_slot, policy.layout) == (
        ["policy"],
        0,
        TrainLayout(8, 2, 2, 2),
    )
    assert policy.stage_slots() == [range(4), range(4, 8)]
    assert small.num_nodes == 2 and small.fits and small.errors == []
    layer = 256 * (8 + 2 * 4) * 32 + 8 * 32 * 256 + 2 * 32 + 2 * 256 + 8 * 256 + 8 * 3 * 256 * 128
    assert policy.parameters == 4 * layer + 2 * 1024 * 256 + 256


def test_every_slot_says_node_ranks_and_engine(tmp_path: Path) -> None:
    recipe = planning.small(tmp_path, "placement.gpus=10", "placement.gpus_per_node=4")
    policy, critic = TrainLayout(8, 2, 2, 2), TrainLayout(4, 2, 1, 2)
    sizes: dict[RoleName, ModelSize] = {
        "policy": plans.size("policy", SHAPE, recipe, policy, 0, ()),
        "critic": plans.size("critic", SHAPE, recipe, critic, 6, ()),
    }
    slots = slot_map(recipe, sizes, EngineLayout(2, 3, 1, first=4))
    places = [(slot.slot, slot.node, slot.gpu) for slot in slots[3:6]]
    assert places == [(3, 0, 3), (4, 1, 0), (5, 1, 1)]
    models = [",".join(slot.ranks) for slot in slots]
    assert models == ["policy"] * 6 + ["policy,critic"] * 2 + ["critic"] * 2
    assert slots[7].ranks == {"policy": policy.coords(7), "critic": critic.coords(1)}
    engines = [(slot.engine, slot.engine_rank) for slot in slots[3:]]
    assert engines == [(None, None), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_the_json_adds_up(deepseek: RunPlan) -> None:
    content = json.loads(json.dumps(plan_json(deepseek)))
    for parts in content["memory"]["device"].values():
        assert {f"{part}_bytes" for part in PARTS} == set(parts)
        assert sum(parts.values()) == 2 * parts["total_bytes"]
    assert {"rollout", "train", "reshard"} <= set(content["memory"]["device"])
    assert content["memory"]["host_bytes"] > 0
    reshard, step, last = content["reshard"], content["step"], content["ranks"][511]
    for name in ("dest", "local", "nvlink", "fabric_in", "fabric_out", "gather_everything"):
        assert 0 < reshard[f"{name}_bytes"]["mean"] <= reshard[f"{name}_bytes"]["max"]
    assert 0 < reshard["bound_s"] < reshard["expected_s"] < reshard["gather_bound_s"]
    assert min(step[f"{phase}_s"] for phase in ("rollout", "train", "reshard", "save")) > 0
    assert sum(step.values()) == pytest.approx(2 * step["total_s"])
    at = {"node": 63, "gpu": 7, "engine": 15, "engine_rank": 31}
    assert (
        at.items() <= last.items() and last["policy"]["pp"] == 15 and len(content["ranks"]) == 512
    )


def test_the_document_names_every_key_of_the_json(deepseek: RunPlan) -> None:
    text, content = (planning.ROOT / "docs" / "plan.md").read_text(), plan_json(deepseek)
    named = set(re.findall(r"`([a-z_.]+)`", text.partition("## JSON")[2].replace("[phase]", "")))
    keys = {*content["reshard"], *content["step"], *(f"{part}_bytes" for part in PARTS)}
    keys |= {f"memory.{key}" for key in content["memory"]} - {"memory.host_capacity_bytes"}
    assert keys <= named
    assert {key for key in content if not any(name.split(".")[0] == key for name in named)} == {
        "name",
        "hardware",
    }


def test_deepseek_is_as_large_as_published_and_what_arrives_adds_up(deepseek: RunPlan) -> None:
    policy = deepseek.sizes["policy"]
    assert policy.parameters == pytest.approx(671.03e9, rel=1e-3)
    # both vocabulary tables among them
    assert policy.active_parameters == pytest.approx(37.6e9, rel=1e-2)
    moved = deepseek.reshard
    assert moved.dest_bytes.mean == pytest.approx(2 * policy.parameters / 32, rel=0.05)
    parts = moved.local_bytes, moved.nvlink_bytes, moved.fabric_in_bytes
    assert sum(part.mean for part in parts) == pytest.approx(moved.dest_bytes.mean)
    assert 1335e9 < moved.gather_everything_bytes.mean < 2 * policy.parameters
    assert deepseek.rollout.running <= deepseek.memory.kv.wanted


def test_the_report_says_what_peaks_and_why_a_reshard_takes_its_time(deepseek: RunPlan) -> None:
    page = report_of(deepseek)
    assert "671 B parameters (37.6 B active), on 512 H800 in 64 nodes" in page
    assert f"{deepseek.memory.peak_phase} takes most, on slot" in page
    # the last stage: nodes, slots, layers
    assert re.search(r"policy +15 +60-63 +480-511 +58-60", page)
    assert re.search(r"gathering everything would bring +1,339", page)
    assert re.search(r"(?m)^over the fabric +[\d,.]+ +[\d,.]+", page)
    assert "the recipe uses all-to-all" in page
    assert "12,288 prompts" not in page and "768 prompts drawn" in page
    assert "an estimate" in page and "docs/plan.md" in page
    assert len(page.splitlines()) < 90


def test_spare_nodes_are_numbered_behind_those_with_slots(deepseek: RunPlan) -> None:
    assert "spare" not in report_of(deepseek) and plan_json(deepseek)["spare_nodes"] == []
    placement = deepseek.recipe.placement.model_copy(update={"spare_nodes": 2})
    recipe = deepseek.recipe.model_copy(update={"placement": placement})
    plan = replace(deepseek, recipe=recipe)
    page = report_of(plan)
    assert "on 512 H800 in 64 nodes, and 2 spare\n" in page
    assert "spare nodes: 64-65, idle until one replaces a node that died\n" in page
    assert plan_json(plan)["spare_nodes"] == [64, 65]


def test_engines_that_may_be_asked_for_later_have_slots(small: RunPlan) -> None:
    assert "further engines" not in report_of(small)
    rollout = small.recipe.rollout
    engine = rollout.engine.model_copy(update={"max_count": small.engine.count + 2})
    rollout = rollout.model_copy(update={"engine": engine})
    recipe = small.recipe.model_copy(update={"rollout": rollout})
    page = report_of(replace(small, recipe=recipe))
    slots = f"{small.engine.end}-{small.engine.end + 2 * small.engine.tp - 1}"
    later = "idle until megarl engines asks for them"
    assert f"further engines: up to 2 on slots {slots}, {later}\n" in page


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_page_cuts_no_figure(width: int, deepseek: RunPlan) -> None:
    page, wide = report_of(deepseek, width), report_of(deepseek)
    assert max(map(len, page.splitlines())) <= width and "\N{HORIZONTAL ELLIPSIS}" not in page
    assert set(re.findall(r"[\d.,]*\d", wide)) == set(re.findall(r"[\d.,]*\d", page))


def test_a_reader_that_has_enough_is_no_failure() -> None:
    """As `megarl plan --json | head` is."""
    program = "from megarl.commands.output import say_all; import sys; sys.stdin.read(); say_all('x' * 10**6)"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin and child.stdout and child.stderr
    child.stdout.close()
    child.stdin.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert (child.wait(60), errors) == (0, b"")


def test_a_picture_is_a_png_of_the_size_that_the_map_needs(
    small: RunPlan, deepseek: RunPlan, tmp_path: Path
) -> None:
    from matplotlib.image import imread

    for plan, height in ((small, 820), (deepseek, 900)):
        draw(plan, tmp_path / "plan.png")
        pixels = imread(tmp_path / "plan.png")
        assert pixels.shape[1] == 1760 and pixels.shape[0] == pytest.approx(height, abs=150)
        assert len({tuple(pixel) for pixel in pixels[::7, ::7, :3].reshape(-1, 3).tolist()}) > 10


def test_a_plan_of_phases_says_how_old_tokens_are_and_who_waits(phased: RunPlan) -> None:
    plan = phased
    assert (
        plan.phases
        and plan.rollout == plan.phases.time
        and plan.step.rollout_s == plan.rollout.total_s
    )
    assert (plan.phases.phase_tokens, plan.phases.prompts_in_flight, plan.phases.bound) == (
        100,
        256,
        3,
    )
    assert 0 < plan.phases.token_mean < plan.phases.token_max <= 3
    page = report_of(plan)
    assert re.search(r"open sequences in a phase +[12],\d{3}", page)
    assert re.search(r"tokens are stale, mean and maximum +[\d.]+, \d; never more than 3", page)
    assert "the most tokens that a phase adds alone, 100 tokens" in page
    content = plan_json(plan)
    assert (
        content["phases"]["token_mean"] == plan.phases.token_mean
        and "time" not in content["phases"]
    )
    assert content["waits"] == {"engines_s": plan.engines_wait_s, "ranks_s": plan.rollout.total_s}
    assert plan.engines_wait_s == pytest.approx(plan.step.train_s + plan.step.save_s)
    assert f"GPUs that only train wait {amount(plan.rollout.total_s)} s of a step" in page


def test_the_plan_of_what_is_advised_takes_as_many_seconds_as_told(phased: RunPlan) -> None:
    """It samples ahead: a step takes its further phases and the longer of its training and of the phase beside it."""
    (advice,) = [line for line in phased.advice if "fewer seconds a step" in line]
    match = re.search(
        r"ahead 1.* ([\d.]+)x fewer seconds a step; tokens are at most (\d+) versions old", advice
    )
    keys = {
        key: int(value)
        for key, value in re.findall(r"(phase_tokens|prompts_in_flight|ahead) (\d+)", advice)
    }
    advised = overlaid(phased.recipe, {"rollout": keys})
    plan = make_plan(advised, CARD, sizes=phased.sizes, in_full=False)
    assert match and plan.phases and plan.phases.bound == int(match[2])
    assert phased.step.total_s / plan.step.total_s == pytest.approx(float(match[1]), abs=0.051)
    assert 0 < plan.phases.token_mean <= plan.phases.token_max <= plan.phases.bound
    step, before, beside = plan.step, phased.step, plan.rollout.mean_beside_s
    assert step.rollout_s == pytest.approx(plan.rollout.total_s - beside, abs=1e-9)
    assert (step.train_s, step.reshard_s, step.save_s) == (before.train_s, before.reshard_s, 0)
    longer = step.total_s - step.rollout_s - step.reshard_s
    assert longer == pytest.approx(step.train_s + step.ahead_s)
    assert longer >= max(beside, step.train_s) - 1e-9
    assert plan.engines_wait_s == pytest.approx(longer - beside)
    assert plan.ranks_wait_s == step.rollout_s + step.ahead_s
    phase = f"a phase of {amount(beside)} s is sampled"
    assert f"beside {amount(step.train_s)} s of training {phase}" in report_of(plan)
    assert plan_json(plan)["rollout"]["beside_s"] == beside


def test_what_contradicts_phases_is_not_planned(tmp_path: Path) -> None:
    keys = ["rollout.phase_tokens=2", "rollout.prompts_in_flight=1"]
    wheres = [error.where for error in plan_errors(planning.small(tmp_path, *keys))]
    assert {"rollout.prompts_in_flight", "algorithm.rollout_correction"} <= set(wheres)


def test_gpus_that_sample_and_train_wait_for_nobody(small: RunPlan) -> None:
    assert small.phases is None and plan_json(small)["phases"] is None
    assert (small.engines_wait_s, small.ranks_wait_s) == (0, 0)
    assert "wait" not in report_of(small)


def test_numbers_are_told_as_runs() -> None:
    assert spans((0, 1, 4, 5, 7)) == "0-1, 4-5, 7"
    assert spans(range(3, 4)) == "3" and spans(()) == "none"


def test_numbers_are_told_with_three_digits() -> None:
    assert [amount(value) for value in (1339.4, 42.09, 3.008, 0.3051, 0, 1e-5, 12345678)] == [
        "1,339", "42.1", "3.01", "0.305", "0", "1.0e-05", "12,345,678",
    ]  # fmt: skip


def test_every_error_of_a_layout_is_told_at_once(tmp_path: Path) -> None:
    keys = [
        "train.tp=3",
        "rollout.engine.tp=3",
        "train.tokens_per_micro_batch=20",
        "algorithm.gamma=0.5",
    ]
    with pytest.raises(UserErrors) as caught:
        make_plan(planning.small(tmp_path, *keys), CARD)
    wheres = {error.where for error in caught.value.errors}
    assert {
        "train.tp",
        "rollout.engine.tp",
        "train.tokens_per_micro_batch",
        "algorithm.gamma",
    } <= wheres


def test_errors_of_a_critic_name_its_own_keys(tmp_path: Path) -> None:
    keys = ["algorithm.name=ppo", "critic.lr=1e-5", "critic.ranks.tp=3", "critic.ranks.gpus=6"]
    errors = plan_errors(planning.small(tmp_path, *keys))
    assert "critic.ranks.tp" in {error.where for error in errors}
    assert not [error for error in errors if error.where.startswith("train.")]


def test_overlaps_that_a_run_would_be_refused_are_not_planned(tmp_path: Path) -> None:
    pairs = "train.megatron.overlap_moe_expert_parallel_comm"
    keys = [f"{pairs}=true", "train.tp=1", "train.pp=1", "algorithm.name=ppo", "critic.lr=1e-5"]
    assert plan_errors(planning.small(tmp_path, *keys, "train.ep=4", "critic.ranks.ep=1")) == []
    whole = [f"{key}=8" for key in ("train.ep", "critic.ranks.ep")]
    errors = plan_errors(planning.small(tmp_path, *keys, *whole))
    assert [error.where for error in errors] == [pairs, pairs]
    assert ["lower train.ep below 8" in str(error) for error in errors] == [True, False]
    assert "lower critic.ranks.ep below 8" in str(errors[1])
    refused = [*keys, "train.ep=4", "train.megatron.delay_wgrad_compute=true"]
    with pytest.raises(UserErrors) as caught:
        make_plan(planning.small(tmp_path, *refused), CARD)
    (error,) = caught.value.errors
    assert error.where == "train.megatron.delay_wgrad_compute"


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        (
            ["rollout.engine.tp=8", "rollout.engine.count=1", "placement.gpus_per_node=3"],
            "rollout.engine.tp",
        ),
        (["train.updates_per_step=9999"], "train.updates_per_step"),
        (["algorithm.name=grop"], "algorithm.name"),
        (["model.config=null"], "nowhere/config.json"),
        (
            ["rollout.engine.weights=fp8", "train.tp=8", "train.pp=1", "train.ep=1"],
            "rollout.engine.tp",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(keys: list[str], where: str, tmp_path: Path) -> None:
    assert where in [error.where for error in plan_errors(planning.small(tmp_path, *keys))]


def test_a_checkpoint_that_is_there_is_read_before_the_config_alone(tmp_path: Path) -> None:
    recipe = planning.small(tmp_path)
    assert stand_ins(recipe)[0].model.path == str(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    here = overlaid(recipe, {"model": {"path": str(other)}})
    assert stand_ins(here)[0].model.path == str(tmp_path)  # a folder without a config.json
    (other / "config.json").write_text("{}")
    assert stand_ins(here)[0].model.path == str(other)


def run_command(*arguments: str | Path) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.app(["plan", *map(str, arguments)], standalone_mode=False)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_the_plan_and_what_does_not_fit_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both in one start: a plan of a card with 3 GB is whole, and its faults follow it."""
    recipe, tiny, picture = tmp_path / "recipe.yaml", tmp_path / "tiny.yaml", tmp_path / "plan.png"
    recipe.write_text(planning.small(tmp_path).dump_yaml())
    tiny.write_text(planning.H800.read_text().replace("84_930_000_000", "3_000_000_000"))
    assert run_command(recipe, "--hardware", tiny, "--json", "--picture", picture) == 2
    printed = capsys.readouterr()
    content: dict[str, Any] = json.loads(printed.out)
    assert content["fits"] is False and content["hardware"]["memory_bytes"] == 3_000_000_000
    lines = printed.err.splitlines()
    assert lines and len(lines) == len(content["errors"])
    assert all(
        line.startswith(f"{error['where']}: ")
        for error, line in zip(content["errors"], lines, strict=True)
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("rollout.prompts_per_step", 2**15 + 1, 2**31 - 1),
        ("placement.gpus", run_plan.MOST_GPUS + 1, 65_536),
    ],
)
def test_sizes_that_would_be_planned_for_hours_are_refused(
    tmp_path: Path, key: str, least: int, most: int
) -> None:
    """The largest that is planned takes seconds: its faults are asked for, not the plan."""
    samples = "rollout.samples_per_prompt=2"
    for size in (least, most):
        recipe = planning.small(tmp_path, f"{key}={size}", samples)
        with pytest.raises(UserErrors) as caught:
            make_plan(recipe, load_hardware(planning.H800))
        (error,) = caught.value.errors
        assert error.where == key and f"set it to at most {least - 1}" in error.hint
    assert run_plan.size_errors(planning.small(tmp_path, f"{key}={least - 1}", samples)) == []


def test_without_hardware_nothing_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(planning.small(tmp_path, "placement.hardware=null").dump_yaml())
    assert run_command(recipe) == 2
    assert "placement.hardware: no hardware is named" in capsys.readouterr().err
