"""The recipes that are shipped: each, and each with its overlays, is good as far as this machine can tell.

What costs time and is the same in several recipes (the check of an exchange, a judge's start) is computed once for all
of them; the traffic of an exchange once for engines of a kind.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl import cli
from megarl.algos import hyperparameters_of
from megarl.checkpoints.quantised import file_bytes
from megarl.commands import dry_run
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.model.families import mtp_prefix
from megarl.model.hf_config import hf_facts, model_shape
from megarl.model.tensors import aliases, tensors
from megarl.placement.roles import Roles
from megarl.preflight import checks_by_command, layout_checks
from megarl.types import UserErrors
from scripts.keep_layers import keep_layers

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
DEBUG = ("debug_rollout.yaml", "debug_train.yaml")
ENGINE_LOGPROBS = "engine_logprobs.yaml"
PHASES = "phases_deepseek671b.yaml"
FAST_30B = "qwen3_30b_16gpus.yaml", "fast_qwen3_30b_16gpus.yaml"
OF_235B = [
    (),
    ("fp8_rollout_qwen3_235b.yaml",),
    ("qwen3_235b_128gpus.yaml", "fp8_rollout.yaml"),
]
FAST_235B = "qwen3_235b_128gpus.yaml", "fast_qwen3_235b_128gpus.yaml"
FAST_DEEPSEEK = "fp8_rollout_deepseek671b.yaml", "deepep_training_deepseek671b.yaml"
FP8_TRAINING = "fp8_training_deepseek671b.yaml"
DEEPSEEK_512 = "deepseek671b_512gpus.yaml", "fp8_rollout_deepseek671b.yaml"
OF_DEEPSEEK = [
    (), DEEPSEEK_512[:1], DEEPSEEK_512[1:], DEEPSEEK_512, *((overlay,) for overlay in DEBUG),
    FAST_DEEPSEEK, (*FAST_DEEPSEEK, ENGINE_LOGPROBS), (*FAST_DEEPSEEK, ENGINE_LOGPROBS, PHASES),
]  # fmt: skip
# What is laid over the recipes of a model; the recipes themselves are all that there are.
OVERLAYS: dict[str, list[tuple[str, ...]]] = {
    "quickstart": [()],
    "quickstart_tools": [()],
    "retool_qwen3_30b": [(), ("retool_qwen3_235b.yaml",)],
    "search_r1_qwen3_30b": [(), ("search_r1_qwen3_235b.yaml",)],
    "qwen3_30b": [
        (), ("qwen3_30b_16gpus.yaml",), ("qwen3_30b_16gpus.yaml", "smoke.yaml"), ("fp8_rollout.yaml",),
        FAST_30B, (*FAST_30B, ENGINE_LOGPROBS),
        *((overlay,) for overlay in DEBUG),
    ],
    # two models on 128 GPUs, which want another layout
    "vapo_qwen3_235b": [*OF_235B, *((overlay,) for overlay in DEBUG)],
    "qwen3_235b": [
        *OF_235B,
        ("qwen3_235b_128gpus.yaml",), FAST_235B, (*FAST_235B, ENGINE_LOGPROBS),
        *((overlay,) for overlay in DEBUG),
    ],
    # its critic has no room beside the codes of training in fp8
    "vapo_deepseek671b": OF_DEEPSEEK,
    "deepseek671b": [
        *OF_DEEPSEEK,
        (*FAST_DEEPSEEK, FP8_TRAINING, ENGINE_LOGPROBS),
        (*FAST_DEEPSEEK, FP8_TRAINING, ENGINE_LOGPROBS, PHASES),
    ],
    "qwen3_30b_128k": [()],
    "glm4_5_air": [()],
    "glm4_6": [()],
    "qwen3_next": [()],
    "qwen3_5_35b": [()],
    "qwen3_5_397b": [()],
    "minimax_m2": [(), ("fp8_rollout_minimax_m2.yaml",)],
    "hy_v3": [()],
    "qwen2_5_32b": [(), ("fp8_rollout.yaml",), *((overlay,) for overlay in DEBUG)],
    "kimi_k2_64gpus": [(), ("adapters_kimi_k2.yaml",), *((overlay,) for overlay in DEBUG)],
}  # fmt: skip


def model_of(path: Path) -> str:
    return next(model for model in OVERLAYS if path.stem.endswith(model))


def cases() -> list[Any]:
    """(recipe's name, what is laid over it), of every recipe in the folder."""
    return [
        pytest.param(
            path.stem,
            over,
            id="+".join([path.stem, *over]),
            marks=[pytest.mark.nightly] * (len(over) > 1),
        )
        for path in sorted(RECIPES.glob("*.yaml"))
        for over in OVERLAYS[model_of(path)]
    ]


# meant for GPUs
CLUSTER = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if "quickstart" not in path.stem]


def load(name: str, over: tuple[str, ...] = (), *overrides: str) -> Recipe:
    overlays = [
        str(RECIPES / "overlays" / overlay) if overlay.endswith(".yaml") else overlay
        for overlay in over
    ]
    return load_recipe(RECIPES / f"{name}.yaml", [*overlays, *overrides])


def kept(function: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose answers are kept by key."""
    answers: dict[Any, Any] = {}

    def call(*arguments: Any, **named: Any) -> Any:
        key = key_of(*arguments)
        if key not in answers:
            answers[key] = function(*arguments, **named)
        return answers[key]

    return call


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """The same functions, but each answer is kept for the recipes in which everything that it follows from is equal."""

    def places(roles: Roles, *_: Any) -> Any:
        recipe = roles.recipe
        exchange = (
            recipe.reshard.round_bytes,
            recipe.placement,
            recipe.model.path,
            recipe.model.dtype,
        )
        return exchange, roles.policy.layout, roles.policy.lora, roles.engines

    def kinds(roles: Roles, *_: Any) -> Any:
        """tests/plan plans the exchange of each recipe by night."""
        engines = roles.engines
        return roles.recipe.model.path, roles.policy.lora, engines.tp, engines.fp8

    def judge(recipe: Recipe, prompts: Any) -> Any:
        return recipe.reward.model_dump_json(), bool(prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the recipes' own paths are relative to it
        patch.setattr(
            dry_run, "_reshard", kept(lambda *arguments: list(_reshard(*arguments)), kinds)
        )
        patch.setattr(layout_checks, "reshard_errors", kept(layout_checks.reshard_errors, places))
        patch.setattr(
            checks_by_command, "reward_errors", kept(checks_by_command.reward_errors, judge)
        )
        yield


_reshard = dry_run._reshard


def lines_of(recipe: Recipe) -> list[str]:
    lines: list[str] = []
    dry_run.dry_run(recipe, lines.append)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("name", "over"), cases())
def test_it_dry_runs(
    name: str, over: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    inputs = [] if name in CLUSTER else request.getfixturevalue(f"{name}_inputs")
    recipe = load(name, over, *inputs, f"run.dir={tmp_path / 'runs'}")
    lines = lines_of(recipe)
    assert lines[-1] == f"{recipe.run.name}: nothing to correct"
    assert sum(line.startswith("reshard: ") for line in lines) == 2
    (weights,) = [line for line in lines if line.startswith("model.path: ")]
    assert ("fp8 tiles of 128 x 128" in weights) == ("deepseek" in name or "kimi" in name)
    assert any(line.startswith("critic: ") for line in lines) == (recipe.algorithm.name == "vapo")
    unchecked = {line.split(": ")[1] for line in lines if line.startswith("not checked here: ")}
    assert sum("up to 122,880 s of cores" in line for line in lines) == name.startswith("retool")
    assert {key.split(" the GPU")[0] for key in unchecked} == _unchecked(name, recipe)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def _unchecked(name: str, recipe: Recipe) -> set[str]:
    """What a dry run of a shipped recipe says it did not check on a machine without GPUs, weights and data."""
    # it runs on this machine, and passes Megatron and SGLang nothing of its own
    if name not in CLUSTER:
        return {
            "Megatron's own classes, which get no options from this recipe",
            "SGLang's own class, which gets nothing but sizes from this recipe",
        }
    unchecked = {
        "model.path",
        *recipe.data.files,
        "SGLang's choices of kernels and memory, which ask",
    }
    if recipe.episode:
        return unchecked | {"memory and time, and cores for tools", "episode.tools"}
    return unchecked | {"memory and time"}


@pytest.mark.slow
def test_the_recipe_of_kimi_k2_fits_kimi_k25(tmp_path: Path) -> None:
    published = RECIPES.parent / "tests" / "published" / "kimi-k2.5.json"
    (tmp_path / "config.json").write_text(published.read_text())
    lines = lines_of(load("grpo_lora_kimi_k2_64gpus", (), f"model.config={tmp_path}"))
    assert lines[-1] == "grpo-lora-kimi-k2: nothing to correct"
    assert "model.path: weights in int4 groups of 32, 594.21 GB to read" in lines


@pytest.mark.parametrize("name", [name for name in CLUSTER if "qwen2_5" not in name])
def test_it_dry_runs_with_its_first_layers_alone(name: str, tmp_path: Path) -> None:
    whole = load(name).model.config
    assert whole
    keep_layers(Path(whole), tmp_path / "first", 4)
    recipe = load(name, ("debug_layers.yaml",), f"model.config={tmp_path / 'first'}")
    assert lines_of(recipe)[0] == "train: TP4 DP2 EP8; slots 0 to 7"


def test_the_overlays_that_there_are_are_tried() -> None:
    tried = {overlay for of_model in OVERLAYS.values() for over in of_model for overlay in over}
    assert {path.name for path in (RECIPES / "overlays").glob("*.yaml")} <= tried | {
        "debug_layers.yaml"
    }


@pytest.mark.parametrize("name", CLUSTER)
@pytest.mark.parametrize("overlay", DEBUG)
def test_one_side_of_a_run_can_be_debugged_alone(name: str, overlay: str) -> None:
    """What `megarl rollout` and `--from-samples` refuse is not in the recipe any more."""
    recipe = load(name, (overlay,))
    rules = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
    assert recipe.checkpoint.every is None and recipe.warm_start.steps == 0
    assert not rules.dynamic_sampling
    assert rules.critic_warmup_steps < recipe.run.steps == 1
    assert overlay == "debug_train.yaml" or recipe.rollout.engine.count == 1


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.name)
def test_recipes_are_short_and_say_what_they_are(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 130


# --- the papers --------------------------------------------------------------------------------------------------

COMMON = {
    "rollout.prompts_per_step": 512, "rollout.samples_per_prompt": 16, "rollout.temperature": 1.0, "rollout.top_p": 1.0,
    "train.lr": 1e-6, "train.updates_per_step": 16,
}  # fmt: skip
CLIP_HIGHER = {"rules.clip_low": 0.2, "rules.clip_high": 0.28}
KL = {"rules.kl_coefficient": 0.001, "rules.kl_estimator": "k3"}
EVALUATION = {"evaluation.samples": 32, "evaluation.temperature": 1.0, "evaluation.top_p": 0.7}
# By algorithm: where the paper says it -> key, or rule as the algorithm reads it, and value.
PAPERS: dict[str, dict[str, dict[str, Any]]] = {
    "dapo": {  # arXiv 2503.14476
        "3.1 Clip-Higher": CLIP_HIGHER,
        "3.2 Dynamic Sampling": {"rules.dynamic_sampling": True},
        "3.3 Token-Level Loss": {"rules.aggregation": "token_mean"},
        "3.4 and 4.1 Soft Overlong Punishment": {"rules.overlong_share": 4096 / 20480},
        "2.3 no KL, 2.4 rewards": {
            "rules.kl_coefficient": 0.0,
            "reward.arguments": {"correct": 1.0, "wrong": -1.0},
        },
        "4.1 Training Details": {
            **COMMON,
            "train.warmup_steps": 20,
            "rollout.max_response_tokens": 16384 + 4096,
        },
        "4.1 evaluation": EVALUATION,
    },
    "vapo": {  # arXiv 2504.05118
        "4.1 Value-Pretraining": {"rules.critic_warmup_steps": 50},
        "4.1 Decoupled GAE": {"rules.critic_lambda": 1.0, "rules.gamma": 1.0},
        "4.2 Length-Adaptive GAE": {"rules.lambda_alpha": 0.05},
        "4.2 Token-Level Loss": {"rules.aggregation": "token_mean"},
        "4.3 Clip-Higher": CLIP_HIGHER,
        "4.3 Positive Example LM Loss": {"rules.positive_nll": 0.1},
        "4.3 Group-Sampling, 5.1": {**COMMON, "critic.lr": 2e-6, "rules.kl_coefficient": 0.0},
    },
    "grpo": {  # arXiv 2402.03300, 2501.12948
        "DeepSeekMath, 4.2": {"train.lr": 1e-6, "rules.aggregation": "sequence_mean"},
        "DeepSeek-R1": {**COMMON, **KL},
    },
    "long": {  # GRPO with the scaling of Qwen3's model card
        "DeepSeekMath, 4.2": {"train.lr": 1e-6, "rules.aggregation": "sequence_mean"},
        "DeepSeek-R1": {**KL, "rollout.samples_per_prompt": 16},
        "Processing Long Texts": {
            "model.rope_scaling.factor": 4.0,
            "model.rope_scaling.original_max_position_embeddings": 32_768,
        },
    },
    "retool": {  # arXiv 2504.11536, whose PPO has a critic; the loss is DAPO's
        "3.1 Training": {
            **COMMON,
            "rules.kl_coefficient": 0.0,
            "episode.max_tokens": 16384,
        },
        "2.3 Reward": {"reward.arguments": {"correct": 1.0, "wrong": -1.0}},
        "3.1 Evaluation": EVALUATION,
        "DAPO, 3.1 and 3.3 alone": {
            **CLIP_HIGHER,
            "rules.aggregation": "token_mean",
            "rules.dynamic_sampling": False,
            "rules.overlong_share": 0.0,
        },
    },
    "search-r1": {  # arXiv 2503.09516, but for the length of turns
        "GRPO": {**KL, "rollout.samples_per_prompt": 5},
        "Training": {
            "train.lr": 1e-6,
            "train.warmup_steps": int(0.285 * 500),
            "rollout.prompts_per_step": 512,
            "train.updates_per_step": 512 // 256,
            "run.steps": 500,
            "rollout.temperature": 1.0,
            "rollout.top_p": 1.0,
        },
        "Search": {"episode.max_turns": 4 + 1, "episode.max_observation_tokens": 500},
    },
    "lora": {  # the rates of "LoRA Without Regret"; what it is laid on is GRPO
        "10 times the rate, all layers": {"train.lr": 1e-5, "lora.alpha": 32.0, "lora.targets": ()},
        "DeepSeek-R1": {**KL, "rollout.samples_per_prompt": 16},
    },
}


def value_of(recipe: Recipe, key: str) -> Any:
    if key.startswith("rules."):
        return getattr(
            hyperparameters_of(recipe.algorithm.name, recipe.algorithm), key.removeprefix("rules.")
        )
    return functools.reduce(getattr, key.split("."), recipe)


@pytest.mark.parametrize("name", CLUSTER)
def test_it_says_what_the_paper_says(name: str) -> None:
    recipe = load(name)
    papers = [paper for paper in PAPERS if recipe.episode and recipe.run.name.startswith(paper)]
    if recipe.lora:
        papers = ["lora"]
    elif recipe.model.rope_scaling:
        papers = ["long"]
    paper_values = PAPERS[papers[0] if papers else recipe.algorithm.name]
    recipe_values = {
        place: {key: value_of(recipe, key) for key in values}
        for place, values in paper_values.items()
    }
    assert recipe_values == paper_values


# as the model cards have them; DeepSeek's README_WEIGHTS.md counts prediction layers apart
PARAMETERS = {
    "qwen3-30b-a3b": 30.5e9, "qwen3-235b-a22b": 235e9, "deepseek-v3": 671e9, "qwen2.5-32b": 32.8e9, "kimi-k2": 1026.4e9,
    "qwen3-next-80b-a3b": 79.67e9, "minimax-m2": 228.69e9, "hy-v3": 295.03e9,
    "qwen3.5-35b-a3b": 34.66e9, "qwen3.5-397b-a17b": 396.35e9,
}  # fmt: skip
# of the prediction layer alone
AHEAD = {"deepseek-v3": 11.5e9, "qwen3.5-35b-a3b": 0.84e9, "qwen3.5-397b-a17b": 6.6e9}
# published as whole billions: of the decoder, and of the files with their prediction layer
GLM_PARAMETERS = {"glm-4.5-air": (106e9, 110e9), "glm-4.6": (355e9, 357e9)}
# The published files: of DeepSeek-V3 with its prediction layer, of Kimi-K2-Instruct 958.49 GiB.
FP8_BYTES = {"deepseek-v3": 688.6e9, "kimi-k2": 958.49 * 2**30}


@pytest.mark.parametrize(
    "folder", sorted((RECIPES / "models").iterdir()), ids=lambda path: path.name
)
def test_a_models_shape_is_the_published_one(folder: Path) -> None:
    shape = model_shape(folder)
    ahead = mtp_prefix(shape, 0) if shape.num_mtp_layers else "no tensor"
    sizes = {name: items * rows * cols for name, (items, rows, cols) in tensors(shape).items()}
    main = sum(size for name, size in sizes.items() if not name.startswith(ahead))
    if folder.name in GLM_PARAMETERS:
        decoder, with_prediction = GLM_PARAMETERS[folder.name]
        assert main == pytest.approx(decoder, rel=1e-2)
        assert sum(sizes.values()) == pytest.approx(with_prediction, rel=1e-2)
        return
    assert main == pytest.approx(PARAMETERS[folder.name], rel=2e-3)
    if shape.num_mtp_layers:
        assert sum(sizes.values()) - main == pytest.approx(AHEAD[folder.name], rel=1e-2)
    facts = hf_facts(folder)
    in_bfloat16 = 2 * (sum(sizes.values()) + sum(sizes[name] for name in aliases(shape).values()))
    published = FP8_BYTES.get(folder.name, in_bfloat16)
    assert (facts.quantisation is not None) == (folder.name in FP8_BYTES)
    assert file_bytes(shape, facts) == pytest.approx(published, rel=1e-4)


# --- what is wrong -----------------------------------------------------------------------------------------------


def told(name: str, *overrides: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        lines_of(load(name, (), *overrides))
    return [str(error) for error in caught.value.errors]


@pytest.mark.slow
def test_a_checkpoint_in_an_unknown_format_is_one_line(tmp_path: Path) -> None:
    config = (RECIPES / "models" / "deepseek-v3" / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"quant_method": "fp8"', '"quant_method": "awq"')
    )
    (line,) = told("grpo_deepseek671b", f"model.config={tmp_path}")
    assert line.startswith(
        f'model.path: quantization_config.quant_method of {tmp_path}/config.json is "awq"; name a'
    )


@pytest.mark.parametrize(
    ("override", "start"),
    [
        (
            "train.megatron.recompute_granularity=some",
            "train.megatron.recompute_granularity: 'some' is no value that",
        ),
        ("train.megatron.recompute_method=null", "train.megatron: Megatron refuses them ("),
        (
            "rollout.engine.sglang.mem_fraction_static=most",
            "rollout.engine.sglang.mem_fraction_static: 'most' has the wrong type",
        ),
        (
            "rollout.engine.sglang.attention_backend=fa33",
            "rollout.engine.sglang.attention_backend: 'fa33' is none of",
        ),
        ("train.etp=5", "train.etp: 5 with train.ep 1"),
        (
            "rollout.engine.sglang.tokenizer_worker_num=0",
            "rollout.engine.sglang: SGLang refuses the engine's argu",
        ),
        (
            "critic.ranks.layers_per_stage=[1]",
            "critic.ranks.layers_per_stage: [1] are not 8 numbers",
        ),
        ("model.config=null", "models/Qwen3-30B-A3B/config.json: no such file"),
        ("model.config=gone", "gone/config.json: no such file"),
    ],
)
def test_an_error_is_told(override: str, start: str) -> None:
    lines = told("vapo_qwen3_30b", override)
    assert sum(line.startswith(start) for line in lines) == 1, lines
    assert start.startswith("train.megatron: ") or "train.megatron: " not in str(lines)


def test_the_named_hardware_decides_what_is_checked(tmp_path: Path) -> None:
    """An engine on CPU has none of the widths that a GPU takes."""
    over = ("fp8_rollout.yaml",)
    assert "x TP8 EP8 DP2 in fp8" in "\n".join(lines_of(load("dapo_qwen3_30b", over)))
    lines = told("dapo_qwen3_30b", "placement.hardware=null")
    assert "which an engine on CPU needs" in "\n".join(lines)


def test_data_that_is_here_is_read(tmp_path: Path, arithmetic: Path) -> None:
    train = f"data.train={arithmetic / 'train.jsonl'}"
    (line,) = told("grpo_qwen3_30b", train)
    assert line.startswith("data.train: ") and "no column 'reward_model.ground_truth'" in line
    good = load("grpo_qwen3_30b", (), train, "data.answer=answer")
    assert not any(line.startswith("not checked here: data.train") for line in lines_of(good))


def test_other_models_that_are_not_here_are_told() -> None:
    keys = ["critic.path=gone/critic", "reward_model.path=gone/judge", "reference.path=gone/start"]
    lines = lines_of(load("vapo_qwen3_30b", (), *keys, "reference.use=true"))
    text = "\n".join(lines)
    for branch in ("critic", "reward_model", "reference"):
        assert text.count(f"not checked here: {branch}.path: gone/") == 1
    assert "\nreward_model: PP8 DP2; slots 0 to 15" in text


def test_the_command_says_so_and_ends_with_0_or_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "raise_on_sigterm", lambda: None)  # this process is pytest's
    arguments = [
        "train",
        "recipes/dapo_qwen3_30b.yaml",
        "recipes/overlays/qwen3_30b_16gpus.yaml",
        "--dry-run",
    ]
    good = CliRunner().invoke(cli.app, arguments)
    assert good.exit_code == 0, good.output
    assert re.search(r"engines: 2 x TP8 .*slots 0 to 15\n", good.stdout)
    bad = CliRunner().invoke(
        cli.app,
        [*arguments, "train.pp=5", "rollout.engine.sglang.page_size=big", "algorithm.gamma=0.9"],
    )
    assert bad.exit_code == 2
    starts = [line.split(": ")[0] for line in bad.stderr.splitlines()]
    assert sorted(starts) == [
        "algorithm.gamma",
        "placement.gpus",
        "rollout.engine.sglang.page_size",
        "train.layers_per_stage",
    ]
    for options in (["--resume"], ["--from-samples", "samples.parquet"]):
        result = CliRunner().invoke(cli.app, [*arguments, *options])
        assert result.exit_code == 2
        assert result.stderr.startswith(
            f"--dry-run: nothing is launched, and {options[0]} says how"
        )
