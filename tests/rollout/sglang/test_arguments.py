"""SGLang's own arguments: unknown and reserved names are the user's fault, told without importing SGLang."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.device import DEVICE
from megarl.model.quantisation import QUANTISATION_KEYS
from megarl.rollout.sglang.adapter_slot import AdapterSlot
from megarl.rollout.sglang.arguments import (
    LATENT_FP8_BACKENDS,
    REFUSED,
    EngineSettings,
    latent_cache_errors,
    server_arguments,
    server_fields,
    sglang_errors,
)
from megarl.rollout.sglang.batch_sizes import group_arguments

SETTINGS = EngineSettings(
    "model", 2, 1, "float32", 7, 128, 64, sglang={"page_size": 16, "max_running_requests": 8}
)

COPIED = re.compile(r"get_key_buffer\([^)]*\)\.to\(\s*q\.dtype")

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="sglang is not installed"
)


def test_the_recipe_wins_over_our_defaults() -> None:
    arguments = server_arguments(SETTINGS, "a.loader")
    assert arguments["page_size"] == 16
    assert arguments["max_running_requests"] == 8
    assert arguments["tp_size"] == 2
    assert arguments["random_seed"] == 7


def test_the_arguments_of_another_device_than_this_ones() -> None:
    gpu, cpu = (
        server_arguments(replace(SETTINGS, seeded=True), "a.loader", device)
        for device in ("cuda", "cpu")
    )
    assert (
        gpu["enable_memory_saver"] and gpu["enable_deterministic_inference"] and "device" not in gpu
    )
    assert cpu["device"] == "cpu" and not {
        "enable_memory_saver",
        "enable_deterministic_inference",
    } & set(cpu)


def test_the_context_is_what_a_run_needs_of_what_the_model_has() -> None:
    def context(model_context: int | None) -> Any:
        return server_arguments(replace(SETTINGS, model_context=model_context), "a.loader").get(
            "context_length"
        )

    assert [context(None), context(130), context(40_960)] == [None, 130, 136]


@pytest.mark.parametrize("seeded", [False, True])
def test_an_engine_of_one_sequence_continues_it_up_to_its_last_token(seeded: bool) -> None:
    """SGLang's tp_worker takes inputs shorter than what all tokens' room, less one, has after five more."""
    one = server_arguments(replace(SETTINGS, concurrency=1, seeded=seeded), "a.loader", "cpu")
    assert SETTINGS.context_tokens - 1 < one["max_total_tokens"] - 1 - 5


def test_an_idle_engine_leaves_the_cores_to_the_optimizer() -> None:
    for device in ("cuda", "cpu"):
        assert server_arguments(SETTINGS, "a.loader", device)["sleep_on_idle"]
    mine = replace(SETTINGS, sglang={"sleep_on_idle": False})
    assert not server_arguments(mine, "a.loader", "cuda")["sleep_on_idle"]


def test_experts_lie_where_the_map_has_them_on_every_gpu() -> None:
    """SGLang's own choice on Blackwell lays them out in another way; for fp8 tiles it keeps its choice."""

    def backend(device: str = "cuda", **changes: Any) -> Any:
        return server_arguments(replace(SETTINGS, **changes), "a.loader", device).get(
            "moe_runner_backend"
        )

    assert (backend(), backend(fp8=True), backend("cpu")) == ("triton", None, None)
    assert backend(sglang={"moe_runner_backend": "deep_gemm"}) == "deep_gemm"


def test_graphs_of_prompts_are_off_unless_the_recipe_turns_them_on() -> None:
    """On GPUs SGLang makes them by default, in memory that the plan does not have."""
    name = "disable_prefill_cuda_graph"
    assert server_arguments(SETTINGS, "a.loader", "cuda")[name] is True
    assert name not in server_arguments(SETTINGS, "a.loader", "cpu")
    mine = replace(SETTINGS, sglang={name: False})
    assert server_arguments(mine, "a.loader", "cuda")[name] is False


@needs_sglang
def test_a_backend_of_graphs_of_prompts_wins_over_the_switch() -> None:
    """So that a recipe needs one key for them; by SGLang's own reading of its arguments."""
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    source = (Path(spec.origin).parent / "srt" / "arg_groups" / "cuda_graph_hook.py").read_text()
    off = source.index(
        'if cfg.disable_prefill_cuda_graph:\n        _set(Phase.PREFILL, "backend", Backend.DISABLED)'
    )
    named = '_set(Phase.PREFILL, "backend", cfg.cuda_graph_backend_prefill)'
    assert off < source.index(named), "what is set later holds"
    defaults = (
        Path(spec.origin).parent / "srt" / "model_executor" / "cuda_graph_config.py"
    ).read_text()
    assert "return Backend.BREAKABLE if is_cuda() else" in defaults, (
        "otherwise there is nothing to turn off"
    )


def test_an_engines_layout_is_said_to_sglang() -> None:
    names = ("enable_dp_lm_head", "moe_dense_tp_size", "moe_a2a_backend", "moe_runner_backend")
    whole = replace(
        SETTINGS, dp=2, whole_dense=True, whole_shared=True, group_head=True, deepep=True
    )
    for settings, values in (
        (SETTINGS, (False, None, "none", "triton")),
        (whole, (True, 1, "deepep", "deep_gemm")),
    ):
        arguments = server_arguments(settings, "a.loader", "cuda")
        assert tuple(arguments[name] for name in names) == values


def test_sizes_grow_with_the_attention_groups_and_the_recipe_may_set_them() -> None:
    share = {"mem_fraction_static": 0.85}

    def sizes(
        tp: int, dp: int, concurrency: int, *, deepep: bool = False, draft: int = 0
    ) -> list[int]:
        found = group_arguments(
            tp, dp, deepep=deepep, draft=draft, concurrency=concurrency, given=share
        )
        return list(found.values())

    assert sizes(8, 1, 3072) == []
    assert group_arguments(64, 32, deepep=False, draft=0, concurrency=3072, given={}) == {}, (
        "SGLang sets all three"
    )
    bounded = group_arguments(64, 32, deepep=True, draft=0, concurrency=99_999, given={})
    assert bounded == {"cuda_graph_max_bs_decode": 256}, "two GPUs a group, 128 tokens each"
    assert sizes(8, 2, 4) == [8] and sizes(100, 2, 100) == [200], "a multiple of the group's ranks"
    assert sizes(64, 32, 3072) == [112, 16384]
    assert sizes(64, 32, 3072, deepep=True) == [112, 65536]
    assert sizes(8, 8, 99_999) == [512, 16384]
    assert sizes(8, 8, 99_999, deepep=True) == [128, 16384], "no more tokens than DeepEP sends"
    with_drafts = [sizes(8, 8, 99_999, deepep=True, draft=draft)[0] for draft in (1, 2, 3)]
    assert with_drafts == [64, 42, 32], "each sequence sends its drafts too"
    assert sizes(8, 8, 99_999, draft=3) == sizes(8, 8, 99_999)
    many = replace(SETTINGS, tp=8, dp=8, concurrency=99_999, sglang={})
    limits = [
        server_arguments(replace(many, deepep=at), "a.loader", "cuda")["max_running_requests"]
        for at in (0, 1)
    ]
    assert limits == [99_999, 1024]
    drafting = server_arguments(replace(many, deepep=True, draft=2), "a.loader", "cuda")
    assert drafting["max_running_requests"] == 8 * (128 // 3)
    own = replace(SETTINGS, dp=8, sglang={**share, "chunked_prefill_size": 77})
    assert server_arguments(own, "a.loader", "cuda")["chunked_prefill_size"] == 77
    unlimited = replace(own, sglang={"max_running_requests": None})
    assert (
        server_arguments(unlimited, "a.loader", "cuda")["max_running_requests"]
        == SETTINGS.concurrency
    )
    assert "cuda_graph_max_bs_decode" not in server_arguments(
        replace(own, sglang={}), "a.loader", "cpu"
    )


def test_drafts_are_a_chain_that_is_verified_without_loss() -> None:
    plain, drafting = (
        server_arguments(replace(SETTINGS, draft=draft), "a.loader", "cuda") for draft in (0, 2)
    )
    assert drafting | plain == drafting
    assert {name: drafting[name] for name in drafting.keys() - plain.keys()} == {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
    }


@needs_sglang
def test_triton_is_what_sglang_chooses_on_hopper_itself() -> None:
    """In its source: unquantised experts go to Triton where no other backend is named."""
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    source = (
        Path(spec.origin).parent / "srt" / "layers" / "quantization" / "unquant.py"
    ).read_text()
    runner = source.partition("def create_moe_runner(")[2].partition(
        "self.runner = MoeRunner(backend"
    )[0]
    assert runner.rstrip().endswith("else:\n            backend = MoeRunnerBackend.TRITON")
    assert "is_auto" not in runner


@needs_sglang
@pytest.mark.parametrize("key", ["enable_nccl_nvls", "enable_symm_mem"])
def test_nccl_is_not_set_up_in_engines_alone(key: str) -> None:
    (error,) = sglang_errors({key: True})
    assert "NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE of the environment" in error.problem


@needs_sglang
def test_all_our_arguments_are_sglangs() -> None:
    assert (
        set(server_arguments(replace(SETTINGS, seeded=True, draft=1), "a.loader"))
        <= server_fields()
    )


@needs_sglang
def test_unknown_and_reserved_arguments_are_named() -> None:
    errors = sglang_errors(
        {"page_sise": 16, "tp_size": 4, "device": "cuda", "page_size": 16, "qqq": 1}
    )
    assert [str(error) for error in errors] == [
        "rollout.engine.sglang.page_sise: SGLang has no such server argument; did you mean page_size?",
        "rollout.engine.sglang.tp_size: is set by megarl itself; set rollout.engine.tp and remove it",
        "rollout.engine.sglang.device: is set by megarl itself; remove it",
        "rollout.engine.sglang.qqq: SGLang has no such server argument; see SGLang's ServerArgs for the names it has",
    ]


@needs_sglang
def test_what_resharding_cannot_follow_is_refused_with_the_reason() -> None:
    keys = [
        "speculative_num_steps",
        "enable_eplb",
        "ep_num_redundant_experts",
        "moe_dp_size",
        "quantization",
    ]
    errors = [str(error) for error in sglang_errors(dict.fromkeys(keys, 1))]
    assert errors[0].endswith(
        "speculative_num_steps: is set by megarl itself; set rollout.engine.draft and remove it"
    )
    assert "moves experts between ranks" in errors[1]
    assert "holds some experts twice" in errors[2]
    assert "which ranks hold the experts" in errors[3]
    assert errors[4].endswith(
        "quantization: is set by megarl itself; set rollout.engine.fp8 and remove it"
    )


TAKEN = [
    {},
    {"kv_cache_dtype": "auto"},
    {"kv_cache_dtype": "bfloat16", "attention_backend": "fa3"},
    {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashmla"},
    {
        "kv_cache_dtype": "fp8_e4m3",
        "prefill_attention_backend": "triton",
        "decode_attention_backend": "trtllm_mla",
    },
]
NOT_TAKEN = [
    ({"kv_cache_dtype": "fp8_e4m3"}, "'fp8_e4m3', but no attention backend is named"),
    (
        {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "fa3"},
        "'fp8_e4m3', but fa3 copies a layer's whole cache",
    ),
    (
        {
            "kv_cache_dtype": "fp8_e4m3",
            "attention_backend": "flashmla",
            "decode_attention_backend": "flashinfer",
        },
        "'fp8_e4m3', but flashinfer copies",
    ),
    (
        {"kv_cache_dtype": "fp8_e4m3", "decode_attention_backend": "flashmla"},
        "no attention backend is named",
    ),
    (
        {"kv_cache_dtype": "fp8_e5m2", "attention_backend": "flashmla"},
        "does not take a cache in 'fp8_e5m2'",
    ),
]


@pytest.mark.parametrize("arguments", TAKEN, ids=str)
def test_a_cache_that_latent_attention_takes(arguments: dict[str, Any]) -> None:
    assert latent_cache_errors(arguments) == []


@pytest.mark.parametrize(("arguments", "says"), NOT_TAKEN, ids=str)
def test_a_cache_that_latent_attention_does_not_take(arguments: dict[str, Any], says: str) -> None:
    (error,) = latent_cache_errors(arguments)
    assert error.where == "rollout.engine.sglang.kv_cache_dtype"
    assert says in error.problem
    assert "remove it" in error.hint


@needs_sglang
def test_the_backends_are_sglangs_and_those_left_out_copy_the_cache() -> None:
    """In SGLang's source: a backend that copies the cache has `get_key_buffer(...).to(q.dtype)` where it decodes."""
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    folder = Path(spec.origin).parent / "srt" / "layers" / "attention"
    registered = (folder / "attention_registry.py").read_text()
    for name in LATENT_FP8_BACKENDS:
        assert f'@register_attention_backend("{name}")' in registered
        assert not COPIED.search((folder / f"{name}_backend.py").read_text()), name
    for name in ("flashattention", "flashinfer_mla"):  # fa3, fa4; flashinfer
        assert COPIED.search((folder / f"{name}_backend.py").read_text()), name


@needs_sglang
def test_every_refused_name_is_one_that_sglang_has() -> None:
    """Else SGLang has renamed it, and the refusal would be silent."""
    assert [
        start for start in REFUSED if not any(name.startswith(start) for name in server_fields())
    ] == []


def test_attention_groups_and_quantised_weights() -> None:
    plain = server_arguments(SETTINGS, "a.loader")
    assert (
        plain["dp_size"],
        plain["enable_dp_attention"],
        plain["disable_shared_experts_fusion"],
    ) == (1, False, True)
    made = server_arguments(replace(SETTINGS, dp=2, fp8=True), "a.loader")
    assert (made["dp_size"], made["enable_dp_attention"]) == (2, True)
    quantised = json.loads(made["json_model_override_args"])["quantization_config"]
    assert (quantised["quant_method"], quantised["weight_block_size"]) == ("fp8", [128, 128])
    assert "json_model_override_args" not in plain


def test_an_engine_that_gets_trained_weights_is_not_told_of_the_checkpoints_format() -> None:
    """Else SGLang would build fp8 layers for a model that is trained in bfloat16, whose folder is fp8."""
    published = replace(SETTINGS, quantised=True)
    assert "json_model_override_args" not in server_arguments(published, "a.loader"), (
        "it reads the folder itself"
    )
    trained = server_arguments(replace(published, load_weights=False), "a.loader")
    assert json.loads(trained["json_model_override_args"]) == dict.fromkeys(QUANTISATION_KEYS)
    ours = server_arguments(replace(published, load_weights=False, fp8=True), "a.loader")
    assert (
        json.loads(ours["json_model_override_args"])["quantization_config"]["quant_method"] == "fp8"
    )


def test_seeded_samples_depend_on_no_other_setting() -> None:
    mine = replace(
        SETTINGS, seeded=True, sglang={"disable_radix_cache": False, "chunked_prefill_size": 8}
    )
    arguments = server_arguments(mine, "a.loader")
    if DEVICE == "cpu":
        assert arguments["disable_radix_cache"]
        assert arguments["chunked_prefill_size"] == arguments["max_total_tokens"] == 136 * 64, (
            "room for all, whole"
        )
    else:
        assert arguments["enable_deterministic_inference"]


def test_experts_are_told_where_they_are_asked_for() -> None:
    assert not server_arguments(SETTINGS, "a.loader")["enable_return_routed_experts"]
    assert server_arguments(replace(SETTINGS, routed_experts=True), "a.loader")[
        "enable_return_routed_experts"
    ]


@needs_sglang
@pytest.mark.slow
def test_the_names_read_from_the_source_are_those_of_the_class() -> None:
    from megarl.rollout.sglang.server import ServerArgs

    arguments: Any = ServerArgs
    assert server_fields() == set(arguments.__struct_fields__)


def test_an_adapter_has_the_same_name_and_path_on_every_node() -> None:
    """SGLang derives its number from these; nothing of the adapter is a file."""
    settings = replace(SETTINGS, adapter=AdapterSlot(8, ("o_proj", "qkv_proj")))
    own = {device: server_arguments(settings, "loader", device) for device in ("cpu", "cuda")}
    assert own["cuda"]["lora_paths"] == [
        {"lora_name": "policy", "lora_path": "policy", "pinned": True}
    ]
    assert (own["cuda"]["max_lora_rank"], own["cuda"]["lora_target_modules"]) == (
        8,
        ["o_proj", "qkv_proj"],
    )
    assert (own["cpu"]["lora_backend"], own["cuda"]["lora_backend"]) == ("torch_native", "triton")
    assert own["cuda"]["enable_weights_cpu_backup"] and not own["cpu"]["enable_weights_cpu_backup"]
    assert not [key for key in server_arguments(SETTINGS, "loader", "cuda") if "lora" in key]


@needs_sglang
@pytest.mark.parametrize(
    "key", ["enable_lora", "enable_lora_overlap_loading", "lora_paths", "max_loaded_loras"]
)
def test_adapters_are_not_set_by_sglangs_arguments(key: str) -> None:
    assert [error.where for error in sglang_errors({key: 1})] == [f"rollout.engine.sglang.{key}"]
