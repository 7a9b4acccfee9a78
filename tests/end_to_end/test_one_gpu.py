"""A whole run on one slot, trainer and engine on the same GPU: real reshards, the logprob gap, memory given and taken.

Without a GPU it is the quickstart's model in float32, with one it is bfloat16 and what only a GPU's kernels can do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.device import DEVICE
from tests.parallel import checkpoints
from tests.tiny_engines import write_tokenizer

pytestmark = pytest.mark.slow

ON_GPU = DEVICE == "cuda"
TOOLS_RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart_tools.yaml"
ONE_SLOT = (
    "train.tp=1", "train.pp=1", "train.ep=1", "rollout.engine.tp=1", "placement.gpus=1", "run.steps=3",
    "warm_start.steps=10", "rollout.prompts_per_step=8", "evaluation.max_prompts=16", "reshard.verify=full",
    "train.updates_per_step=1",
)  # fmt: skip
# whole fp8 tiles
TILES: dict[str, Any] = {"head_dim": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
LATENT: dict[str, Any] = {  # as wide as the kernels of latent attention want it
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 128,
    "num_attention_heads": 16, "num_key_value_heads": 16,
}  # fmt: skip


def steps_of(
    launch: Callable, tmp_path: Path, *keys: str, family: str = "qwen3-moe", **changes: Any
) -> list[dict[str, Any]]:
    """The records of the steps of a run with more keys; changes: to the family's tiny model."""
    folder = tmp_path / "model"
    write_tokenizer(folder)
    checkpoints.write(folder, family, **changes)
    dtype = "bfloat16" if ON_GPU else "float32"
    command = launch(*ONE_SLOT, f"model.path={folder}", f"model.dtype={dtype}", *keys)
    assert command.finish(300) == 0, command.err
    assert command.leftovers() == []
    return [record for record in command.records() if record["step"] > 0]


def check(steps: list[dict[str, Any]], diff: float) -> None:
    """gap: how far the engine's logprobs may be from the trainer's, on average.

    Every reshard was verified byte by byte: a run whose weights differ has ended with an error.
    """
    assert len(steps) == 3
    assert max(record["rollout/logprob_diff_mean"] for record in steps) < diff
    assert [record["reshard/version"] for record in steps] == sorted(
        {record["reshard/version"] for record in steps}
    )


# By day on CPU the quickstart is the run without seeds, test_resume.py one with seeds, test_ending.py one of ReMax.
@(pytest.mark.slow if ON_GPU else pytest.mark.nightly)
@pytest.mark.parametrize("seeded", ["false", "true"])
def test_a_run_on_one_slot(launch: Callable, tmp_path: Path, seeded: str) -> None:
    """With ReMax, whose greedy samples come from the same engine."""
    steps = steps_of(launch, tmp_path, f"rollout.seeded={seeded}", "algorithm.name=remax")
    check(steps, 0.05 if ON_GPU else 1e-4)
    assert {record["rollout/samples"] for record in steps} == {64}, (
        "a greedy sample to compare with is none of them"
    )
    if ON_GPU:
        assert all(0 < record["speed/train_mfu"] < 1 for record in steps)


@pytest.mark.skipif(not ON_GPU, reason="engines with fp8 weights run on a GPU")
def test_a_run_with_fp8_weights(launch: Callable, tmp_path: Path) -> None:
    check(steps_of(launch, tmp_path, "rollout.engine.fp8=true", **TILES), 0.2)


@pytest.mark.skipif(not ON_GPU, reason="fp8 caches of latent attention run on a GPU")
@pytest.mark.parametrize(("backend", "capability"), [("flashmla", 9), ("trtllm_mla", 10)])
def test_a_run_of_latent_attention_with_an_fp8_cache(
    launch: Callable, tmp_path: Path, backend: str, capability: int
) -> None:
    """By the backend of each generation of GPUs: Hopper's and Blackwell's."""
    found = torch.cuda.get_device_capability()[0]
    if found != capability:
        pytest.skip(
            f"{backend} is for GPUs of compute capability {capability}, and this one has {found}"
        )
    cache = f"rollout.engine.sglang={{kv_cache_dtype: fp8_e4m3, attention_backend: {backend}}}"
    check(steps_of(launch, tmp_path, cache, family="deepseek-v3", **LATENT), 0.2)


@pytest.mark.skipif(not ON_GPU, reason="SGLang's draft models run on a GPU")
@pytest.mark.parametrize("mtp_loss", [0.0, 0.1])
def test_a_run_with_drafts(launch: Callable, tmp_path: Path, mtp_loss: float) -> None:
    """The draft model gets the policy's weights in every reshard, where its layer is frozen too."""
    keys = "rollout.engine.draft=1", f"train.mtp_loss={mtp_loss}"
    steps = steps_of(launch, tmp_path, *keys, family="deepseek-v3", mtp_layers=1, **LATENT)
    check(steps, 0.05)
    assert all(1 <= record["rollout/accepted"] <= 2 for record in steps)


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU test_merged_weights.py holds the sums to the bit"
)
def test_a_run_with_merged_adapters(launch: Callable, tmp_path: Path) -> None:
    """In bfloat16 the trainer computes with the rounded sums as well: the gap is that of a run without adapters."""
    steps = steps_of(launch, tmp_path, "lora.rank=8", "train.lr=1e-3")
    check(steps, 0.05)
    assert all(record["train/grad_norm"] > 0 for record in steps)


SLOT_KEYS = {  # family, keys of the recipe, and what changes of the tiny model
    "all layers": ("qwen3-moe", ["lora.experts=4"], {}),
    "all layers of latent attention": ("deepseek-v3", ["lora.experts=8"], LATENT),
    "attention over fp8 weights": (
        "qwen3-moe", ["lora.targets=[q_proj, k_proj, v_proj, o_proj]", "rollout.engine.fp8=true"], TILES
    ),
}  # fmt: skip


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU test_lora.py has SGLang's own adapters of the attention"
)
@pytest.mark.parametrize("kind", SLOT_KEYS)
def test_a_run_with_adapters_in_sglangs_slots(launch: Callable, tmp_path: Path, kind: str) -> None:
    """The frozen weights come back from the host each time that training has had the GPU, and have to be the same."""
    family, keys, changes = SLOT_KEYS[kind]
    lora = ["lora.rank=8", "lora.sync=adapters", "train.lr=1e-3", *keys]
    steps = steps_of(launch, tmp_path, *lora, family=family, **changes)
    check(steps, 0.2 if "fp8" in kind else 0.05)
    assert all(record["train/grad_norm"] > 0 for record in steps)


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU test_lora.py has a critic and a reward model with shared weights"
)
def test_a_run_whose_critic_has_the_policys_weights(launch: Callable, tmp_path: Path) -> None:
    """They stay where they are while the critic's own adapters and head are moved to the host and back."""
    lora = ("lora.rank=8", "lora.sync=adapters", "lora.experts=4", "train.lr=1e-3")
    steps = steps_of(launch, tmp_path, *lora, "algorithm.name=ppo", "critic.shares_weights=true")
    check(steps, 0.05)
    assert all(record["critic/grad_norm"] > 0 for record in steps)
    assert steps[-1]["critic/value_mean"] != 0.0


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU test_tools.py and test_real_episodes.py play episodes"
)
def test_a_run_of_episodes(launch: Callable, quickstart_tools_inputs: Sequence[str]) -> None:
    """The quickstart's model of tools, in 16 bits; the gap of later turns is that of the first."""
    keys = (
        "run.name=quickstart",
        "run.trackers=[]",
        "run.steps=2",
        "warm_start.steps=70",
        "model.dtype=bfloat16",
    )
    one_slot = [
        key for key in ONE_SLOT if key.startswith(("train.", "placement.", "rollout.engine."))
    ]
    command = launch(*quickstart_tools_inputs, *keys, *one_slot, recipe=TOOLS_RECIPE)
    assert command.finish(300) == 0, command.err
    for record in command.records()[-2:]:
        assert (
            record["rollout/logprob_diff_turn_1"] < 0.05
            and record["rollout/logprob_diff_turn_2"] < 0.05
        )
