"""The engine's settings and SGLang's server arguments: ours, and the recipe's own that pass through."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config.spelling import did_you_mean, near
from megarl.device import DEVICE, Address
from megarl.rollout.sglang import cpu, deterministic
from megarl.types import UserFault

WHERE = "rollout.engine.sglang"
_OURS = {
    "model_path": "model.path",
    "tp_size": "rollout.engine.tp",
    "ep_size": "rollout.engine.ep",
    "dtype": "model.dtype",
    "random_seed": "run.seed",
    "device": "",
    "weight_version": "",
    "load_format": "",
    "base_gpu_id": "",
    "custom_weight_loader": "",
    "skip_tokenizer_init": "",
    "log_level": "",
    "trust_remote_code": "",
    "pp_size": "",
    "dp_size": "rollout.engine.dp",
    "enable_dp_attention": "rollout.engine.dp",
    "quantization": "rollout.engine.fp8",
    "disable_shared_experts_fusion": "",
    "nnodes": "",
    "node_rank": "",
    "dist_init_addr": "",
    "enable_memory_saver": "",
    "enable_deterministic_inference": "rollout.seeded",
    "enable_return_routed_experts": "train.replay",
}
_SINGLE_OWNER = "it keeps weights in other places than resharding writes to"
_ONE_SIDED = "it sets up NCCL in engines alone; NCCL_NVLS_ENABLE and NCCL_CUMEM_ENABLE of the environment hold for all"
REFUSED = {  # first letters of server arguments that the weights' map cannot follow: why
    "speculative_": "a draft model would keep the weights that it started with",
    "enable_eplb": "it moves experts between ranks while the engine runs",
    "ep_num_redundant_experts": "it holds some experts twice",
    "init_expert_location": "it deals the experts to the ranks in another order",
    "enable_elastic_expert_backup": _SINGLE_OWNER,
    "elastic_ep_backend": "it moves experts between ranks while the engine runs",
    "ep_join_mode": "it changes the number of ranks",
    "enable_waterfill": "it fuses the shared experts with the routed ones",
    "enforce_shared_experts_fusion": "it fuses the shared experts with the routed ones",
    "moe_a2a_backend": "it changes which ranks hold the shared experts, and rollout.engine.ep",
    "moe_dense_tp_size": "it changes which ranks hold the dense layers",
    "moe_dp_size": "it changes which ranks hold the experts",
    "dwdp_size": "it changes which ranks hold the experts",
    "attn_cp_size": "it changes which ranks hold the attention",
    "dcp_": "it changes which ranks hold the attention",
    "enable_dp_lm_head": "it changes which ranks hold the output layer",
    "enable_lora": _SINGLE_OWNER,
    "lora_paths": _SINGLE_OWNER,
    "cpu_offload_gb": _SINGLE_OWNER,
    "offload_group_size": _SINGLE_OWNER,
    "weight_cache_mode": _SINGLE_OWNER,
    "kt_": _SINGLE_OWNER,
    "enable_nccl_nvls": _ONE_SIDED,
    "enable_symm_mem": _ONE_SIDED,
    "json_model_override_args": "the engine's model would no longer be the one that is trained",
}
# Attention backends that read latent attention's keys from an fp8 cache (SGLang's layers/attention). Its others, among
# them those that it chooses on Hopper, copy a layer's whole cache into the model's type in every step (`.to(q.dtype)`).
LATENT_FP8_BACKENDS = ("cutedsl_mla", "flashmla", "tokenspeed_mla", "triton", "trtllm_mla")
_SPARE_CONTEXT = 8  # SGLang keeps two positions of the context free behind a response, and six behind a prompt
_PLAIN_CACHES = ("auto", "bf16", "bfloat16")
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class Sampling:
    """num_samples responses a prompt, each of max_tokens at most (end of sequence included); temperature 0: greedy.

    stream names the prompt's draw (run seed, step, place of the prompt) where samples repeat. with_baseline: and a
    greedy one, which the others are compared with. may_lose_all: a prompt may be left without a sample whose verdict
    did not fail.
    """

    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stream: tuple[int, ...] = ()
    with_baseline: bool = False
    may_lose_all: bool = False


@dataclass(frozen=True)
class Endpoint:
    """The key of the relay on an engine's first node; its secret half is that node's alone."""

    public: bytes
    secret: bytes = field(default=b"", repr=False)

    @property
    def for_guests(self) -> Endpoint:
        return Endpoint(self.public)


@dataclass(frozen=True)
class NodeSpan:
    """Node `node` of the `nodes` that an engine is on, with as many ranks on each.

    meet: a store where the ranks of all nodes meet. door: with which the relays of attention groups join.
    """

    nodes: int
    node: int
    meet: Address
    door: Endpoint


@dataclass(frozen=True)
class EngineSettings:
    """One engine: context_tokens is the longest prompt with its response, concurrency how many samples run at once.

    first_gpu is the GPU slot of its first tensor-parallel rank. Without load_weights it starts with made-up ones, and
    refuses to sample before its first reshard. With fp8 the weights are held in tiles of 128 x 128 with their scales,
    which a checkpoint in another type cannot fill: load_weights must be False.

    span: the node that this process looks after, where the engine is on several.

    seeded: a prompt's samples are the same, to the last bit, whenever weights and stream are; slower. routed_experts:
    every sample says which experts its tokens went to.

    timeout_s: how long a scheduler may stand still. reserve_bytes: memory of each GPU that SGLang's cache leaves free
    for the exchange's communicator. model_context: positions that the model has; None: not known, and SGLang makes
    tables for the longest that it finds.
    """

    model_path: str
    tp: int
    ep: int
    dtype: str
    seed: int
    context_tokens: int
    concurrency: int
    first_gpu: int = 0
    load_weights: bool = True
    sglang: Mapping[str, Any] = field(default_factory=dict)
    dp: int = 1
    fp8: bool = False
    seeded: bool = False
    routed_experts: bool = False
    span: NodeSpan | None = None
    timeout_s: float = 600.0
    model_context: int | None = None
    reserve_bytes: int = 0

    @property
    def first_rank(self) -> int:
        """The first of the tensor-parallel ranks on this node."""
        return self.span.node * self.tp // self.span.nodes if self.span else 0


def server_arguments(settings: EngineSettings, weight_loader: str, device: str = DEVICE) -> dict[str, Any]:
    """Keyword arguments of SGLang's `ServerArgs`; the recipe's `rollout.engine.sglang` wins over our defaults."""
    arguments: dict[str, Any] = {
        "model_path": settings.model_path,
        "tp_size": settings.tp,
        "ep_size": settings.ep,
        "dtype": settings.dtype,
        "random_seed": settings.seed,
        "max_running_requests": settings.concurrency,
        "weight_version": "0" if settings.load_weights else "-1",
        "load_format": "auto" if settings.load_weights else "dummy",
        "custom_weight_loader": [weight_loader],
        "skip_tokenizer_init": True,
        "log_level": "error",
        "trust_remote_code": False,
        "dp_size": settings.dp,
        "enable_dp_attention": settings.dp > 1,
        "disable_shared_experts_fusion": True,  # fused, their layout would depend on the GPU
        "enable_return_routed_experts": settings.routed_experts,
        "watchdog_timeout": 2 * settings.timeout_s,  # later than the host, which says who stands still
    }
    if settings.model_context:
        arguments["context_length"] = min(settings.context_tokens + _SPARE_CONTEXT, settings.model_context)
    if settings.span:
        host, port = settings.span.meet
        arguments |= {"nnodes": settings.span.nodes, "node_rank": settings.span.node}
        arguments |= {"dist_init_addr": f"{host}:{port}"}
    if settings.fp8:
        arguments["json_model_override_args"] = json.dumps({"quantization_config": _FP8})
    if device == "cpu":
        arguments |= cpu.server_arguments(settings.tp, settings.context_tokens, settings.concurrency)
    else:
        # The memory saver: training takes the engine's memory between rollouts.
        arguments |= {"base_gpu_id": settings.first_gpu, "enable_memory_saver": True, "sleep_on_idle": True}
        if not settings.fp8:  # what "auto" is on Hopper; on Blackwell it is a backend whose layout has no map
            arguments["moe_runner_backend"] = "triton"
    arguments |= settings.sglang
    if settings.seeded:  # last: samples that are said to repeat must not depend on other settings
        arguments |= deterministic.server_arguments(settings.context_tokens, settings.concurrency, device)
    return arguments


def sglang_faults(arguments: Mapping[str, Any]) -> list[UserFault]:
    """Keys of the recipe's `rollout.engine.sglang` that SGLang does not know or that the recipe says elsewhere."""
    known = server_fields()
    faults = []
    for key in arguments:
        if key in _OURS:
            elsewhere = _OURS[key]
            mend = f"set {elsewhere} and remove it" if elsewhere else "remove it"
            faults.append(UserFault(f"{WHERE}.{key}", "is set by megarl itself", mend))
        elif why := next((why for start, why in REFUSED.items() if key.startswith(start)), None):
            faults.append(UserFault(f"{WHERE}.{key}", f"resharding does not support it: {why}", "remove it"))
        elif key not in known:
            mend = did_you_mean(near(key, sorted(known)), "see SGLang's ServerArgs for the names it has")
            faults.append(UserFault(f"{WHERE}.{key}", "SGLang has no such server argument", mend))
    return faults


def latent_cache_faults(arguments: Mapping[str, Any]) -> list[UserFault]:
    """A KV cache's type that the attention backend of a model with latent attention does not take."""
    cached = arguments.get("kv_cache_dtype", "auto")
    if cached in _PLAIN_CACHES:
        return []
    where, mend = f"{WHERE}.kv_cache_dtype", f"remove it, or set {WHERE}.attention_backend to"
    mend = f"{mend} flashmla (Hopper), trtllm_mla (Blackwell) or triton"
    if cached != "fp8_e4m3":
        problem = f"SGLang's latent attention does not take a cache in {cached!r}"
        return [UserFault(where, problem, "set it to fp8_e4m3, or remove it")]
    both = arguments.get("attention_backend")
    named = [arguments.get(f"{phase}_attention_backend") or both for phase in ("prefill", "decode")]
    others = sorted({str(backend) for backend in named if backend and backend not in LATENT_FP8_BACKENDS})
    if others:
        problem = f"'{cached}', but {others[0]} copies a layer's whole cache of latent attention into another type"
        return [UserFault(where, problem, mend)]
    if None in named:
        problem = f"'{cached}', but no attention backend is named: SGLang may choose one that does not take it"
        return [UserFault(where, problem, mend)]
    return []


@cache
def server_fields() -> frozenset[str]:
    """The names of SGLang's server arguments, read from its source: importing it would take seconds."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise UserFault("rollout.engine", "sglang is not installed", "install the package that setup.py pins")
    folder = Path(spec.origin).parent / "srt" / "arg_groups" / "fields"
    return frozenset(name for source in folder.glob("*.py") for name in _annotated_names(source))


def _annotated_names(source: Path) -> set[str]:
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    statements = [statement for node in classes for statement in node.body]
    return {
        statement.target.id
        for statement in statements
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
