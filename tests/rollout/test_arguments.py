"""SGLang's own arguments: unknown and reserved names are the user's fault, told without importing SGLang."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megarl.rollout.arguments import EngineSettings, server_arguments, server_fields, sglang_faults

SETTINGS = EngineSettings("model", 2, 1, "float32", 7, 128, 64, sglang={"page_size": 16, "max_running_requests": 8})

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


def test_the_recipe_wins_over_our_defaults() -> None:
    arguments = server_arguments(SETTINGS, "a.loader")
    assert arguments["page_size"] == 16
    assert arguments["max_running_requests"] == 8
    assert arguments["tp_size"] == 2
    assert arguments["random_seed"] == 7


@needs_sglang
def test_all_our_arguments_are_sglangs() -> None:
    assert set(server_arguments(SETTINGS, "a.loader")) <= server_fields()


@needs_sglang
def test_unknown_and_reserved_arguments_are_named() -> None:
    faults = sglang_faults({"page_sise": 16, "tp_size": 4, "device": "cuda", "page_size": 16, "qqq": 1})
    assert [str(fault) for fault in faults] == [
        "rollout.engine.sglang.page_sise: SGLang has no such server argument; did you mean page_size?",
        "rollout.engine.sglang.tp_size: is set by megarl itself; set rollout.engine.tp and remove it",
        "rollout.engine.sglang.device: is set by megarl itself; remove it",
        "rollout.engine.sglang.qqq: SGLang has no such server argument; see SGLang's ServerArgs for the names it has",
    ]


@needs_sglang
@pytest.mark.slow
def test_the_names_read_from_the_source_are_those_of_the_class() -> None:
    from megarl.rollout.sglang_engine import ServerArgs

    arguments: Any = ServerArgs
    assert server_fields() == set(arguments.__struct_fields__)
