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
    command.ends_well(300)
    return command.steps()


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
    """With ReMax, whose greedy samples come from the same engine.

    Unverified on a GPU.

    resharding/engine_model.py: MoE kernels that keep experts in another order, fused shared experts and replicated
    queries are refused by SGLang's own flags. To check first: each GPU backend of SGLang 0.5.21, with a byte
    comparison after a reshard.

    resharding/sglang_map.py: the parameters of a running engine on a GPU: names, shapes and types are held against
    SGLang's own classes on the meta device (`tests/resharding/test_real_engines.py`), in a process that takes
    itself for one with H100s. To check first: `verify_params` in a real engine, once for bfloat16 and once for fp8;
    then a byte comparison.

    rollout/sglang/arguments.py moe_runner_backend: Triton for an engine's experts in bfloat16, which is SGLang's
    own choice on Hopper and not on Blackwell. To check first: on Blackwell a reshard goes through (the test, run
    there); the tokens a second against flashinfer_cutlass, if its layout is mapped one day.

    rollout/sglang/arguments.py disable_prefill_cuda_graph: SGLang's graphs of prompts, off by default because the
    plan has no memory for them; with them on it counts the reserve that SGLang makes. To check first: `nvidia-smi`
    after the start with and without `rollout.engine.sglang.cuda_graph_backend_prefill: breakable`, and the seconds
    of a step that reads long prompts.

    scripts/quickstart.sh on GPUs: one, two, four or eight slots in bfloat16; the keys were checked by preflight,
    and no GPU has run them. To check first: `bash scripts/quickstart.sh` on one GPU learns as on the CPU.

    rollout/sglang/scheduler.py SGLANG_NUMA_BIND_V2: off: the scheduler binds itself to its GPU's NUMA node by
    libnuma. To check first: by hand, on a machine of two sockets, `taskset -p` of each scheduler; no
    /tmp/sglang_temp_file_* is left.

    cluster/processes.py remove_counters: torch's reference counters of shared GPU memory, removed on the command's
    node when a run ends; those on other nodes stay until they start anew. To check first: /dev/shm after a run.

    rollout/sglang/scheduler.py _reserve_memory: `communicator_bytes` of each engine GPU held until SGLang has sized
    its cache: the exchange's communicator, of which the schedulers are members, is made after it. To check first:
    by hand, what is free after the start is that much more than without; the first `resume_cache` after a reshard
    succeeds at the default fraction.
    """
    steps = steps_of(launch, tmp_path, f"rollout.seeded={seeded}", "algorithm.name=remax")
    check(steps, 0.05 if ON_GPU else 1e-4)
    assert {record["rollout/samples"] for record in steps} == {64}, (
        "a greedy sample to compare with is none of them"
    )
    if ON_GPU:
        assert all(0 < record["speed/train_mfu"] < 1 for record in steps)


# By day test_families.py of SGLang's engines has the engine, and test_hf_export.py the files.
@(pytest.mark.slow if ON_GPU else pytest.mark.nightly)
def test_a_run_beside_a_vision_tower(launch: Callable, tmp_path: Path) -> None:
    """Unverified on a GPU.

    resharding/engine_model.py language_model: the tower that SGLang builds beside Kimi-K2.5's text. To check first:
    that the engine starts with `language_model_only`, that no rank has more of the tower than the plan counts, and
    that the tower's memory is released with that of the weights.
    """
    changes = LATENT if ON_GPU else {}
    steps = steps_of(launch, tmp_path, "train.replay=r3", family="kimi-k25", **changes)
    check(steps, 0.05 if ON_GPU else 1e-4)


@pytest.mark.skipif(not ON_GPU, reason="engines with fp8 weights run on a GPU")
def test_a_run_with_fp8_weights(launch: Callable, tmp_path: Path) -> None:
    """Unverified on a GPU.

    rollout/sglang/weight_loader.py load: fp8 parameters that SGLang binds anew after a session; mapping a restarted
    trainer's handles. To check first: memory before and after ten exchanges.
    """
    check(steps_of(launch, tmp_path, "rollout.engine.weights=fp8", **TILES), 0.2)


@pytest.mark.skipif(not ON_GPU, reason="on CPU test_fp8_numbers.py has both sides in fp8")
def test_a_run_that_computes_in_fp8_on_both_sides(launch: Callable, tmp_path: Path) -> None:
    """Unverified on a GPU.

    parallel/fp8_layers.py use_engine_numbers, engine_fields: TransformerEngine's blockwise recipe with scales that are
    powers of two, layers of its own that stay plain, experts whose outputs are weighed after the second product, rows
    padded to 16 tokens, or 128 with TP. Read of TransformerEngine 2.14 and 2.15, not run. To check first: the
    difference of log-probabilities beside that of `train.numbers: plain`; the codes of a layer's weight against
    `megarl.fp8.codes.quantise`; `train.fp8_backward` with TransformerEngine 2.15 or later.

    rollout/sglang/fp8_scales.py round_scales_up: SGLang's quantisers of activations with scales that are powers of two,
    copied into the layout of its products; with DeepEP in decoding its own kernel's, and the Triton kernel behind the
    experts' first product. To check first: codes and scales of each against `megarl.fp8.codes.quantise_groups` for
    groups above 4.5e-8; tokens a second with and without.
    """
    changes = ("rollout.engine.weights=fp8", "train.numbers=engine", "train.fp8_backward=fp8")
    check(steps_of(launch, tmp_path, *changes, **TILES), 0.05)


@pytest.mark.skipif(not ON_GPU, reason="fp8 caches run on a GPU")
def test_a_run_with_fp8_weights_and_cache(launch: Callable, tmp_path: Path) -> None:
    """Unverified on a GPU.

    plan/candidates.py FP8_CACHE: keys and values of grouped-query attention in fp8, without scales. To check
    first: the logprob gap of Qwen3-30B with and without it, and the tokens a second: by plan 1.8 times as many.
    """
    cache = "rollout.engine.sglang={kv_cache_dtype: fp8_e4m3}"
    check(steps_of(launch, tmp_path, "rollout.engine.weights=fp8", cache, **TILES), 0.2)


@pytest.mark.skipif(not ON_GPU, reason="fp8 caches of latent attention run on a GPU")
@pytest.mark.parametrize(("backend", "capability"), [("flashmla", 9), ("trtllm_mla", 10)])
def test_a_run_of_latent_attention_with_an_fp8_cache(
    launch: Callable, tmp_path: Path, backend: str, capability: int
) -> None:
    """By the backend of each generation of GPUs: Hopper's and Blackwell's.

    Unverified on a GPU.

    resharding/engine_model.py write_constants: `k_scale` and `v_scale` of fp8 engines: that the made-up weights
    leave 1 (computed from the generator's algorithm, not seen on a GPU), and that the memory saver takes these
    parameters with the weights. To check first: `k_scale_float` of every attention layer before and after the first
    reshard.

    rollout/sglang/arguments.py LATENT_FP8_BACKENDS: an fp8 KV cache of latent attention; the backends were chosen
    by reading SGLang's source. To check first: the logprob gap and the tokens a second of DeepSeek-V3 with
    `kv_cache_dtype` fp8_e4m3 and flashmla (Hopper), trtllm_mla (Blackwell): one run of the test on each.
    """
    actual = torch.cuda.get_device_capability()[0]
    if actual != capability:
        pytest.skip(
            f"{backend} is for GPUs of compute capability {capability}, and this one has {actual}"
        )
    cache = f"rollout.engine.sglang={{kv_cache_dtype: fp8_e4m3, attention_backend: {backend}}}"
    check(steps_of(launch, tmp_path, cache, family="deepseek-v3", **LATENT), 0.2)


# as wide as the published models' heads
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3.5-moe": {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "minimax-m2": {"head_dim": 128},
    "glm-5": {
        **LATENT,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
    },
}


@pytest.mark.skipif(not ON_GPU, reason="SGLang's kernels of these families run on a GPU")
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_run_of_attention_of_other_kinds(launch: Callable, tmp_path: Path, family: str) -> None:
    """Unverified on a GPU.

    resharding/sglang_map.py: the parameters of SGLang's gated and linear attention and of its norms over all heads,
    where its own kernels run in place of our stand-ins for CPU (cpu/sglang_delta_net.py). To check first: the byte
    comparison after the first reshard, then the logprob gap, with prompts of unequal lengths.

    model/families/deepseek_v32.py sparse_attention: SGLang's indexer with its own kernels and wk_weights_proj (GLM-5).
    To check first: the same comparison; then the gap with prompts of more than index_topk tokens.
    """
    check(steps_of(launch, tmp_path, family=family, **OF_FAMILIES[family]), 0.05)


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
    """In bfloat16 the trainer computes with the rounded sums as well: the gap is that of a run without adapters.

    Unverified on a GPU.

    training/merged_weights.py: with adapters in bfloat16, after each update W is copied from pinned host memory
    into the weights that engines map, and the deltas are added tile by tile. To check first: the logprob gap of a
    run with `lora` beside one without; the seconds of `MergedWeights.write` on Kimi-K2's part of a GPU, of which
    `megarl plan` counts the copy.
    """
    steps = steps_of(launch, tmp_path, "lora.rank=8", "train.lr=1e-3")
    check(steps, 0.05)
    assert all(record["train/grad_norm"] > 0 for record in steps)


SLOT_KEYS = {  # family, keys of the recipe, and what changes of the tiny model
    "all layers": ("qwen3-moe", ["lora.experts=4"], {}),
    "all layers of latent attention": ("deepseek-v3", ["lora.experts=8"], LATENT),
    "attention over fp8 weights": (
        "qwen3-moe", ["lora.targets=[q_proj, k_proj, v_proj, o_proj]", "rollout.engine.weights=fp8"], TILES
    ),
}  # fmt: skip


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU test_lora.py has SGLang's own adapters of the attention"
)
@pytest.mark.parametrize("kind", SLOT_KEYS)
def test_a_run_with_adapters_in_sglangs_slots(launch: Callable, tmp_path: Path, kind: str) -> None:
    """The frozen weights come back from the host each time that training has had the GPU, and have to be the same.

    Unverified on a GPU.

    rollout/sglang/adapter_slot.py, resharding/lora_slots.py: `lora.sync: adapters`: SGLang's loader fills the slots
    as the map does (`tests/resharding/test_real_engines.py`), and a CPU engine samples with adapters of the
    attention; its Triton kernels of experts, of `kv_b_proj` and under DP attention were read. To check first: the
    logprob gap; that slots are not among the memory which is released, and that the weights which come back from
    the host are the same.
    """
    family, keys, changes = SLOT_KEYS[kind]
    lora = ["lora.rank=8", "lora.sync=adapters", "train.lr=1e-3", *keys]
    steps = steps_of(launch, tmp_path, *lora, family=family, **changes)
    check(steps, 0.2 if "fp8" in kind else 0.05)
    assert all(record["train/grad_norm"] > 0 for record in steps)


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU test_lora.py has a critic and a reward model with shared weights"
)
def test_a_run_whose_critic_has_the_policys_weights(launch: Callable, tmp_path: Path) -> None:
    """They stay where they are while the critic's own adapters and head are moved to the host and back.

    Unverified on a GPU.

    parallel/shared_weights.py: a critic's and a reward model's ranks map the policy's frozen weights by CUDA IPC
    handles of their own and drop theirs; on CPU they are held against one rank and PEFT
    (`tests/training/test_shared_weights.py`). To check first: the memory of the critic's phase is that of its
    adapters; TransformerEngine keeps no copy of a weight that was bound anew.
    """
    lora = ("lora.rank=8", "lora.sync=adapters", "lora.experts=4", "train.lr=1e-3")
    steps = steps_of(launch, tmp_path, *lora, "algorithm.name=ppo", "critic.shares_weights=true")
    check(steps, 0.05)
    assert all(record["critic/grad_norm"] > 0 for record in steps)
    assert steps[-1]["critic/value_mean"] != 0.0


@pytest.mark.skipif(
    not ON_GPU, reason="on the CPU test_ending.py and test_real_episodes.py play episodes"
)
def test_a_run_of_episodes(launch: Callable, quickstart_tools_inputs: Sequence[str]) -> None:
    """The quickstart's model of tools, in 16 bits; the gap of later turns is that of the first.

    Unverified on a GPU.

    rollout/sglang/engine.py turn: turns of an episode as requests named `conversation/number`, whose prefix is in
    the cache of its attention group, with `routed_experts_start_len`; on CPU real engines do the same
    (`tests/episodes/test_real_episodes.py`). To check first: the logprob gap by turn, and the tokens that a turn
    reads anew.
    """
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
