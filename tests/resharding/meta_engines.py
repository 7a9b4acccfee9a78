"""SGLang's real models on torch's meta device: the parameters of any rank of any layout, without a GPU or an engine.

Parameters have shapes and types but no memory, so that DeepSeek-V3 at full width takes a tenth of a second. The models
are built by SGLang's own start-up code in a child process that takes itself for a machine with H100s: SGLang asks for
the device while it is imported, and keeps its configuration in global state.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.config import EngineConfig
from megarl.model.families import without_tower
from megarl.model.hf_config import read_model
from megarl.model.lora_pairs import LoraSize
from megarl.placement.engine_layout import EngineLayout
from tests.resharding import meta_slots

TIMEOUT_S = 500
# Packages of kernels that SGLang imports on a GPU. Building a model calls none of them.
KERNELS = {"deep_ep", "deep_gemm", "flash_attn", "flashinfer", "sgl_kernel", "triton_kernels"}
# files of sglang/srt/models
MODELS = {
    "deepseek_v2",
    "deepseek_nextn",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4_moe_lite_nextn",
    "glm4_moe_nextn",
    "hunyuan_v3",
    "kimi_k25",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_next_mtp",
    "qwen3_5",
    "qwen3_5_mtp",
    "qwen3",
    "qwen2",
    "qwen2_moe",
    "llama",
}
GROUPS = ("tp", "pp", "attn_tp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")


@dataclass(frozen=True)
class Request:
    """One TP rank of one engine. folder: has the model's config.json. sglang: as the recipe's rollout.engine.sglang.

    lora: adapters, of which the slots alone are asked for. plain: the modules of an fp8 engine that stay plain.
    loads: what SGLang's loader makes of weights is.
    """

    folder: str
    engine: EngineLayout
    rank: int
    sglang: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraSize | None = None
    plain: tuple[str, ...] = ()
    loads: bool = False


@dataclass(frozen=True)
class Built:
    """What `megarl.resharding.engine_model` says of the model of one request.

    params: the weights, on the meta device. constants: the value of each constant after it was written. cache_scales:
    what SGLang's attention layers multiply with once SGLang has processed those constants. unknown: why the model
    cannot be written, or "". derived: the shape and type of each tensor of layer 0, and of the draft's layer, that is
    derived from weights. wrong: as meta_slots.py finds it. error: the traceback of SGLang's refusal, or "".
    """

    params: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    cache_scales: list[float] = field(default_factory=list)
    unknown: str = ""
    derived: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    error: str = ""


def write_config(folder: Path, config: Mapping[str, Any]) -> str:
    """Make the folder of a model, with its config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def build(requests: Sequence[Request]) -> list[Built]:
    """Build all models in one child process. Importing SGLang takes it ten seconds, a model a tenth of one."""
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.resharding.meta_engines"],
        cwd=Path(__file__).parents[2],
        input=json.dumps([asdict(request) for request in requests]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert not done.returncode, done.stderr[-4000:]
    return [_built(**answer) for answer in json.loads(done.stdout.splitlines()[-1])]


def _built(params: Mapping[str, tuple[list[int], str]], **rest: Any) -> Built:
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in params.items()
    }
    return Built(tensors, **rest)


class _Absent(type):
    """Stands for anything in a package that is not installed: its attributes are absent too, calling it returns it."""

    def __getattr__(cls, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_subclass = cls.__mro__[1:] != (object,)
        return super().__call__(*args, **kwargs) if is_subclass else cls


class _AbsentKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in KERNELS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        absent = _Absent(module.__name__, (), {})
        module.__dict__["__getattr__"] = lambda name: getattr(absent, name)


class _NoStream:
    """In the place of CUDA's streams and events, which models keep and use when they run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _OnMeta(TorchFunctionMode):
    """Make on the meta device what is asked for on the GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def take_for_hopper() -> None:
    """Let this process take itself for one with eight H100s; for good, and before SGLang is imported."""
    card = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132
    )
    answers = {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": card.name,
        "get_device_properties": card,
        "mem_get_info": (card.total_memory, card.total_memory),
        "set_device": None,
        "synchronize": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _NoStream)
    setattr(torch.version, "cuda", "12.8")  # noqa: B010
    sys.meta_path.append(_AbsentKernels())  # last: packages that are installed go first
    gemm: Any = importlib.import_module("deep_gemm")
    # an indexer computes with it when it is made
    gemm.get_num_sms = lambda: card.multi_processor_count


def answer(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each request its `Built` as JSON."""
    take_for_hopper()
    from megarl.cpu import sglang_patches

    sglang_patches.stand_in_for_torchvision()
    sglang_patches.declare_torchvision_operators()
    _import_few_models()
    with sglang_patches.quiet_import():
        return [_answer(request) for request in requests]


def _import_few_models() -> None:
    """SGLang imports all of its models to find one of them."""
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    names = {file.stem for file in (Path(spec.origin).parent / "srt" / "models").glob("*.py")}
    assert names > MODELS
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(names - MODELS))


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from sglang.srt import runtime_context

    try:
        models, server = _models(request)
        if request["lora"]:
            return {"params": {}, "wrong": meta_slots.wrong_slots(models[0], server, request)}
        if request["loads"]:
            return {"params": {}, "wrong": meta_slots.wrong_weights(models, request)}
        with torch.device("meta"), _OnMeta():
            return _examine(models)
    except Exception:  # whatever SGLang's authors chose to raise
        return {"params": {}, "error": traceback.format_exc()}
    finally:
        runtime_context.reset_context()


def _models(request: Mapping[str, Any]) -> tuple[list[torch.nn.Module], Any]:
    """A rank's model and its draft, by the steps of SGLang's scheduler process, and its arguments; no weights."""
    from sglang.srt import runtime_context as context
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.server_args import ServerArgs

    from megarl.rollout.sglang.arguments import EngineSettings, server_arguments

    engine, rank = meta_slots.layout_of(request["engine"]), request["rank"]
    settings = EngineSettings(
        request["folder"], engine, "bfloat16", 0, 4096, 8, load_weights=False, quantised=True,
        engine=EngineConfig(sglang=request["sglang"]), plain_modules=tuple(request["plain"]),
        config_values=_config_values(request["folder"]),
    )  # fmt: skip
    os.environ["SGLANG_SHARED_EXPERT_TP1"] = str(int(engine.whole_shared))
    server: Any = ServerArgs(
        **server_arguments(settings, "megarl.rollout.sglang.weight_loader.load", "cuda")
    )
    world_rank = context.spawn_world_rank(server, tp_rank=rank, pp_rank=0)
    context.publish(
        server, role="scheduler", ranks=context.SpawnRanks(world_rank=world_rank, gpu_id=0)
    )
    parallel = context.get_parallel()
    parallel.override_permanently(**{f"{name}_group": _group(parallel, name) for name in GROUPS})
    initialize_dp_attention(server)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    target = _build(server)
    return [target, _draft(server, target)] if engine.draft else [target], server


def _config_values(folder: str) -> dict[str, Any]:
    """As a run has them; a user's family, which is not found here, has no tower."""
    shape = read_model(folder).known_shape
    return without_tower(shape) if shape else {}


def _build(server: Any, **more: Any) -> torch.nn.Module:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    config, load = ModelConfig.from_server_args(server, **more), LoadConfig(load_format="dummy")
    quantisation = loader._get_quantization_config(config, load)
    with set_default_torch_dtype(config.dtype), torch.device("meta"), _OnMeta():
        return loader._initialize_model(config, load, quantisation)


def _draft(server: Any, target: torch.nn.Module) -> torch.nn.Module:
    """As speculative/eagle_worker_v2.py makes it, with the target's embedding and output layer."""
    from sglang.srt.layers.moe.utils import (
        draft_model_build_scope,
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.pp_draft_embedding import resolve_target_embed_and_head

    path, revision = (
        get_spec().speculative_draft_model_path,
        get_spec().speculative_draft_model_revision,
    )
    with (
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
        draft_model_build_scope(),
    ):
        draft: Any = _build(server, model_path=path, model_revision=revision, is_draft_model=True)
    draft.set_embed_and_head(*resolve_target_embed_and_head(target))
    return draft


def _group(parallel: Any, name: str) -> SimpleNamespace:
    """What a model asks of a process group while it is built."""
    size, rank = getattr(parallel, f"{name}_size"), getattr(parallel, f"{name}_rank")
    places = {
        "world_size": size,
        "rank_in_group": rank,
        "is_first_rank": rank == 0,
        "is_last_rank": rank == size - 1,
    }
    return SimpleNamespace(**places, device_group=None, cpu_group=None)


def _examine(models: Sequence[torch.nn.Module]) -> dict[str, Any]:
    from megarl.resharding import engine_model

    model = engine_model.joined(models)
    _start_constants(model)
    unknown, params = engine_model.unknown_layout(model), engine_model.params(model)
    assert all(param.is_contiguous() for param in params.values())
    engine_model.write_constants(model)
    constants = {name: param.item() for name, param in engine_model.constants(model).items()}
    _process(model)
    for each in models:
        engine_model.refresh_derived(each)
    layers = {"": "model.layers.0", "draft.": "draft.model.decoder"}
    modules = dict(model.named_modules())
    derived = {
        prefix + name: getattr(modules.get(f"{where}.self_attn"), name, None)
        for prefix, where in list(layers.items())[: len(models)]
        for name in ("w_kc", "w_vc")
    }
    scales = [
        getattr(module, name, None)
        for module in model.modules()
        for name in ("k_scale_float", "v_scale_float")
    ]
    return {
        "params": {name: _kind(param) for name, param in params.items()},
        "constants": constants,
        "cache_scales": [scale for scale in scales if isinstance(scale, float)],
        "unknown": str(
            unknown or engine_model.unknown_layout(model) or engine_model.draft_error(models) or ""
        ),
        "derived": {name: _kind(tensor) for name, tensor in derived.items() if tensor is not None},
    }


def _start_constants(model: torch.nn.Module) -> None:
    """Give the constants memory, and what SGLang's loader of made-up weights may leave in them."""
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            if isinstance(getattr(module, name, None), torch.nn.Parameter):
                made_up = torch.tensor(7e-4, dtype=torch.float32, device="cpu")
                setattr(module, name, torch.nn.Parameter(made_up, requires_grad=False))


def _process(model: torch.nn.Module) -> None:
    """What SGLang does at the end of each weight update."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def _kind(tensor: torch.Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
