"""Whether an SGLang server fits a run, by what it states of itself: its version, its model and its settings."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.model.hf_config import read_model
from megarl.model.hf_values import read_json
from megarl.model.shape import ModelShape
from megarl.rollout.external.client import ServerClient, ServerFault
from megarl.rollout.load_balancing import Capacity
from megarl.types import UserError

# max_req_input_len is so much less than what prompt and response have together (SGLang's managers/tp_worker.py)
_INPUT_SPARE = 4
# what settings of a server must be: with others its samples are not the policy's, or files do not fill its weights
_NEEDED: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "speculative_algorithm": (None,),
    "preferred_sampling_params": (None,),
    "json_model_override_args": ("{}", None),
    "disaggregation_mode": ("null", None),
    "enable_lora": (None, False),
    "weight_cache_mode": ("off", None),
}


@dataclass(frozen=True)
class WantedServer:
    """What a recipe needs of its servers. context_tokens: of the longest prompt with its response."""

    version: str
    architectures: tuple[str, ...]
    shape: ModelShape
    dtype: str
    context_tokens: int
    is_seeded: bool
    has_stop_texts: bool
    family: str | None = None  # model.family

    @staticmethod
    def of(recipe: Recipe) -> WantedServer:
        """Raises UserError where SGLang is not installed, or model.path cannot be read."""
        try:
            version = importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                "rollout.engine",
                "sglang is not installed",
                "install the package that setup.py pins",
            ) from None
        model = read_model(recipe.model.path, recipe.model.family)
        config = read_json(Path(recipe.model.path) / "config.json")
        longest = recipe.longest_sequence
        return WantedServer(
            version=version,
            architectures=tuple(config["architectures"]),
            shape=model.shape,
            family=recipe.model.family,
            dtype=recipe.model.dtype,
            context_tokens=min(longest, model.context_tokens or longest),
            is_seeded=recipe.rollout.seeded,
            has_stop_texts=recipe.episode is not None,
        )


@dataclass(frozen=True)
class ServerFacts:
    """What a server states of itself. server: its settings and sizes; model: what its weights are."""

    server: Mapping[str, Any]
    model: Mapping[str, Any]

    @property
    def capacity(self) -> Capacity:
        """What it can run at once, all of its attention groups together."""
        groups = int(self.server.get("dp_size") or 1)
        states = self.server.get("internal_states") or [{}]
        sequences = states[0].get("effective_max_running_requests_per_dp")
        return Capacity(
            sequences=groups * int(sequences or self.server["max_running_requests"]),
            tokens=groups * int(self.server["max_total_num_tokens"]),
        )

    @property
    def random_seed(self) -> object:
        """Of its samples, where requests have no seeds of their own."""
        return self.server.get("random_seed")

    def problems(self, wanted: WantedServer) -> Iterator[str]:
        """What does not fit, each as the rest of a sentence about the server."""
        server = self.server
        if server.get("version") != wanted.version:
            yield f"has SGLang {server.get('version')}, and the run has {wanted.version}"
        architectures = tuple(self.model.get("architectures") or ())
        if architectures != wanted.architectures:
            yield f"serves a {_joined(architectures)}, and model.path is a {_joined(wanted.architectures)}"
        elif (
            shape := _shape_there(server.get("model_path"), wanted.family)
        ) and shape != wanted.shape:
            yield f"serves {server['model_path']}, which is of another size than model.path"
        if server.get("dtype") != wanted.dtype:
            yield f"computes in dtype {server.get('dtype')}, and model.dtype is {wanted.dtype}"
        most = int(server.get("max_req_input_len") or 0) + _INPUT_SPARE
        if most < wanted.context_tokens:
            yield f"has room for {most} tokens of prompt and response, and the run needs {wanted.context_tokens}"
        for name, values in _NEEDED.items():
            if server.get(name) not in values:
                yield f"was started with {name} {server.get(name)!r}, which must be {values[0]!r}"
        if int(server.get("dp_size") or 1) > 1 and not wanted.is_seeded:
            yield "has several attention groups, which draw equal random numbers without rollout.seeded"
        if wanted.is_seeded and not server.get("enable_deterministic_inference"):
            yield "was started without --enable-deterministic-inference, which rollout.seeded needs"
        if wanted.has_stop_texts and server.get("skip_tokenizer_init"):
            yield "was started with --skip-tokenizer-init, and episodes end turns at texts"


async def fitting_facts(client: ServerClient, wanted: WantedServer) -> ServerFacts:
    """The facts of a server that fits. Raises ServerFault with everything that does not."""
    facts = ServerFacts(await client.get("/server_info"), await client.get("/model_info"))
    try:
        problems = [*facts.problems(wanted)]
        _ = facts.capacity
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ServerFault(f"does not state its settings as SGLang {wanted.version} does") from None
    if problems:
        raise ServerFault("; it ".join(problems))
    return facts


def _shape_there(path: object, family: str | None) -> ModelShape | None:
    """The model's sizes in a server's folder, where this machine can read it too."""
    if not isinstance(path, str) or not Path(path, "config.json").is_file():
        return None
    return read_model(path, family).known_shape


def _joined(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "model without a name"
