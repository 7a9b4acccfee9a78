"""What is told before any process is started. Needs no engine and no training rank."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.loading import load_recipe
from megarl.data.inputs import Inputs
from megarl.model.tokenizer import load_tokenizer
from megarl.placement.roles import resolve
from megarl.preflight.checks_by_command import (
    _Case,
    _errors,
    _megatron,
    check,
    check_convert,
    check_rollout,
    check_samples,
    errors_elsewhere,
)
from megarl.types import UserErrors
from tests.parallel import checkpoints
from tests.plan import plans

Read = Callable[..., Inputs]  # of overrides
Told = Callable[..., list[str]]
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.fixture
def good(quickstart_inputs: list[str], arithmetic: Path, tmp_path: Path) -> list[str]:
    """The quickstart, on the first rows of its data."""
    train = tmp_path / "train.jsonl"
    train.write_text(
        "".join((arithmetic / "train.jsonl").read_text().splitlines(keepends=True)[:100])
    )
    return [*quickstart_inputs, f"run.dir={tmp_path / 'runs'}", f"data.train={train}"]


@pytest.fixture
def read(good: list[str]) -> Read:
    """The inputs of the quickstart with some keys set otherwise, which is good then, too."""
    return lambda *overrides: check(load_recipe(QUICKSTART, [*good, *overrides]))


@pytest.fixture
def told(read: Read) -> Told:
    """The faults of the quickstart with some keys set otherwise, as the lines the user sees."""

    def lines(*overrides: str) -> list[str]:
        with pytest.raises(UserErrors) as caught:
            read(*overrides)
        return [str(error) for error in caught.value.errors]

    return lines


def assert_each_is_told_once(lines: list[str], *starts: str) -> None:
    for start in starts:
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("ranks", "algorithm", "words"),
    [
        ({"ep": 128}, "ppo", "lower critic.ranks.ep below 128"),
        ({"pp": 2}, "ppo", "critic.ranks.pp is 2 without virtual stages"),
        ({"ep": 1, "tp": 4}, "ppo", None),
        ({"ep": 128}, "grpo", None),
    ],
)
def test_the_critics_overlaps_are_asked_before_it_starts(
    tmp_path: Path, ranks: dict[str, int], algorithm: str, words: str | None
) -> None:
    pairs = "overlap_moe_expert_parallel_comm"
    recipe = plans.recipe(
        tmp_path, "qwen3-30b", 128, ep=64, megatron={pairs: True},
        algorithm={"name": algorithm}, critic={"lr": 1e-5, "ranks": ranks},
    )  # fmt: skip
    told = [str(error) for error in _megatron(_Case("train", resolve(recipe), "cuda"))]
    assert len(told) == (words is not None)
    for line in told:
        assert line.startswith(f"train.megatron.{pairs}: ") and words and words in line


def test_a_reward_model_has_no_passes_to_pair(tmp_path: Path) -> None:
    recipe = plans.recipe(
        tmp_path, "qwen3-30b", 128, ep=64, megatron={"overlap_moe_expert_parallel_comm": True},
        reward_model={"path": str(tmp_path / "qwen3-30b"), "ranks": {"ep": 128}},
    )  # fmt: skip
    roles = resolve(recipe)
    assert _megatron(_Case("train", roles, "cuda")) == []
    assert roles.policy.recipe.train.megatron
    assert roles.reward_model and not roles.reward_model.recipe.train.megatron


def test_the_quickstart_is_good_and_its_inputs_are_read(read: Read, tmp_path: Path) -> None:
    inputs = read()
    assert isinstance(inputs, Inputs)
    (prompt,) = inputs.prompts.take(1)
    assert prompt.row["prompt"] in prompt.text
    (demonstration,) = inputs.demonstrate(prompt).samples
    assert demonstration.text == prompt.answer
    assert len(inputs.eval_sets["arith"]) == 256
    assert not (tmp_path / "runs").exists(), "checking makes nothing"


def test_a_tracker_that_is_not_installed_is_told(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)  # no module of the name is found
    hint = "pip install 'megarl[trackers]' or leave it out"
    lines = told("run.trackers=[wandb, tensorboard, mlflow]")
    assert lines == [
        f"run.trackers: {name} is not installed; {hint}" for name in ("wandb", "mlflow")
    ]


def test_evaluation_sets_are_cut_to_their_limit_and_the_seed_decides_the_order(read: Read) -> None:
    first = read("evaluation.max_prompts=5", "run.seed=1")
    assert len(first.eval_sets["arith"]) == 5
    assert first.prompts.take(10) != read("run.seed=2").prompts.take(10)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("placement.gpus=6", "placement.gpus: 6 GPUs are not a multiple of train.tp x train.pp = 4"),
        ("rollout.engine.tp=8", "rollout.engine.count: 1 engines of 8 ranks end at GPU 8, there are 4"),
        ("rollout.engine.weights=fp8", "rollout.engine.tp: a rank's 64 of q_proj cut a tile of 128"),
        ("placement.train_gpus=8", "placement.train_gpus: 8 is more than placement.gpus (4)"),
        (
            "placement.gpus=8 placement.train_gpus=6",
            "placement.train_gpus: 6 GPUs are not a multiple of train.tp x train.pp = 4",
        ),
        (
            "placement.gpus=8 placement.train_gpus=4",
            "placement.gpus: 8 GPUs, of which training and engines use the first 4; set it to 4",
        ),
        (
            "placement.gpus=8 placement.train_gpus=4 placement.first_engine_gpu=5",
            "placement.first_engine_gpu: 5 leaves a gap behind the 4 GPUs that train; set it to at most 4",
        ),
        (
            "reshard.round_bytes=1024",
            "reshard.round_bytes: 1024 has no room for two of the smallest pieces to and from every peer (2048 bytes)",
        ),
        (
            "train.updates_per_step=2000",
            "train.updates_per_step: 2000 is more than rollout.prompts_per_step x samples_per_prompt = 1024; set",
        ),
        (
            "train.updates_per_step=9 warm_start.sequences_per_step=4",
            "train.updates_per_step: 9 is more than warm_start.sequences_per_step = 4; set",
        ),
        (
            "train.tokens_per_micro_batch=12",
            "train.tokens_per_micro_batch: 12 is less than the longest prompt and response (14 tokens)",
        ),
        (
            "warm_start.steps=1 rollout.max_response_tokens=3",
            "rollout.max_response_tokens: 3 is less than the longest answer (4 tokens with its end)",
        ),
        (
            "rollout.max_response_tokens=500",
            "data.max_prompt_tokens: with the longest response it makes 516 tokens, the model's context is 512",
        ),
        (
            "rollout.max_response_tokens=491 rollout.phase_tokens=99 algorithm.rollout_correction=tis",
            "data.max_prompt_tokens: ...507 tokens, the model's context is 512; bring the sum to at most 506",
        ),
        (
            "data.max_prompt_tokens=4",
            "data.train: data.max_prompt_tokens (4) is exceeded by 100 of the 100 prompts of",
        ),
        ("data.prompt=question", "data.train: ...there is no column 'question'"),
        ("data.answer=solution", "data.train: ...there is no column 'solution'"),
        ("data.train=none.jsonl", "data.train: none.jsonl is not a file: it does not exist"),
        ("evaluation.sets.arit.samples=4", "evaluation.sets.arit: data.eval has no such set; did you mean arith?"),
        ("evaluation.samples=4", "evaluation.samples: 4 greedy answers to a prompt of arith are the same 4 times"),
        (
            "evaluation.sets.arith.samples=2",
            "evaluation.sets.arith.samples: 2 greedy ...set a temperature, or samples to 1",
        ),
        (
            "evaluation.sets.arith.max_response_tokens=500",
            "data.max_prompt_tokens: with the longest response it makes 516 tokens, the model's context is 512",
        ),
        ("algorithm.name=grop", "algorithm.name: 'grop' is no algorithm"),
        (
            "rollout.top_p=0.9",
            "rollout.top_p: 0.9 cuts off tokens that the policy's log-probabilities, ratios and entropy count",
        ),
        (
            "rollout.samples_per_prompt=1",
            "rollout.samples_per_prompt: 1, and grpo compares the samples of a prompt with each other",
        ),
        (
            "algorithm.name=prime rollout.samples_per_prompt=1",
            "rollout.samples_per_prompt: 1, and prime ...(remax, reinforce_pp, on_policy_distillation, ppo, vapo)",
        ),
        (
            "algorithm.name=ppo rollout.samples_per_prompt=1 algorithm.dynamic_sampling=true",
            "algorithm.dynamic_sampling: true keeps prompts ...and rollout.samples_per_prompt is 1",
        ),
        ("rollout.engine.sglang.pagesize=1", "rollout.engine.sglang.pagesize: SGLang has no such server argument"),
        ("rollout.engine.sglang.tp_size=1", "rollout.engine.sglang.tp_size: is set by megarl itself"),
        (
            "train.megatron.moe_permute_fusio=true",
            "train.megatron.moe_permute_fusio: TransformerConfig has no such field; did you mean moe_permute_fusion?",
        ),
        (
            "rollout.engine.sglang.api_token=s3cret",
            "rollout.engine.sglang.api_token: holds a secret, and the run saves its recipe",
        ),
        (
            "train.megatron.recompute_granularity=full",
            "train.megatron: Megatron refuses them (Using recompute_granularity: full so recompute_method must be",
        ),
        (
            "rollout.engine.sglang.foo=1",
            "rollout.engine.sglang.foo: SGLang has no such server argument; see SGLang's ServerArgs for",
        ),
        (
            "placement.gpus=60000",
            "placement.gpus: 60000 simulated GPUs are as many processes of 0.2 GB and more, and this machine has",
        ),
        ("algorithm.name=rloo algorithm.clip_low=0.1", "algorithm.clip_low: is set, and rloo has no ratio"),
        (
            "algorithm.name=rloo algorithm.old_logprobs=engine",
            "algorithm.old_logprobs: is set, and rloo has no ratio",
        ),
        (
            "algorithm.old_logprobs=engine algorithm.rollout_correction=tis",
            "algorithm.rollout_correction: tis, and with algorithm.old_logprobs engine the ratio itself corrects for",
        ),
        (
            "algorithm.old_logprobs=engine algorithm.name=ppo algorithm.kl_coefficient=0.1 warm_start.steps=0",
            "algorithm.kl_place: reward, and with algorithm.old_logprobs engine nothing computes the policy's",
        ),
        (
            "algorithm.old_logprobs=engine train.replay=r2",
            "train.replay: r2, and with algorithm.old_logprobs engine no pass before the updates records",
        ),
        (
            "algorithm.name=cispo algorithm.dual_clip=3.0",
            "algorithm.dual_clip: is set, and cispo has no minimum of two objectives",
        ),
        ("algorithm.name=gspo algorithm.gae_lambda=0.9", "algorithm.gae_lambda: is set, and gspo has no critic"),
        ("algorithm.gamma=0.9", "algorithm.gamma: is set, and no token has a reward of its own with grpo"),
        ("algorithm.name=prime algorithm.value_clip=0.1", "algorithm.value_clip: is set, and prime has no critic"),
        (
            "algorithm.name=vapo algorithm.prime_beta=0.1 algorithm.critic_warmup_steps=1",
            "algorithm.prime_beta: is set, and vapo has no process rewards",
        ),
        (
            "algorithm.critic_warmup_steps=1",
            "algorithm.critic_warmup_steps: is set, and grpo has no critic or implicit reward model",
        ),
        (
            "algorithm.name=sft algorithm.clip_high=0.3",
            "algorithm.clip_high: is set, and sft learns from the data's answers",
        ),
        ("algorithm.kl_place=reward", "algorithm.kl_place: is set, and algorithm.kl_coefficient is 0"),
        (
            "algorithm.name=on_policy_distillation",
            "algorithm.kl_coefficient: 0, and on_policy_distillation learns from nothing else",
        ),
        (
            "algorithm.name=reinforce_pp algorithm.kl_coefficient=0.01",
            "algorithm.kl_coefficient: 0.01, but the reference is model.path as it is before the warm start",
        ),
        ("algorithm.max_rounds=3", "algorithm.max_rounds: is set, and algorithm.dynamic_sampling is off"),
        (
            "algorithm.name=vapo algorithm.gae_lambda=0.9 algorithm.critic_warmup_steps=1",
            "algorithm.gae_lambda: is set, and algorithm.lambda_alpha decides for the policy (0: not), critic_lam",
        ),
        (
            "algorithm.rollout_correction_high=3.0",
            "algorithm.rollout_correction_high: is set, and algorithm.rollout_correction is off",
        ),
        (
            "algorithm.rollout_correction=tis algorithm.rollout_correction_low=0.1",
            "algorithm.rollout_correction_low: is set, and tis has an upper bound alone",
        ),
        (
            "algorithm.rollout_correction=icepop algorithm.rollout_correction_low=6.0",
            "algorithm.rollout_correction_low: the bounds of icepop are 6.0 and 5.0, between which nothing is kept",
        ),
        (
            "algorithm.name=vapo",
            "algorithm.critic_warmup_steps: 50 are all of run.steps (30): the policy would never learn",
        ),
        (
            "algorithm.kl_coefficient=0.1",
            "algorithm.kl_coefficient: 0.1, but the reference is model.path as it is before the warm start",
        ),
        (
            "algorithm.name=on_policy_distillation algorithm.kl_coefficient=1.0",
            "reference.path: ...name the teacher's checkpoint",
        ),
    ],
    ids=lambda value: value if "=" in value and ": " not in value else None,
)  # fmt: skip
def test_an_error_names_its_key(
    told: Told, monkeypatch: pytest.MonkeyPatch, overrides: str, says: str
) -> None:
    """Once, by the start of its line; what follows dots is in the rest of the line."""
    # they start processes, and answer the same in every case
    monkeypatch.setattr("megarl.preflight.checks_by_command.reward_errors", lambda *_, **__: [])
    monkeypatch.setattr("megarl.data.prompts.template_error", lambda *_, **__: None)
    lines = told(*overrides.split())
    start, _, end = says.partition("...")
    (line,) = (line for line in lines if line.startswith(start))
    assert end in line
    assert len(lines) == len(set(lines))


def test_one_sample_of_a_prompt_and_a_truncated_evaluation_are_good(
    read: Read,
) -> None:
    """Where nothing is compared; and demonstrations have no samples at all."""
    for name in ("remax", "ppo"):
        keys = [f"algorithm.name={name}", "rollout.samples_per_prompt=1", "rollout.temperature=0.7"]
        keys += ["evaluation.temperature=1.0", "evaluation.top_p=0.7"]
        assert read(*keys).prompts
    keys = ["algorithm.name=sft", "rollout.samples_per_prompt=1", "rollout.top_p=0.9"]
    assert read(*keys).prompts


def test_rewards_are_tried_on_the_data(told: Told, tmp_path: Path) -> None:
    """Of the training rows, and of those to be evaluated on."""
    (line,) = told(
        "reward.function=null", "reward.by_source.b.function=megarl.rollout.rewards.exact:score"
    )
    assert line.startswith("reward.by_source: ") and "(and 355 more such rows)" in line
    odd = write_rows(
        tmp_path / "odd.jsonl", [{"prompt": "1+2=", "answer": "3", "data_source": "b"}]
    )
    (line,) = told(
        f"data.eval.odd={odd}", "reward.by_source.b.function=megarl.rollout.rewards.exact:gone"
    )
    assert line.startswith(
        "reward.by_source.b.function: megarl.rollout.rewards.exact has no 'gone'"
    )


def test_a_missing_checkpoint_hides_no_other_error(told: Told) -> None:
    lines = told(
        "model.path=nowhere",
        "placement.gpus=6",
        "data.answer=solution",
        "reward.function=nowhere:f",
    )
    assert_each_is_told_once(
        lines,
        "placement.gpus: ",
        "nowhere/config.json: no such file",
        "data.train: ",
        "data.eval.arith: ",
        "reward.function: nowhere ",
    )
    assert len(lines) == 5


def test_a_checkpoint_that_does_not_fit_its_config(
    told: Told, tiny_model: Path, tmp_path: Path
) -> None:
    folder = copied(tiny_model, tmp_path / "model", "config.json", "moe_intermediate_size", 128)
    (line,) = told(f"model.path={folder}")
    assert "is [64, 64], config.json says [128, 64]" in line
    # every projection of every expert of every layer
    assert f"(and {4 * 8 * 3 - 1} more such tensors)" in line


def with_far_token(model: Path, folder: Path, *, end: bool = False) -> Path:
    """The checkpoint, its tokenizer with one token more than the vocabulary; end: which ends a response."""
    shutil.copytree(model, folder)
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["<far>"])
    if end:
        tokenizer.eos_token = "<far>"
    tokenizer.save_pretrained(folder)
    return folder


def test_special_tokens_that_the_model_does_not_have(
    told: Told, tiny_model: Path, tmp_path: Path
) -> None:
    (line,) = told(f"model.path={with_far_token(tiny_model, tmp_path / 'far', end=True)}")
    assert line == (
        "model.path: its tokenizer has the special token 102 ('<far>'), and the ids of the model's 102 tokens end at "
        "101; give model.path the tokenizer that its weights were trained with"
    )


@pytest.mark.parametrize("key", ["data.train", "data.eval.arith"])
def test_a_prompt_with_tokens_that_the_model_does_not_have(
    told: Told, tiny_model: Path, tmp_path: Path, key: str
) -> None:
    folder = with_far_token(tiny_model, tmp_path / "far")
    questions = ["1+2=", "<far>1+2=", "3<far>="]
    data = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": question, "answer": "3"} for question in questions]
    )
    (line,) = told(f"model.path={folder}", f"{key}={data}")
    assert line.startswith(f"{key}: {data}:2: the prompt has token ") and "('<far>')" in line
    assert "(and 1 more such row)" in line


def test_an_answer_with_tokens_that_the_model_does_not_have(
    read: Read, told: Told, tiny_model: Path, tmp_path: Path
) -> None:
    folder = with_far_token(tiny_model, tmp_path / "far")
    data = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1=", "answer": "<far>"}],
    )
    keys = [f"model.path={folder}", f"data.train={data}"]
    (line,) = told(*keys)
    assert line.startswith(f"data.train: {data}:2: the answer has token ") and "('<far>')" in line
    # then nobody learns from the answers
    read(*keys, "warm_start.steps=0")


def test_a_reward_models_tokenizer_that_is_anothers(
    told: Told, tiny_model: Path, tmp_path: Path
) -> None:
    checkpoints.write_classifier(tiny_model, tmp_path / "classifier")
    (line,) = told(f"reward_model.path={with_far_token(tmp_path / 'classifier', tmp_path / 'far')}")
    assert line.startswith("reward_model.path: it reads any text, and its tokenizer has token ")


@pytest.mark.parametrize(
    ("file", "key", "value", "says"),
    [
        (
            "config.json",
            "num_experts_per_tok",
            9,
            "num_experts_per_tok is 9, more than the experts (8);",
        ),
        ("config.json", "max_position_embeddings", -1, "max_position_embeddings is -1;"),
        (
            "config.json",
            "eos_token_id",
            400,
            "eos_token_id is 400, and the vocabulary has 102 tokens;",
        ),
        (
            "generation_config.json",
            "eos_token_id",
            [2, -1],
            "eos_token_id is [2, -1], and the vocabulary has 102",
        ),
    ],
)
def test_a_checkpoint_whose_own_files_cannot_be(
    told: Told,
    tiny_model: Path,
    tmp_path: Path,
    file: str,
    key: str,
    value: object,
    says: str,
) -> None:
    """Told once, and not once more by those who read the file after the first."""
    folder = copied(tiny_model, tmp_path / "model", file, key, value)
    (line,) = told(f"model.path={folder}")
    assert line.startswith(f"{folder / file}: {says}"), line


def copied(model: Path, folder: Path, file: str, key: str, value: object) -> Path:
    """The checkpoint with one key of one of its JSON files set otherwise; None: without it."""
    shutil.copytree(model, folder)
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {key: value}))
    return folder


def test_a_chat_template_without_bounds_is_told_once_of_all_files(
    told: Told, tiny_model: Path, tmp_path: Path
) -> None:
    folder = copied(tiny_model, tmp_path / "model", "generation_config.json", "eos_token_id", 2)
    (folder / "chat_template.jinja").write_text("{{ 'x' * 30000000000 }}")
    (line,) = told(f"model.path={folder}")
    assert line.startswith("model.path: the chat template takes more than 1024 MB for "), line


def test_losses_of_parts_that_the_model_does_not_have(told: Told, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "dense", "llama")
    keys = [f"train.{name}" for name in ("aux_loss", "z_loss", "router_bias_rate", "mtp_loss")]
    lines = told(
        f"model.path={folder}",
        "train.ep=1",
        "rollout.engine.tp=1",
        "train.replay=r3",
        *(f"{key}=0.1" for key in keys),
    )
    assert_each_is_told_once(lines, "train.replay: ", *(f"{key}: " for key in keys))


def test_an_fp8_cache_is_refused_where_latent_attention_does_not_take_it(
    told: Told, read: Read, tmp_path: Path
) -> None:
    folder = checkpoints.write(tmp_path / "latent", "deepseek-v3")
    cache = "rollout.engine.sglang.kv_cache_dtype"
    lines = told(
        f"model.path={folder}", f"{cache}=fp8_e4m3", "rollout.engine.sglang.attention_backend=fa3"
    )
    assert_each_is_told_once(lines, f"{cache}: 'fp8_e4m3', but fa3 copies")
    # the quickstart's attention has heads of its own
    read(f"{cache}=fp8_e4m3")


def test_a_reference_of_another_architecture(told: Told, tmp_path: Path) -> None:
    folder = checkpoints.write(tmp_path / "other", "llama")
    (line,) = told("reference.use=true", f"reference.path={folder}")
    assert line.startswith("reference.path: ") and "is another model than model.path" in line


def test_a_rule_that_is_repeated_is_no_error(read: Read) -> None:
    """The quickstart's own clip_low and kl_coefficient are those of rows that do not read them."""
    for name in ("rloo", "sft", "remax"):
        assert read(f"algorithm.name={name}").prompts


def test_what_nobody_asks_where_answers_are_learnt_from(told: Told) -> None:
    keys = [
        "reference.use=true",
        "train.replay=r3",
        "train.updates_per_step=200",
        "warm_start.steps=0",
    ]
    lines = told(*keys, "algorithm.name=sft")
    assert_each_is_told_once(
        lines,
        "reference.use: is set, and sft learns",
        "train.replay: is set, and sft learns",
        "train.updates_per_step: 200 is more than rollout.prompts_per_step = 128; set it to at most 128",
    )
    assert len(lines) == 3


def test_sampling_alone_does_not_ask_how_long_a_critic_warms_up(
    good: list[str], tmp_path: Path
) -> None:
    keys = [
        "algorithm.name=vapo",
        "algorithm.dynamic_sampling=false",
        "warm_start.steps=0",
        "run.steps=10",
    ]
    assert check_rollout(
        load_recipe(QUICKSTART, [*good, *keys]), tmp_path / "samples.parquet"
    ).prompts


def test_ranks_without_rows_need_no_number_of_data_parallel_ranks(
    good: list[str], told: Told, tmp_path: Path
) -> None:
    """A sample of 21 tokens on ranks of 8 needs four of them; there is one."""
    keys = ["train.cp=auto", "train.tokens_per_micro_batch=8", "placement.gpus=1", "train.pp=1"]
    keys += ["train.tp=1", "train.ep=1", "rollout.engine.count=1", "rollout.engine.tp=1"]
    keys += ["warm_start.steps=0"]
    (line, *_) = told(*keys)
    assert line.startswith("train.cp: auto splits the longest sample over 4 ranks")
    recipe = load_recipe(QUICKSTART, [*good, *keys])
    check_convert(recipe)
    assert check_rollout(recipe, tmp_path / "samples.parquet").prompts


def test_one_side_alone_samples_neither_in_phases_nor_ahead(
    good: list[str], tmp_path: Path
) -> None:
    recipe = load_recipe(
        QUICKSTART, [*good, "rollout.phase_tokens=2", "rollout.ahead=1", "warm_start.steps=0"]
    )
    with pytest.raises(UserErrors) as caught:
        check_rollout(recipe, tmp_path / "samples.parquet")
    assert [str(error).rpartition("; ")[2] for error in caught.value.errors] == [
        "set it to null",
        "set it to 0",
    ]


def test_answers_are_not_learnt_from_a_file_of_samples(good: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserErrors, match="sft learns from the data's answers, not from samples"):
        check_samples(
            load_recipe(QUICKSTART, [*good, "algorithm.name=sft"]), tmp_path / "none.parquet"
        )


def test_a_critic_that_does_not_fit(told: Told, tmp_path: Path) -> None:
    """By its own keys, beside everything else; an algorithm without a critic does not look at them."""
    folder = checkpoints.write(
        tmp_path / "other", "llama", num_attention_heads=2, num_key_value_heads=2
    )
    keys = ["critic.ranks.tp=4", "critic.ranks.tokens_per_micro_batch=8"]
    keys += ["critic.ranks.first_gpu=3", "critic.ranks.gpus=4", "critic.ranks.pp=1"]
    lines = told("algorithm.name=ppo", f"critic.path={folder}", *keys)
    assert_each_is_told_once(
        lines,
        "critic.ranks.gpus: its ranks are on the slots 3 to 6, placement.gpus is 4",
        "critic.ranks.tokens_per_micro_batch: 8 is less than",
        "critic.ranks.tp: 4 does not divide the attention heads (2); set critic.ranks.tp to 2",
        "critic.ranks.ep: ",
    )
    assert all(line.startswith("critic.") for line in lines), lines
    (line,) = told(
        "algorithm.name=ppo", f"critic.path={folder}", "critic.ranks.tp=1", "critic.ranks.ep=1"
    )
    assert line.startswith("critic.path: ") and "has a vocabulary of 47, the policy of" in line
    (line,) = told("algorithm.name=ppo", "critic.path=/nope")
    assert line.endswith("set critic.path to a Hugging Face checkpoint folder")
    (line,) = told(
        "algorithm.name=grpo", f"critic.path={folder}", *keys, "train.lr=1e-3", "model.path=nowhere"
    )[:1]
    assert "critic" not in line


def test_a_reward_model_that_is_none(told: Told, tiny_model: Path, tmp_path: Path) -> None:
    bare, many = (
        checkpoints.write(
            tmp_path / str(labels), "qwen3-moe", head="ForSequenceClassification", num_labels=labels
        )
        for labels in (1, 3)
    )
    for folder, says in (
        (tiny_model, "has no score.weight: it is a language model"),
        (bare, "has no usable tokenizer"),
        (many, "score.weight is [3, 128], config.json says [1, 128]"),
    ):
        (line,) = told(f"reward_model.path={folder}")
        assert says in line


def test_a_classifier_is_no_policy(told: Told, tiny_model: Path, tmp_path: Path) -> None:
    checkpoints.write_classifier(tiny_model, tmp_path / "classifier")
    (line,) = told(f"model.path={tmp_path / 'classifier'}")
    assert line.startswith(f"{tmp_path}/classifier/config.json: it is a classifier's")


def test_every_file_may_have_columns_of_its_own(read: Read, told: Told, tmp_path: Path) -> None:
    """A benchmark's file as it is published, beside the training file as it is."""
    rows: list[dict[str, object]] = [{"question": "1+2=", "meta": {"final": 3}}]
    bench = write_rows(tmp_path / "bench.jsonl", rows)
    keys = [f"data.eval.bench={{path: {bench}, prompt: question, answer: meta.final}}"]
    inputs = read(*keys)
    (prompt,) = inputs.eval_sets["bench"]
    assert (prompt.messages, prompt.answer) == ("1+2=", "3")
    prompt_line, answer_line = sorted(told(f"data.eval.bench={bench}"), reverse=True)
    assert (
        "no column 'prompt'; set data.prompt to one of meta, question, or for this file alone write"
        in prompt_line
    )
    assert f"write data.eval.bench as {{path: {bench}, answer: COLUMN}}" in answer_line
    (line,) = told(f"data.eval.bench={{path: {bench}, prompt: asked, answer: meta.final}}")
    assert line.endswith(
        "there is no column 'asked'; set prompt of data.eval.bench to one of meta, question"
    )
    (line,) = told(f"data.train=[{{path: {bench}, prompt: question, answer: meta.nothing}}]")
    assert line.endswith("there is no column 'nothing'; set answer of data.train to one of final")


def test_training_files_are_mixed_by_weight_or_read_as_one(
    read: Read, told: Told, tmp_path: Path
) -> None:
    few = write_rows(
        tmp_path / "few.jsonl", [{"ask": f"{n}+1=", "answer": n + 1} for n in range(10)]
    )
    many = write_rows(
        tmp_path / "many.jsonl", [{"prompt": f"{n}+2=", "answer": n + 2} for n in range(90)]
    )

    def drawn(*weights: str) -> list[bool]:
        """Of 100 prompts, which are of the first file."""
        few_weight, many_weight = (f", weight: {weight}" if weight else "" for weight in weights)
        key = (
            f"data.train=[{{path: {few}, prompt: ask{few_weight}}}, {{path: {many}{many_weight}}}]"
        )
        prompts = read(key).prompts.take(100)
        return ["ask" in prompt.row for prompt in prompts]

    assert sum(drawn("", "")) == 10, "every row of both once"
    assert abs(sum(drawn("3", "1")) - 75) <= 2
    key = f"data.train=[{{path: {few}, prompt: ask, weight: 2}}, {many}]"
    (line,) = told(key)
    assert line.startswith(
        "data.train: data.train.1 has no weight, and other files have; write a weight for every"
    )
    lines = told(f"data.train=[{few}, {{path: {tmp_path}/none.jsonl}}]")
    assert [line.split(": ")[0] for line in lines] == ["data.train.0", "data.train.1"]


def test_prompts_that_are_too_long_are_refused_or_dropped_and_counted(
    read: Read, told: Told, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "1" * length, "answer": "1"} for length in (3, 40, 4, 30, 5)
    ]
    path = write_rows(tmp_path / "long.jsonl", rows)
    keys = [f"data.train={path}", f"data.eval.arith={path}"]
    train, evaluation = told(*keys)
    assert train == (
        f"data.train: data.max_prompt_tokens (16) is exceeded by 2 of the 5 prompts of {path}, the longest is {path}:2"
        " with 43 tokens; raise data.max_prompt_tokens to 43 or less, and set data.overlong to drop to leave out longer"
        " prompts"
    )
    assert evaluation.startswith("data.eval.arith: ")
    inputs = read(*keys, "data.overlong=drop")
    assert sorted(len(prompt.token_ids) for prompt in inputs.prompts.take(3)) == [6, 7, 8]
    assert [prompt.id for prompt in inputs.eval_sets["arith"]] == [
        f"{path}:{line}" for line in (1, 3, 5)
    ]
    assert len(inputs.notes) == 2
    assert inputs.notes[0] == (
        f"data.train: 2 of the 5 prompts of {path} were dropped because they are longer than data.max_prompt_tokens;"
        " the longest has 43 tokens"
    )
    assert inputs.metrics == {
        "data/train/prompts": 3, "data/train/dropped": 2, "data/eval/arith/prompts": 3, "data/eval/arith/dropped": 2
    }  # fmt: skip
    only_long = write_rows(tmp_path / "only.jsonl", rows[1:2])
    (line,) = told(f"data.eval.arith={only_long}", "data.overlong=drop")
    assert "exceeded by 1 of the 1 prompts" in line and line.endswith(
        "raise data.max_prompt_tokens to 43"
    )


def test_drafts_on_a_cpu_and_what_does_not_go_with_them_are_told_at_once(
    told: Told, tmp_path: Path
) -> None:
    folder = checkpoints.write(tmp_path / "latent", "deepseek-v3", mtp_layers=1)
    backend = "rollout.engine.sglang.attention_backend"
    lines = told(
        f"model.path={folder}",
        "rollout.engine.draft=3",
        "rollout.seeded=true",
        f"{backend}=cutlass_mla",
    )
    assert_each_is_told_once(
        lines,
        "rollout.engine.draft: 3, but on CPU",
        "rollout.seeded: true, but SGLang",
        f"{backend}: cutlass_mla",
    )
    assert "rollout.engine.draft is 4; it should be less" in " ".join(
        told("rollout.engine.draft=4")
    )


# --- layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "rollout", "convert"])
def test_a_gpu_is_given_no_float32_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, good: list[str], kind: str
) -> None:
    """A process that takes itself for one with a GPU, and finds TransformerEngine or does not."""
    problem = ""
    monkeypatch.setattr("megarl.preflight.checks_by_command.DEVICE", "cuda")
    monkeypatch.setattr(
        "megarl.preflight.checks_by_command.transformer_engine_problem", lambda: problem
    )

    def errors(*keys: str) -> list[str]:
        case = _Case(kind, resolve(load_recipe(QUICKSTART, [*good, *keys])), device="cuda")  # type: ignore[arg-type]
        return [
            error.where
            for error in _errors(case)
            if error.where in ("model.dtype", "train.local_layers")
        ]

    expected = [] if kind == "rollout" else ["model.dtype"]
    assert errors("model.dtype=float32") == expected, "who only samples has no training rank"
    assert errors("model.dtype=bfloat16") == []
    problem = "undefined symbol"
    assert errors("model.dtype=bfloat16") == ([] if kind == "rollout" else ["train.local_layers"])
    assert errors("model.dtype=float32", "train.local_layers=true") == []


def test_a_dry_run_for_gpus_elsewhere_takes_their_packages_for_the_locks(good: list[str]) -> None:
    def errors(*keys: str) -> list[str]:
        roles = resolve(load_recipe(QUICKSTART, [*good, *keys]))
        return [error.where for error in errors_elsewhere(roles, "cuda", ())[0]]

    assert "model.dtype" in errors()
    assert "model.dtype" not in errors("train.local_layers=true") + errors("model.dtype=bfloat16")
