"""Keys that nothing reads are told, and recipes as they are shipped are told nothing. Nothing is started."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from megarl.commands import launching
from megarl.commands.outcome import run_recipe
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.config.unread import UNREAD_WHERE
from megarl.preflight.notes import recipe_notes, unread_reasons

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OVERLAYS = sorted((ROOT / "recipes" / "overlays").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_and_overlays_are_told_nothing(path: Path) -> None:
    """But for how old tokens get with phases, which every such run is told."""
    overlays = [
        overlay
        for overlay in OVERLAYS
        if "kimi_k2" in path.stem or not overlay.stem.endswith("kimi_k2")
    ]
    for over in ([], *([str(overlay)] for overlay in overlays if path != QUICKSTART)):
        notes = recipe_notes(load_recipe(path, over))
        ages = [note for note in notes if "a token is trained on at most" in note]
        assert notes == ages and len(ages) == ("phases_deepseek671b" in str(over)), over


def test_a_recipe_as_a_run_writes_it_is_told_nothing(tmp_path: Path) -> None:
    for path in RECIPES:
        (tmp_path / "recipe.yaml").write_text(load_recipe(path).dump_yaml())
        assert recipe_notes(load_recipe(tmp_path / "recipe.yaml")) == []


@pytest.mark.parametrize(
    ("on", "connections", "is_told"),
    [("true", "1", True), ("false", "1", False), ("true", "32", False), ("true", None, False)],
)
def test_passes_in_pairs_that_wait_for_one_another_are_told(
    monkeypatch: pytest.MonkeyPatch, on: str, connections: str | None, is_told: bool
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    key = f"train.megatron.overlap_moe_expert_parallel_comm={on}"
    notes = recipe_notes(load_recipe(ROOT / "recipes" / "dapo_qwen3_30b.yaml", [key]))
    told = [note for note in notes if note.startswith("CUDA_DEVICE_MAX_CONNECTIONS is 1: ")]
    assert bool(told) == is_told


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("critic.lr=1e-5", "critic.lr is set, and nothing reads it: grpo has no critic"),
        (
            "critic.path=a critic.ranks.tp=2",
            "critic.path and critic.ranks.tp are set, and nothing reads them: grpo has no critic",
        ),
        ("reference.path=a", "reference.path is set, and nothing reads it: reference.use is false and algorithm.kl_"),
        ("reference.path=a reference.use=false", "reference.path is set, and nothing reads it: reference.use"),
        ("reward_model.weight=0.5", "reward_model.weight is set, and nothing reads it: neither reward_model.path nor"),
        ("reward_model.ranks.gpus=2", "reward_model.ranks.gpus is set, and nothing reads it: neither reward_model"),
        (
            "reshard.round_bytes=4096 rollout.engine={external:['a:1']}",
            "reshard.round_bytes is set, and nothing reads it: external engines get weights as files",
        ),
        ("evaluation.top_p=0.7", "evaluation.top_p is set, and nothing reads it: the temperature is 0, and the most"),
        ("train.lr_schedule=constant train.lr_end=0.1", "train.lr_end is set, and nothing reads it: train.lr_sch"),
        (
            "algorithm.name=ppo critic.lr_schedule=constant critic.lr_end=0.1",
            "critic.lr_end is set, and nothing reads it: the critic's lr_s",
        ),
        (
            "run.restarts=0 checkpoint.memory_copies=true",
            "checkpoint.memory_copies is set, and nothing reads it: run.restarts is 0: a rank that",
        ),
        ("run.restarts=0 run.restart_window_s=60", "run.restart_window_s is set, and nothing reads it: run.restarts"),
        ("run.restarts=0 run.on_silent_fault=repeat", "run.on_silent_fault is set, and nothing reads it: it is repeat"),
        ("algorithm.name=sft rollout.top_p=0.9", "rollout.top_p is set, and nothing reads it: sft learns from"),
        (
            "run.compare_replicas_every=5 placement.gpus=1 train.tp=1 train.pp=1 train.ep=1 rollout.engine.tp=1",
            "run.compare_replicas_every is set, and nothing reads it: no rank has a replica",
        ),
        ("run.project=math", "run.project is set, and nothing reads it: run.trackers names neither wandb nor mlflow"),
        ("train.lr=0.5", "train.lr is 0.5, and rates of AdamW above 0.1 destroy a model"),
        ("placement.gpus=4096", "1024 data-parallel ranks share the 256 samples of an update: some of them have"),
        ("rollout.engine.draft=1", "train.mtp_loss is 0: the MTP layer stays frozen, and fewer drafts"),
        ("algorithm.name=sft rollout.phase_tokens=2", "rollout.phase_tokens is set, and nothing reads it: sft"),
        ("rollout.engine.count=200", "200 engines (rollout.engine.count) share the 128 prompts of a step"),
    ],
    ids=lambda value: None if " is" in value or ": " in value else value,
)  # fmt: skip
def test_what_nothing_reads_is_told(overrides: str, says: str) -> None:
    (line,) = recipe_notes(load_recipe(QUICKSTART, overrides.split()))
    assert line.startswith(says), line


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.name=ppo critic.lr=1e-5 critic.ranks.tp=2",
        "algorithm.name=ppo train.lr_schedule=cosine train.lr_end=0.1 critic.lr_end=0.2",
        "run.project=math run.trackers=[tensorboard,mlflow]",
        "reference.use=true reference.path=a",
        "algorithm.kl_coefficient=0.1 reference.path=a",
        "reward_model.path=a reward_model.weight=0.5",
        "reward.source=kind",
        "evaluation.sets.arith.temperature=0.6 evaluation.top_p=0.7",
        "checkpoint.keep=7 checkpoint.asynchronous=false checkpoint.may_fail=0",
        "checkpoint.memory_copies=true",
        "run.restart_window_s=60 run.on_silent_fault=repeat",
        # A switch that is written as off is meant.
        "warm_start.steps=0",
        "data.eval={}",
        # Defaults that are written are no wish.
        "reward_model.weight=1.0 critic.ranks.first_gpu=0 reference.path=null",
    ],
)
def test_what_is_read_or_switched_off_is_told_nothing(overrides: str) -> None:
    assert recipe_notes(load_recipe(QUICKSTART, overrides.split())) == []


def test_a_warm_start_that_was_never_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text, num_replaced = re.subn(
        r"warm_start: \{steps: \d+, ", "warm_start: {", QUICKSTART.read_text()
    )
    assert num_replaced == 1
    path.write_text(text)
    (line,) = recipe_notes(load_recipe(path))
    assert line.startswith(
        "warm_start.lr and warm_start.sequences_per_step and warm_start.warmup_steps are set"
    )


def test_the_table_names_keys_that_there_are() -> None:
    recipe = load_recipe(QUICKSTART.with_name("quickstart_tools.yaml"))
    assert unread_reasons(recipe).keys() == UNREAD_WHERE.keys()
    for entry in UNREAD_WHERE:
        functools.reduce(getattr, entry.split("."), recipe)


def test_the_command_says_so_on_stderr_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(recipe: Recipe) -> None:
        launching.advise(recipe)
        print("goes on")

    assert run_recipe(QUICKSTART, ["critic.lr=1e-5"], run) == 0
    captured = capsys.readouterr()
    assert captured.err == "megarl: critic.lr is set, and nothing reads it: grpo has no critic\n"
    assert captured.out == "goes on\n"


def test_a_run_in_phases_is_told_how_old_its_tokens_may_be() -> None:
    """Five tokens of two each phase; of 256 prompts in flight a step trains on 128."""
    keys = ["rollout.phase_tokens=2", "algorithm.rollout_correction=tis"]
    says = "the longest response takes 3 phases: a token is trained on at most {} versions later"
    assert recipe_notes(load_recipe(QUICKSTART, [*keys, "rollout.prompts_in_flight=256"])) == [
        says.format(2)
    ]
    waits = "rollout.prompts_in_flight is rollout.prompts_per_step: a step waits for all of them; set it to 256"
    assert recipe_notes(load_recipe(QUICKSTART, keys)) == [says.format(0), waits]
    ahead = [*keys, "rollout.prompts_in_flight=256", "rollout.ahead=1"]
    assert recipe_notes(load_recipe(QUICKSTART, ahead)) == [says.format(3)]
    tools = QUICKSTART.with_name("quickstart_tools.yaml")
    episodes = recipe_notes(
        load_recipe(tools, ["rollout.phase_tokens=16", "rollout.prompts_in_flight=128"])
    )
    assert (
        "the longest episode takes 6 phases: a token is trained on at most 5 versions later"
        in episodes
    )
    unread_reasons = (
        "episode.phase_tool_s is set, and nothing reads it: rollout.phase_tokens is not set"
    )
    assert unread_reasons in recipe_notes(load_recipe(tools, ["episode.phase_tool_s=5"]))
    whole = load_recipe(QUICKSTART, ["rollout.ahead=1", "algorithm.rollout_correction=tis"])
    says = "a step's responses are sampled ahead: a token is trained on at most 1 versions later"
    assert recipe_notes(whole) == [says]
