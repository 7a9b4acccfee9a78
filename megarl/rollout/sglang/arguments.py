"""An engine's settings, and SGLang's server arguments: those that megarl sets and those that the recipe passes on."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config import EngineConfig
from megarl.cpu import sglang_patches
from megarl.device import DEVICE, Address
from megarl.model.precision import fp8_config
from megarl.model.quantisation import KEY, QUANTISATION_KEYS
from megarl.placement.engine_layout import EngineLayout
from megarl.rollout.sglang import adapter_slot, deterministic
from megarl.rollout.sglang.adapter_slot import AdapterSlot
from megarl.rollout.sglang.batch_sizes import group_arguments, running_limit
from megarl.spelling import did_you_mean, near
from megarl.types import UNKNOWN_ENGINE, UserError
from megarl.types.json_objects import JsonObject
from megarl.types.listed import ErrorIterator, listed

WHERE = "rollout.engine.sglang"
_SET_BY_MEGARL = {  # server argument -> the recipe key that sets it
    "model_path": "model.path",
    "tp_size": "rollout.engine.tp",
    "ep_size": "rollout.engine.ep",
    "dp_size": "rollout.engine.dp",
    "enable_dp_attention": "rollout.engine.dp",
    "dtype": "model.dtype",
    "quantization": "rollout.engine.weights",
    "moe_dense_tp_size": "rollout.engine.dense",
    "enable_dp_lm_head": "rollout.engine.head",
    "moe_a2a_backend": "rollout.engine.experts",
    "ep_dispatch_algorithm": "rollout.engine.place_experts",
    "speculative_": "rollout.engine.draft",  # and all others that begin so
    "enable_multi_layer_eagle": "rollout.engine.draft",
    "random_seed": "run.seed",
    "enable_deterministic_inference": "rollout.seeded",
    "enable_return_routed_experts": "train.replay",
    "enable_lora": "lora.sync",
}
_NOT_IN_RECIPES = (
    "device",
    "base_gpu_id",
    "pp_size",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "enable_memory_saver",
    "log_level",
    "load_format",
    "weight_version",
    "custom_weight_loader",
    "skip_tokenizer_init",
    "trust_remote_code",
    "disable_shared_experts_fusion",
    "enable_weights_cpu_backup",
)
# the reason why resharding does not support a server argument -> prefixes of such arguments
_REFUSED_FOR = {
    "it moves experts between ranks while the engine runs": ("enable_eplb", "elastic_ep_backend"),
    "it holds some experts twice": ("ep_num_redundant_experts",),
    "it assigns the experts to ranks in another order": ("init_expert_location",),
    "it keeps weights in other places than resharding writes to": (
        "enable_elastic_expert_backup",
        "enable_lora_",
        "lora_",
        "max_lora",
        "max_loaded_lora",
        "experts_shared_outer",
        "cpu_offload_gb",
        "offload_group_size",
        "weight_cache_mode",
        "kt_",
    ),
    "it changes the number of ranks": ("ep_join_mode",),
    "it fuses the shared experts with the routed ones": (
        "enable_waterfill",
        "enforce_shared_experts_fusion",
    ),
    "it changes which ranks hold the experts": ("moe_dp_size", "dwdp_size"),
    "it changes which ranks hold the attention": ("attn_cp_size", "dcp_"),
    "it sets up NCCL in engines alone; NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE of the environment hold for all": (
        "enable_nccl_nvls",
        "enable_symm_mem",
    ),
    "the engine's model would no longer be the one that is trained": ("json_model_override_args",),
}
REFUSED = {prefix: reason for reason, prefixes in _REFUSED_FOR.items() for prefix in prefixes}
# Attention backends that read the keys of MLA from an fp8 cache (SGLang's layers/attention). The others, among them
# SGLang's default on Hopper, cast a layer's whole cache to the model's data type in every step (`.to(q.dtype)`).
LATENT_FP8_BACKENDS = ("cutedsl_mla", "dsa", "flashmla", "tokenspeed_mla", "triton", "trtllm_mla")
# SGLang keeps two positions of the context free after a response, and six after a prompt
_SPARE_CONTEXT = 8
_PLAIN_CACHES = ("auto", "bf16", "bfloat16")


@dataclass(frozen=True)
class Endpoint:
    """The CURVE key of the relay on an engine's first node; only that node has the secret half."""

    public: bytes
    secret: bytes = field(default=b"", repr=False)

    @property
    def without_secret(self) -> Endpoint:
        return Endpoint(self.public)


@dataclass(frozen=True)
class NodeSpan:
    """Node `node` of the `nodes` that an engine spans, with equally many ranks on each.

    rendezvous: the store through which the ranks of all nodes find each other. endpoint: the key of the relay.
    """

    nodes: int
    node: int
    rendezvous: Address
    endpoint: Endpoint


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine. context_tokens: of the longest prompt with its response; concurrency: running samples.

    layout: its ranks, and what each of them holds. With fp8 load_weights must be False: a bf16 checkpoint cannot fill
    the tiles. engine: the recipe's branch, for all that is no layout.

    first_gpu: the GPU slot of the first tensor-parallel rank. load_weights: read the checkpoint; otherwise the weights
    are random and the engine refuses to sample before its first reshard. quantised: config.json says that the
    checkpoint's weights are; an engine that does not load them has those of training, in dtype or fp8.

    span: the engine's node that this process runs on, where the engine spans several.

    seeded: equal weights and an equal stream give bitwise equal samples; slower. routed_experts: samples carry the
    experts that each token was routed to.

    timeout_s: how long a scheduler may hang. reserve_bytes: memory of each GPU that SGLang's KV cache leaves free for
    the communicator of the exchange. model_context: the model's number of positions; None: unknown, so that SGLang
    sizes its tables by the longest context that it finds. adapter: the slot of the adapter that every request uses.
    number: of the engine in its run, which samples carry. config_values: values in place of those of config.json.
    plain_modules: of an fp8 engine, those that the recipe keeps plain.
    """

    model_path: str
    layout: EngineLayout
    dtype: str
    seed: int
    context_tokens: int
    concurrency: int
    engine: EngineConfig = field(default_factory=EngineConfig)
    first_gpu: int = 0
    load_weights: bool = True
    quantised: bool = False
    seeded: bool = False
    routed_experts: bool = False
    span: NodeSpan | None = None
    timeout_s: float = 600.0
    model_context: int | None = None
    reserve_bytes: int = 0
    adapter: AdapterSlot | None = None
    number: int = UNKNOWN_ENGINE
    config_values: JsonObject = field(default_factory=dict)
    plain_modules: tuple[str, ...] = ()

    @property
    def first_rank(self) -> int:
        """The first tensor-parallel rank on this node."""
        if self.span:
            return self.span.node * self.layout.tp // self.span.nodes
        return 0


def server_arguments(
    settings: EngineSettings, weight_loader: str, device: str = DEVICE
) -> dict[str, Any]:
    """Keyword arguments of SGLang's `ServerArgs`; the recipe's `rollout.engine.sglang` overrides our defaults."""
    layout = settings.layout
    limit = running_limit(layout, settings.concurrency)
    # SGLang takes no input that fills its whole KV cache either.
    room = (settings.context_tokens + _SPARE_CONTEXT) * settings.concurrency
    arguments: dict[str, Any] = {
        "model_path": settings.model_path,
        "tp_size": layout.tp,
        "ep_size": layout.ep,
        "dtype": settings.dtype,
        "random_seed": settings.seed,
        "max_running_requests": limit,
        "weight_version": "0" if settings.load_weights else "-1",
        "load_format": "auto" if settings.load_weights else "dummy",
        "custom_weight_loader": [weight_loader],
        "skip_tokenizer_init": True,
        "log_level": "error",
        "trust_remote_code": False,
        "dp_size": layout.dp,
        "enable_dp_attention": layout.dp > 1,
        "enable_dp_lm_head": layout.group_head,
        "moe_dense_tp_size": 1 if layout.whole_dense else None,
        "moe_a2a_backend": "deepep" if layout.deepep else "none",
        "disable_shared_experts_fusion": True,  # fused, their layout would depend on the GPU
        "enable_return_routed_experts": settings.routed_experts,
        # later than the host's check, which names the rank that hangs
        "watchdog_timeout": 2 * settings.timeout_s,
    }
    if layout.deepep and settings.engine.place_experts:
        # the router's experts become slots by a table, which expert_maps.py writes
        arguments["ep_dispatch_algorithm"] = "static"
    if layout.draft:
        arguments |= _draft_arguments(layout.draft)
    if settings.model_context:
        arguments["context_length"] = min(
            settings.context_tokens + _SPARE_CONTEXT, settings.model_context
        )
    if settings.span:
        host, port = settings.span.rendezvous
        arguments["nnodes"] = settings.span.nodes
        arguments["node_rank"] = settings.span.node
        arguments["dist_init_addr"] = f"{host}:{port}"
    if config_values := _config_values(settings):
        arguments["json_model_override_args"] = json.dumps(config_values)
    if device == "cpu":
        arguments |= sglang_patches.server_arguments(layout.tp, room, limit)
    else:
        arguments |= _gpu_arguments(settings)
    if settings.adapter:
        arguments |= adapter_slot.server_arguments(settings.adapter, device)
    arguments |= settings.engine.sglang
    # null: as the plan counts
    arguments["max_running_requests"] = arguments["max_running_requests"] or limit
    # last, because seeded samples must not depend on the recipe's own arguments
    if settings.seeded:
        arguments |= deterministic.server_arguments(room, device)
    return arguments


def _config_values(settings: EngineSettings) -> JsonObject:
    """The values in place of those of config.json: the recipe's, and the format that the engine's weights have."""
    values = dict(settings.config_values)
    if settings.layout.fp8 or (settings.quantised and not settings.load_weights):
        values |= dict.fromkeys(QUANTISATION_KEYS)
    if settings.layout.fp8:
        values[KEY] = fp8_config(settings.plain_modules, settings.layout.precision.scales)
    return values


def _gpu_arguments(settings: EngineSettings) -> dict[str, Any]:
    layout = settings.layout
    arguments: dict[str, Any] = {
        "base_gpu_id": settings.first_gpu,
        # releases the engine's memory to training between rollouts
        "enable_memory_saver": True,
        "sleep_on_idle": True,
        # SGLang's own choice on NVIDIA GPUs are graphs of prompts too ("breakable"): a pool beside mem_fraction_static
        # that stays while training has the GPU, for steps that are mostly decoding. A named backend wins over this.
        "disable_prefill_cuda_graph": True,
    }
    arguments |= group_arguments(layout, settings.concurrency, settings.engine.sglang)
    # as "auto" on Hopper; on Blackwell "auto" is a backend whose layout sglang_map lacks
    if not layout.fp8:
        arguments["moe_runner_backend"] = "deep_gemm" if layout.deepep else "triton"
    return arguments


def _draft_arguments(draft: int) -> dict[str, Any]:
    """The model's own prediction layer drafts a chain of `draft` tokens, and the model verifies each of them.

    With thresholds of 1 a draft x is accepted with the model's probability p(x), and the token in its place is drawn
    from the rest of p otherwise: samples are those of the model whatever the drafts (speculative/eagle_utils.py).
    """
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": draft,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": draft + 1,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
    }


@listed
def sglang_errors(arguments: Mapping[str, Any]) -> ErrorIterator:
    """Keys of `rollout.engine.sglang` that SGLang does not have, or that megarl sets or does not support."""
    known = server_fields()
    for key in arguments:
        where = f"{WHERE}.{key}"
        owner = "speculative_" if key.startswith("speculative_") else key
        if owner in _SET_BY_MEGARL:
            hint = f"set {_SET_BY_MEGARL[owner]} and remove it"
            yield UserError(where, "is set by megarl itself", hint)
        elif key in _NOT_IN_RECIPES:
            yield UserError(where, "is set by megarl itself", "remove it")
        elif why := next((why for start, why in REFUSED.items() if key.startswith(start)), None):
            yield UserError(where, f"resharding does not support it: {why}", "remove it")
        elif key not in known:
            hint = did_you_mean(
                near(key, sorted(known)), "see SGLang's ServerArgs for the names it has"
            )
            yield UserError(where, "SGLang has no such server argument", hint)


def latent_cache_errors(arguments: Mapping[str, Any]) -> list[UserError]:
    """A data type of the KV cache that the attention backend of an MLA model does not support."""
    cached = arguments.get("kv_cache_dtype", "auto")
    if cached in _PLAIN_CACHES:
        return []
    where = f"{WHERE}.kv_cache_dtype"
    if cached != "fp8_e4m3":
        problem = f"SGLang's latent attention does not take a cache in {cached!r}"
        return [UserError(where, problem, "set it to fp8_e4m3, or remove it")]
    default = arguments.get("attention_backend")
    for phase in ("prefill", "decode"):
        backend = arguments.get(f"{phase}_attention_backend") or default
        if backend in LATENT_FP8_BACKENDS:
            continue
        problem = f"'{cached}', but {backend} copies a layer's whole cache of latent attention into another type"
        if backend is None:
            problem = f"'{cached}', but no attention backend is named: SGLang may choose one that does not take it"
        backends = "flashmla (Hopper), trtllm_mla (Blackwell) or triton, or to dsa with an indexer"
        hint = f"remove it, or set {WHERE}.attention_backend to {backends}"
        return [UserError(where, problem, hint)]
    return []


@cache
def server_fields() -> frozenset[str]:
    """The names of SGLang's server arguments, parsed from its source because importing SGLang takes seconds."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise UserError(
            "rollout.engine", "sglang is not installed", "install the package that setup.py pins"
        )
    folder = Path(spec.origin).parent / "srt" / "arg_groups" / "fields"
    return frozenset(
        statement.target.id
        for source in folder.glob("*.py")
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )
