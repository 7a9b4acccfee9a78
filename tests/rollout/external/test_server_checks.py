"""What a server states of itself, and what of it does not fit a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.external.server_checks import ServerFacts, WantedServer
from megarl.rollout.load_balancing import Capacity
from tests.plan import plans
from tests.rollout.external.stand_in import WANTED, StandIn


def facts_of(server: dict[str, Any], model: dict[str, Any] | None = None) -> ServerFacts:
    stand_in = StandIn(server=server, model=model or {})
    return ServerFacts(stand_in.server_info({}), stand_in.model_info({}))


def test_a_server_that_fits_has_no_problem() -> None:
    assert [*facts_of({}).problems(WANTED)] == []


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"version": "0.5.20"}, "has SGLang 0.5.20, and the run has 0.5.21"),
        ({"dtype": "float16"}, "computes in dtype float16"),
        ({"max_req_input_len": 507}, "has room for 511 tokens of prompt and response"),
        ({"quantization": "fp8"}, "quantization 'fp8', which must be None"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm 'EAGLE'"),
        ({"preferred_sampling_params": {"top_k": 1}}, "preferred_sampling_params"),
        ({"json_model_override_args": '{"vocab_size": 3}'}, "json_model_override_args"),
        ({"disaggregation_mode": "decode"}, "disaggregation_mode 'decode'"),
        ({"dp_size": 2}, "several attention groups"),
    ],
)
def test_settings_that_do_not_fit_are_named(server: dict[str, Any], words: str) -> None:
    (problem,) = facts_of(server).problems(WANTED)
    assert words in problem


def test_another_model_is_named_by_its_architecture_or_its_folder(tmp_path: Path) -> None:
    (problem,) = facts_of({}, {"architectures": ["LlamaForCausalLM"]}).problems(WANTED)
    assert problem == "serves a LlamaForCausalLM, and model.path is a Qwen3MoeForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(plans.CONFIGS["qwen3-30b"]))
    (problem,) = facts_of({"model_path": str(tmp_path)}).problems(WANTED)
    assert problem == f"serves {tmp_path}, which is of another size than model.path"


def test_some_recipes_need_more_of_a_server() -> None:
    seeded = replace(WANTED, is_seeded=True)
    (problem,) = facts_of({"dp_size": 2}).problems(seeded)
    assert "--enable-deterministic-inference" in problem
    assert [
        *facts_of({"dp_size": 2, "enable_deterministic_inference": True}).problems(seeded)
    ] == []
    with_texts = replace(WANTED, has_stop_texts=True)
    (problem,) = facts_of({"skip_tokenizer_init": True}).problems(with_texts)
    assert "--skip-tokenizer-init" in problem


def test_the_groups_of_a_server_run_together() -> None:
    assert facts_of({"dp_size": 2}).capacity == Capacity(32, 8192)


def test_what_is_wanted_is_the_recipes(tmp_path: Path) -> None:
    recipe = plans.recipe(tmp_path, "tiny", 2, engine={"external": ["a:1"]})
    wanted = WantedServer.of(recipe)
    assert wanted.architectures == ("DeepseekV3ForCausalLM",)
    assert wanted.dtype == recipe.model.dtype
    assert wanted.context_tokens == recipe.longest_sequence
