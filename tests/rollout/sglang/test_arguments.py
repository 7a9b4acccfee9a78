"""SGLang's own arguments: unknown and reserved names are the user's fault, told without importing SGLang."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import EngineConfig
from megarl.device import DEVICE
from megarl.model.precision import FP8_TILES
from megarl.model.quantisation import FP8_CONFIG, KEY, QUANTISATION_KEYS
from megarl.placement.engine_layout import EngineLayout
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

SETTINGS = EngineSettings("model", EngineLayout(1, 2, 1), "float32", 7, 128, 64)
COPIED = re.compile(r"get_key_buffer\([^)]*\)\.to\(\s*q\.dtype")


def arguments(
    device: str = DEVICE,
    sglang: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The server arguments of SETTINGS with changes; sglang: the recipe's own."""
    settings = replace(
        SETTINGS,
        layout=replace(SETTINGS.layout, **(layout or {})),
        engine=EngineConfig(sglang=dict(sglang or {})),
        **changes,
    )
    return server_arguments(settings, "a.loader", device)


DEFAULTS = {
    "cuda": {
        "tp_size": 2,
        "random_seed": 7,
        "max_running_requests": 64,
        "dp_size": 1,
        "enable_dp_attention": False,
        "disable_shared_experts_fusion": True,
        "enable_memory_saver": True,
        "sleep_on_idle": True,
        "disable_prefill_cuda_graph": True,
        "moe_runner_backend": "triton",
        "enable_return_routed_experts": False,
        "device": None,
        "json_model_override_args": None,
        "context_length": None,
    },
    "cpu": {
        "device": "cpu",
        "sleep_on_idle": True,
        "enable_memory_saver": None,
        "disable_prefill_cuda_graph": None,
        "moe_runner_backend": None,
        "cuda_graph_max_bs_decode": None,
    },
}


@pytest.mark.parametrize("device", DEFAULTS)
def test_the_defaults_of_a_device(device: str) -> None:
    """On GPUs the experts lie where the map has them, and there are no graphs of prompts, which the plan lacks."""
    server_args = arguments(device)
    assert {key: server_args.get(key) for key in DEFAULTS[device]} == DEFAULTS[device]


@pytest.mark.parametrize(
    "given",
    [
        {"page_size": 16, "max_running_requests": 8},
        {"sleep_on_idle": False},
        {"moe_runner_backend": "deep_gemm"},
        {"disable_prefill_cuda_graph": False},
    ],
    ids=str,
)
def test_the_recipe_wins_over_our_defaults(given: dict[str, Any]) -> None:
    server_args = arguments("cuda", given)
    assert {key: server_args[key] for key in given} == given


def test_the_context_is_what_a_run_needs_of_what_the_model_has() -> None:
    lengths = [arguments(model_context=most)["context_length"] for most in (130, 40_960)]
    assert lengths == [130, 136]


@pytest.mark.parametrize("seeded", [False, True])
def test_an_engine_of_one_sequence_continues_it_up_to_its_last_token(seeded: bool) -> None:
    """SGLang's tp_worker takes inputs shorter than what all tokens' room, less one, has after five more."""
    server_args = arguments("cpu", concurrency=1, seeded=seeded)
    assert SETTINGS.context_tokens - 1 < server_args["max_total_tokens"] - 1 - 5


def sglang_source(*path: str) -> str:
    """A file of SGLang, whose facts only a new release can change."""
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    return Path(spec.origin).parent.joinpath("srt", *path).read_text()


def test_a_backend_of_graphs_of_prompts_wins_over_the_switch() -> None:
    """So that a recipe needs one key for them; by SGLang's own reading of its arguments."""
    source = sglang_source("arg_groups", "cuda_graph_hook.py")
    off = source.index(
        'if cfg.disable_prefill_cuda_graph:\n        _set(Phase.PREFILL, "backend", Backend.DISABLED)'
    )
    named = '_set(Phase.PREFILL, "backend", cfg.cuda_graph_backend_prefill)'
    assert off < source.index(named), "what is set later holds"
    defaults = sglang_source("model_executor", "cuda_graph_config.py")
    assert "return Backend.BREAKABLE if is_cuda() else" in defaults, (
        "otherwise there is nothing to turn off"
    )


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        ({"dp": 2}, (2, True, False, None, "none", "triton")),
        (
            {"precision": FP8_TILES},
            (1, False, False, None, "none", None),
        ),  # SGLang chooses for fp8 tiles
        (
            {"dp": 2, "whole_dense": True, "group_head": True, "deepep": True},
            (2, True, True, 1, "deepep", "deep_gemm"),
        ),
    ],
)
def test_the_layout_reaches_sglang(layout: dict[str, Any], values: tuple[Any, ...]) -> None:
    server_args = arguments("cuda", layout=layout)
    names = (
        "dp_size",
        "enable_dp_attention",
        "enable_dp_lm_head",
        "moe_dense_tp_size",
        "moe_a2a_backend",
        "moe_runner_backend",
    )
    assert tuple(server_args.get(name) for name in names) == values


SHARE = {"mem_fraction_static": 0.85}


@pytest.mark.parametrize(
    ("tp", "dp", "concurrency", "given", "more", "sizes"),
    [
        (8, 1, 3072, SHARE, {}, []),
        (64, 32, 3072, {}, {}, []),  # SGLang sets all three
        (64, 32, 99_999, {}, {"deepep": True}, [256]),  # two GPUs a group, 128 tokens each
        (8, 2, 4, SHARE, {}, [8]),
        (100, 2, 100, SHARE, {}, [200]),  # a multiple of the group's ranks
        (64, 32, 3072, SHARE, {}, [112, 16384]),
        (64, 32, 3072, SHARE, {"deepep": True}, [112, 65536]),
        (8, 8, 99_999, SHARE, {}, [512, 16384]),
        (8, 8, 99_999, SHARE, {"draft": 3}, [512, 16384]),
        (8, 8, 99_999, SHARE, {"deepep": True}, [128, 16384]),  # no more tokens than DeepEP sends
        (8, 8, 99_999, SHARE, {"deepep": True, "draft": 1}, [64, 16384]),  # with their drafts
        (8, 8, 99_999, SHARE, {"deepep": True, "draft": 2}, [42, 16384]),
    ],
)
def test_sizes_grow_with_the_attention_groups(
    tp: int,
    dp: int,
    concurrency: int,
    given: dict[str, Any],
    more: dict[str, Any],
    sizes: list[int],
) -> None:
    layout = EngineLayout(1, tp, 1, dp, **more)
    assert list(group_arguments(layout, concurrency, given).values()) == sizes


@pytest.mark.parametrize(
    ("more", "limit"),
    [({}, 99_999), ({"deepep": True}, 8 * 128), ({"deepep": True, "draft": 2}, 8 * (128 // 3))],
)
def test_deepep_bounds_the_running_requests(more: dict[str, Any], limit: int) -> None:
    layout = {"tp": 8, "dp": 8, **more}
    for engine_keys in ({}, {"max_running_requests": None}):
        server_args = arguments("cuda", engine_keys, layout, concurrency=99_999)
        assert server_args["max_running_requests"] == limit


def test_the_recipe_may_set_the_sizes_of_groups() -> None:
    server_args = arguments("cuda", {**SHARE, "chunked_prefill_size": 77}, {"dp": 8})
    assert server_args["chunked_prefill_size"] == 77


def test_drafts_are_a_chain_that_is_verified_without_loss() -> None:
    plain = arguments("cuda")
    drafting = arguments("cuda", layout={"draft": 2})
    assert drafting == plain | {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
    }


def test_triton_is_what_sglang_chooses_on_hopper_itself() -> None:
    """In its source: unquantised experts go to Triton where no other backend is named."""
    source = sglang_source("layers", "quantization", "unquant.py")
    runner = source.partition("def create_moe_runner(")[2].partition(
        "self.runner = MoeRunner(backend"
    )[0]
    assert runner.rstrip().endswith("else:\n            backend = MoeRunnerBackend.TRITON")
    assert "is_auto" not in runner


def test_all_our_arguments_are_sglangs() -> None:
    assert set(arguments(seeded=True, layout={"draft": 1})) <= server_fields()


NO_SUCH = "SGLang has no such server argument"
OF_MEGARL = "is set by megarl itself"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("page_sise", f"{NO_SUCH}; did you mean page_size?"),
        ("qqq", f"{NO_SUCH}; see SGLang's ServerArgs for the names it has"),
        ("tp_size", f"{OF_MEGARL}; set rollout.engine.tp and remove it"),
        ("speculative_num_steps", f"{OF_MEGARL}; set rollout.engine.draft and remove it"),
        ("quantization", f"{OF_MEGARL}; set rollout.engine.weights and remove it"),
        ("enable_lora", f"{OF_MEGARL}; set lora.sync and remove it"),
        ("device", f"{OF_MEGARL}; remove it"),
        ("enable_eplb", "moves experts between ranks"),
        ("ep_num_redundant_experts", "holds some experts twice"),
        ("moe_dp_size", "which ranks hold the experts"),
        ("enable_nccl_nvls", "NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE of the environment"),
        ("enable_symm_mem", "NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE of the environment"),
        ("enable_lora_overlap_loading", "other places than resharding writes to"),
        ("lora_paths", "other places than resharding writes to"),
        ("max_loaded_loras", "other places than resharding writes to"),
    ],
)
def test_arguments_that_a_recipe_cannot_set_are_named(key: str, message: str) -> None:
    (error,) = sglang_errors({"page_size": 16, key: 1})
    assert error.where == f"rollout.engine.sglang.{key}"
    assert message in str(error)


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


def test_the_backends_are_sglangs_and_those_left_out_copy_the_cache() -> None:
    """In SGLang's source: a backend that copies the cache has `get_key_buffer(...).to(q.dtype)` where it decodes."""
    folder = ("layers", "attention")
    registered = sglang_source(*folder, "attention_registry.py")
    for name in LATENT_FP8_BACKENDS:
        assert f'@register_attention_backend("{name}")' in registered
        assert not COPIED.search(sglang_source(*folder, f"{name}_backend.py")), name
    for name in ("flashattention", "flashinfer_mla"):  # fa3, fa4; flashinfer
        assert COPIED.search(sglang_source(*folder, f"{name}_backend.py")), name


def test_every_refused_name_is_one_that_sglang_has() -> None:
    """Else SGLang has renamed it, and the refusal would be silent."""
    assert [
        start for start in REFUSED if not any(name.startswith(start) for name in server_fields())
    ] == []


FP8 = {key: FP8_CONFIG if key == KEY else None for key in QUANTISATION_KEYS}


@pytest.mark.parametrize(
    ("changes", "override"),
    [
        ({"layout": {"precision": FP8_TILES}}, FP8),
        ({"quantised": True}, None),  # it reads the folder itself
        ({"quantised": True, "load_weights": False}, dict.fromkeys(QUANTISATION_KEYS)),
        ({"quantised": True, "load_weights": False, "layout": {"precision": FP8_TILES}}, FP8),
        # beside values that the recipe replaces
        ({"layout": {"precision": FP8_TILES}, "config_values": {"a": 1}}, {"a": 1, **FP8}),
        ({"config_values": {"a": 1}}, {"a": 1}),
    ],
)
def test_an_engine_that_gets_trained_weights_is_not_told_of_the_checkpoints_format(
    changes: dict[str, Any], override: dict[str, Any] | None
) -> None:
    """Else SGLang would build fp8 layers for a model that is trained in bfloat16, whose folder is fp8."""
    assert json.loads(arguments(**changes).get("json_model_override_args", "null")) == override


def test_seeded_samples_depend_on_no_other_setting() -> None:
    engine_keys = {"disable_radix_cache": False, "chunked_prefill_size": 8}
    cpu = arguments("cpu", engine_keys, seeded=True)
    assert cpu["disable_radix_cache"] and "enable_deterministic_inference" not in cpu
    room_for_all = 136 * 64
    assert cpu["chunked_prefill_size"] == cpu["max_total_tokens"] == room_for_all
    assert cpu["max_mamba_cache_size"] == 3 * 64, (
        "linear attention must not take half of the machine"
    )
    assert arguments("cuda", engine_keys, seeded=True)["enable_deterministic_inference"]


def test_experts_are_told_where_they_are_asked_for() -> None:
    assert arguments(routed_experts=True)["enable_return_routed_experts"]


@pytest.mark.slow
def test_the_names_read_from_the_source_are_those_of_the_class() -> None:
    from megarl.rollout.sglang.server import ServerArgs

    struct: Any = ServerArgs
    assert server_fields() == set(struct.__struct_fields__)


def test_an_adapter_has_the_same_name_and_path_on_every_node() -> None:
    """SGLang derives its number from these; nothing of the adapter is a file."""
    adapter = AdapterSlot(8, ("o_proj", "qkv_proj"))
    cuda = arguments("cuda", adapter=adapter)
    assert {key: cuda[key] for key in cuda.keys() - arguments("cuda").keys()} == {
        "enable_lora": True,
        "max_lora_rank": 8,
        "lora_target_modules": ["o_proj", "qkv_proj"],
        "lora_paths": [{"lora_name": "policy", "lora_path": "policy", "pinned": True}],
        "max_loras_per_batch": 2,
        "experts_shared_outer_loras": False,
        "lora_backend": "triton",
        "enable_weights_cpu_backup": True,
    }
    cpu = arguments("cpu", adapter=adapter)
    assert (cpu["lora_backend"], cpu["enable_weights_cpu_backup"]) == ("torch_native", False)
