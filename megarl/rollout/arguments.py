"""The engine's settings and SGLang's server arguments: ours, and the recipe's own that pass through."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megarl.device import DEVICE
from megarl.rollout import cpu
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
    "dp_size": "",
    "nnodes": "",
    "node_rank": "",
    "enable_memory_saver": "",
}


@dataclass(frozen=True)
class Sampling:
    """num_samples responses a prompt, each of max_tokens at most (end of sequence included); temperature 0: greedy."""

    num_samples: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class EngineSettings:
    """One engine: context_tokens is the longest prompt with its response, concurrency how many samples run at once.

    first_gpu is the GPU slot of its first tensor-parallel rank. Without load_weights it starts with made-up ones, and
    refuses to sample before its first reshard.
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


def server_arguments(settings: EngineSettings, weight_loader: str) -> dict[str, Any]:
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
    }
    if DEVICE == "cpu":
        arguments |= cpu.server_arguments(settings.tp, settings.context_tokens, settings.concurrency)
    else:
        # The memory saver: training takes the engine's memory between rollouts.
        arguments |= {"base_gpu_id": settings.first_gpu, "enable_memory_saver": True}
    return arguments | dict(settings.sglang)


def sglang_faults(arguments: Mapping[str, Any]) -> list[UserFault]:
    """Keys of the recipe's `rollout.engine.sglang` that SGLang does not know or that the recipe says elsewhere."""
    known = server_fields()
    faults = []
    for key in arguments:
        if key in _OURS:
            elsewhere = _OURS[key]
            mend = f"set {elsewhere} and remove it" if elsewhere else "remove it"
            faults.append(UserFault(f"{WHERE}.{key}", "is set by megarl itself", mend))
        elif key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            mend = f"did you mean {near[0]}?" if near else "see SGLang's ServerArgs for the names it has"
            faults.append(UserFault(f"{WHERE}.{key}", "SGLang has no such server argument", mend))
    return faults


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
