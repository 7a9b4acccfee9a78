"""What adapters are refused with, each by its key. Needs a config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.checkpoints import peft
from megarl.config.loading import load_recipe
from megarl.model.hf_config import model_shape
from megarl.model.lora_pairs import LoraSize
from megarl.placement.roles import resolve
from megarl.preflight import checks_by_command
from megarl.preflight.checks_by_command import Command
from megarl.preflight.lora_checks import cpu_errors, lora_errors, sharing_errors
from megarl.preflight.model_checks import stand_ins
from megarl.preflight.notes import recipe_notes
from tests.parallel import checkpoints

MODELS = Path(__file__).parents[2] / "recipes" / "models"
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("qwen3-moe", "deepseek-v3", "llama")
    return {
        name: checkpoints.write(tmp_path_factory.mktemp(name), name, num_hidden_layers=2)
        for name in families
    }


def told(path: Path, *overrides: str) -> list[str]:
    recipe = load_recipe(QUICKSTART, [f"model.path={path}", "lora.rank=8", *overrides])
    return [str(error) for error in lora_errors(resolve(recipe))]


def test_linear_attention_has_no_adapters() -> None:
    (line,) = told(MODELS / "qwen3-next-80b-a3b")
    assert line.startswith("lora: adapters of a model with linear attention are not supported")


def test_adapters_of_all_layers_or_some_are_good(paths: dict[str, Path]) -> None:
    for path in paths.values():
        assert told(path) == []
    assert told(paths["qwen3-moe"], "lora.experts=0", "lora.targets=[q_proj, down_proj]") == []
    assert (
        told(paths["deepseek-v3"], "lora.experts=0", "lora.targets=[kv_a_proj_with_mqa, down_proj]")
        == []
    )
    assert lora_errors(resolve(load_recipe(QUICKSTART, ["train.router_bias_rate=0.1"]))) == []


def test_experts_whose_layers_have_other_names_have_no_adapters(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path, "mixtral", num_hidden_layers=2)
    (error,) = told(path)
    assert "lora.experts: the experts of MixtralForCausalLM have no adapters" in error
    assert told(path, "lora.experts=0") == []


@pytest.mark.parametrize(
    ("family", "overrides", "says"),
    [
        (
            "deepseek-v3",
            "train.router_bias_rate=0.1",
            "train.router_bias_rate: 0.1, but with lora the routers stay",
        ),
        (
            "deepseek-v3",
            "train.mtp_loss=0.1",
            "train.mtp_loss: 0.1, but with lora the MTP layers stay",
        ),
        (
            "qwen3-moe",
            "train.optimizer_name=muon",
            "train.optimizer_name: muon, but the factors of adapters are no matrices of the model",
        ),
        (
            "qwen3-moe",
            "train.optimizer_offload=true",
            "train.optimizer_offload: True, but not tried with lora",
        ),
        (
            "qwen3-moe",
            "rollout.engine.weights=fp8",
            "rollout.engine.weights: fp8, but its tiles would round most",
        ),
        (
            "deepseek-v3",
            "train.megatron.moe_shared_expert_overlap=true",
            "train.megatron.moe_shared_expert_overlap",
        ),
        (
            "qwen3-moe",
            "lora.targets=[q_proj,kv_b_proj]",
            "lora.targets: the model has no layer kv_b_proj; choose",
        ),
        (
            "qwen3-moe",
            "lora.targets=[linear_qkv]",
            "lora.targets: the model has no layer linear_qkv; choose",
        ),
        (
            "deepseek-v3",
            "lora.targets=[k_proj]",
            "lora.targets: the model has no layer k_proj; choose from o_proj",
        ),
        ("llama", "lora.experts=2", "lora.experts: the model has no experts"),
        (
            "qwen3-moe",
            "lora.experts=0 lora.targets=[up_proj]",
            "lora.experts: 0, and lora.targets has no other",
        ),
    ],
    ids=lambda value: None if ": " in value else value,
)
def test_what_is_refused(paths: dict[str, Path], family: str, overrides: str, says: str) -> None:
    (line,) = told(paths[family], *overrides.split())
    assert line.startswith(says), line


EXPERTS = "lora.targets=[] lora.experts=8"
SLOT_KEYS = ("lora.sync=adapters", "lora.experts=0", "lora.targets=[q_proj, o_proj]")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("rollout.engine.weights=fp8", ""),
        ("rollout.engine.tp=4 rollout.engine.dp=4", ""),
        (EXPERTS, ""),
        (
            "rollout.engine.draft=1",
            "rollout.engine.draft: 1, but drafts were not tried with SGLang's adapters",
        ),
        (
            "rollout.engine.tp=4 rollout.engine.dp=2",
            "rollout.engine.dp: 2, but SGLang's adapters need the atten",
        ),
        (
            "rollout.seeded=true",
            "rollout.seeded: True, but SGLang's adapters depend on the batch; set it to false",
        ),
        (
            "rollout.engine.sglang.enable_two_batch_overlap=true",
            "rollout.engine.sglang.enable_two_batch",
        ),
        (
            "lora.rounding=stochastic",
            "lora.rounding: stochastic, but nothing is merged; leave it out",
        ),
        (
            f"{EXPERTS} rollout.engine.weights=fp8",
            "rollout.engine.weights: fp8, but SGLang would compute experts",
        ),
        (
            f"{EXPERTS} rollout.engine.experts=deepep",
            "rollout.engine.experts: deepep, but SGLang's adapters of",
        ),
        (
            f"{EXPERTS} rollout.engine.sglang.moe_runner_backend=cutlass",
            "rollout.engine.sglang.moe_runner_backend: cutlass, but of experts only Triton's layout of adapters",
        ),
    ],
    ids=lambda value: None if ": " in value else value,
)
def test_what_engines_with_adapters_of_their_own_are_refused_with(
    paths: dict[str, Path], overrides: str, says: str
) -> None:
    lines = told(paths["qwen3-moe"], *SLOT_KEYS, *overrides.split())
    assert len(lines) == bool(says)
    assert all(line.startswith(says) for line in lines), lines


def test_what_engines_have_adapters_for_on_cpu(paths: dict[str, Path]) -> None:
    def errors(family: str, *overrides: str) -> list[str]:
        keys = [f"model.path={paths[family]}", *SLOT_KEYS, *overrides]
        return [
            str(error).partition(";")[0]
            for error in cpu_errors(resolve(load_recipe(QUICKSTART, keys)))
        ]

    assert errors("qwen3-moe") == errors("llama", "lora.targets=[]") == []
    assert errors("qwen3-moe", "lora.sync=merged", "lora.targets=[]") == []
    experts = "lora.sync: adapters, but SGLang on CPU has no adapters for layers with experts"
    assert errors("qwen3-moe", "lora.targets=[]", "lora.experts=8") == [experts]
    latent = "lora.sync: adapters, but SGLang on CPU has no adapters for kv_b_proj"
    assert errors("deepseek-v3", "lora.targets=[]") == [experts, latent]
    assert errors("deepseek-v3", "lora.targets=[q_b_proj, o_proj]") == []
    (line,) = errors("qwen3-moe", "rollout.engine.tp=2", "rollout.engine.dp=2")
    assert line == "rollout.engine.dp: 2, but SGLang on CPU has no adapters with DP attention"


def test_layers_of_latent_attention_that_have_no_slots(tmp_path: Path) -> None:
    path = checkpoints.write(
        tmp_path / "plain", "deepseek-v3", num_hidden_layers=2, q_lora_rank=None
    )
    checkpoints.write(tmp_path / "compressed", "deepseek-v3", num_hidden_layers=2)
    lines = told(path, *SLOT_KEYS, "lora.targets=[q_proj, kv_a_proj_with_mqa, o_proj]")
    names = [line.partition(";")[0] for line in lines]
    fp8 = told(
        path.parent / "compressed",
        *SLOT_KEYS,
        "lora.targets=[kv_b_proj]",
        "rollout.engine.weights=fp8",
    )
    assert [line.partition(";")[0] for line in fp8] == [
        "lora.targets: SGLang's adapters hide the scales of kv_b_proj in fp8"
    ]
    assert names == [
        f"lora.targets: SGLang has no adapters for {name}"
        for name in ("kv_a_proj_with_mqa", "q_proj")
    ]


def test_adapters_to_begin_with_are_checked_where_they_are_read(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path, size = paths["qwen3-moe"], LoraSize(4, 4, 32.0, ("q_proj",))
    extents = peft._sizes(model_shape(path), size)
    peft.write(
        {name: torch.zeros(extent) for name, extent in extents.items()},
        model_shape(path),
        size,
        str(path),
        tmp_path / "a",
    )

    def errors(
        *overrides: str, command: Command = "train", absent: tuple[str, ...] = ()
    ) -> list[str]:
        keys = [
            f"model.path={path}",
            "lora.targets=[q_proj]",
            f"lora.path={tmp_path / 'a'}",
            *overrides,
        ]
        roles = resolve(load_recipe(QUICKSTART, keys))
        case = checks_by_command._Case(command, roles, "cpu", absent)
        return [
            str(error)
            for error in (
                checks_by_command._only_sampling
                if command == "rollout"
                else checks_by_command._lora
            )(case)
        ]

    assert errors("lora.rank=4") == []
    (line,) = errors("lora.rank=8")
    assert line.startswith(
        f"lora.rank: 8, and {tmp_path / 'a'}/adapter_config.json has r 4; set it to 4"
    )
    assert errors("lora.rank=8", absent=("lora.path",)) == []
    line = errors("lora.rank=4", command="rollout")[-1]
    assert line.startswith(
        f"lora.path: {tmp_path / 'a'}, but samples are made with the weights of model.path"
    )
    gone = load_recipe(QUICKSTART, [f"model.path={path}", "lora.path=gone"])
    assert stand_ins(gone)[1]["lora.path"] == "gone: adapters"


def test_a_low_learning_rate_is_a_note() -> None:
    keys = ["lora.rank=8", "warm_start.steps=0"]
    (line,) = recipe_notes(load_recipe(QUICKSTART, [*keys, "train.lr=1e-6"]))
    assert line.startswith(
        "train.lr is 1e-06: adapters (lora) learn best at about 10 times the rate"
    )
    assert recipe_notes(load_recipe(QUICKSTART, [*keys, "train.lr=1e-5"])) == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "lora=null critic.shares_weights=true",
            "critic.shares_weights: set, but without lora the policy's",
        ),
        (
            "lora=null reward_model.adapters=judge",
            "reward_model.adapters: set, but without lora the policy's",
        ),
        (
            "critic.shares_weights=true critic.path=models/other",
            "critic.path: set, and critic.shares_weights",
        ),
        (
            "critic.shares_weights=true model.dtype=bfloat16",
            "lora.sync: merged, but then 16-bit weights of the",
        ),
        (
            "critic.shares_weights=true critic.ranks.pp=1",
            "critic.ranks: other slots or sizes than the policy's",
        ),
        (
            "reward_model.adapters=judge reward_model.ranks.first_gpu=1",
            "reward_model.ranks: other slots or sizes",
        ),
        (
            "critic.shares_weights=true algorithm.name=prime",
            "critic.shares_weights: true, but an implicit reward",
        ),
    ],
    ids=lambda value: None if ": " in value else value,
)
def test_what_cannot_share_the_policys_weights(
    paths: dict[str, Path], overrides: str, says: str
) -> None:
    start = [f"model.path={paths['qwen3-moe']}", "lora.rank=8", "algorithm.name=ppo"]
    (error,) = sharing_errors(resolve(load_recipe(QUICKSTART, [*start, *overrides.split()])))
    assert str(error).startswith(says), error


def test_ppo_on_the_same_ranks_shares_the_policys_weights(paths: dict[str, Path]) -> None:
    start = [f"model.path={paths['qwen3-moe']}", "lora.rank=8", "algorithm.name=ppo"]
    in_weights = [*start, "critic.shares_weights=true", "reward_model.adapters=judge"]
    in_slots = [*in_weights, "model.dtype=bfloat16", "lora.sync=adapters"]
    for keys in (in_weights, in_slots):
        assert sharing_errors(resolve(load_recipe(QUICKSTART, keys))) == []


@pytest.mark.parametrize(
    "keys",
    [
        ["reward_model.adapters=judge", "reward_model.ranks.cp=1"],
        ["critic.shares_weights=true", "critic.ranks.tokens_per_micro_batch=32"],
    ],
)
def test_rows_by_length_do_not_keep_ranks_from_the_policys_weights(
    paths: dict[str, Path], keys: list[str]
) -> None:
    """A critic may split its rows over other numbers of ranks than the policy, a reward model splits none."""
    start = [f"model.path={paths['qwen3-moe']}", "lora.rank=8", "algorithm.name=ppo"]
    auto = ["train.pp=1", "train.cp=auto", "train.tokens_per_micro_batch=8"]
    roles = resolve(load_recipe(QUICKSTART, [*start, *auto, *keys]))
    assert len({role.layout.max_cp for role in roles.models.values()}) == 2
    assert sharing_errors(roles) == []
