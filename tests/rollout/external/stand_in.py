"""What an SGLang server answers to an external engine, without a model: every response is the token 7."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.config import EngineConfig
from megarl.rollout.external.engine import ExternalEngine
from megarl.rollout.external.server_checks import WantedServer
from megarl.rollout.external.weight_files import WeightFiles
from tests.http_server import Handler, serving
from tests.plan.plans import SHAPE
from tests.tiny_engines import tiny_settings

WANTED = WantedServer(
    version="0.5.21",
    architectures=("Qwen3MoeForCausalLM",),
    shape=SHAPE,
    dtype="bfloat16",
    context_tokens=512,
    is_seeded=False,
    has_stop_texts=False,
)
WEIGHTS = WeightFiles("/shared/weights/run-3-4", "run-3-4", 3)
Reply = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class StandIn:
    """A server's state. version: SGLang's name of its weights.

    asked: the paths and bodies that it got; keys: the Authorization headers. broken: by path, a status and a text to
    answer instead. is_stubborn: it says that it has loaded weights, and has not.
    """

    server: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    version: str = "default"
    broken: dict[str, tuple[int, str]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    is_stubborn: bool = False

    def answer(self, handler: Handler, body: dict[str, Any]) -> None:
        path = handler.path.partition("?")[0]
        self.asked.append((path, body))
        self.keys.add(handler.headers["Authorization"])
        if path in self.broken:
            status, text = self.broken[path]
            handler.send(status, text.encode(), Location="/elsewhere")
            return
        content = getattr(self, path.removeprefix("/"))(body)
        handler.send(200, json.dumps(content).encode())

    def server_info(self, _: dict[str, Any]) -> dict[str, Any]:
        facts = {
            "version": "0.5.21",
            "dtype": "bfloat16",
            "max_req_input_len": 600,
            "max_total_num_tokens": 4096,
            "dp_size": 1,
            "tp_size": 1,
            "random_seed": id(self),
            "json_model_override_args": "{}",
            "disaggregation_mode": "null",
            "internal_states": [{"effective_max_running_requests_per_dp": 16}],
        }
        return facts | self.server

    def model_info(self, _: dict[str, Any]) -> dict[str, Any]:
        facts = {"architectures": ["Qwen3MoeForCausalLM"], "weight_version": self.version}
        return facts | self.model

    def flush_cache(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.is_stubborn:
            self.version = body["weight_version"]
        return {"success": True, "message": ""}

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"success": True, "per_engine_checksum": "a1"}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        count = body["sampling_params"]["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 7, None]] * count,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
            "cached_tokens": 0,
        }
        return {"output_ids": [7] * count, "meta_info": meta | self.meta}

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)


@contextmanager
def engine_of(
    stand_in: StandIn, key_variable: str | None = None, **settings: Any
) -> Iterator[ExternalEngine]:
    """An external engine, number 1 of its run, which has the stand-in's address."""
    with serving(stand_in.answer) as url:
        address = url.removeprefix("http://")
        config = EngineConfig(external=("127.0.0.1:1", address))
        made = tiny_settings(model_path="", number=1, **{"timeout_s": 20.0, **settings})
        engine = ExternalEngine(replace(made, engine=config), WANTED, key_variable)
        try:
            yield engine
        finally:
            engine.shutdown()
