"""What does not go with drafts is the user's fault, and is told with its mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.rollout.sglang.drafts import DRAFT_BACKENDS, draft_errors
from tests.rollout.sglang.test_arguments import sglang_source

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
REPLAY = [
    "train.replay=r3",
    "rollout.prompts_per_step=4096",
    "rollout.samples_per_prompt=2",
    "rollout.engine.count=1",
]
CHUNK = "rollout.engine.sglang.chunked_prefill_size"


def recipe(*overrides: str, draft: int = 2) -> Recipe:
    return load_recipe(QUICKSTART, [f"rollout.engine.draft={draft}", *overrides])


REFUSED = [
    (
        ["rollout.seeded=true"],
        "rollout.seeded: true, but SGLang's verification of drafts does not use",
    ),
    (
        ["rollout.engine.sglang.attention_backend=cutlass_mla"],
        "attention_backend: cutlass_mla does not run a draft",
    ),
    (
        ["rollout.engine.sglang.decode_attention_backend=flex_attention"],
        "decode_attention_backend: flex_attention",
    ),
    (
        REPLAY,
        "r3, but SGLang stores the experts of 8192 tokens a step, and with drafts it verifies up to 24576",
    ),
    ([*REPLAY, f"{CHUNK}=24575"], f"set {CHUNK} to at least 24576"),
]
TAKEN = [
    [],
    ["rollout.engine.sglang.attention_backend=fa3"],
    [*REPLAY, f"{CHUNK}=24576"],
    [*REPLAY, "rollout.engine.sglang.max_running_requests=2730"],
]


@pytest.mark.parametrize(
    ("overrides", "says"), REFUSED, ids=lambda value: value if isinstance(value, str) else None
)
def test_what_does_not_go_with_drafts_is_refused(overrides: list[str], says: str) -> None:
    (error,) = draft_errors(recipe(*overrides))
    assert says in str(error)
    assert str(error).endswith("or rollout.engine.draft to 0")
    assert draft_errors(recipe(*overrides, draft=0)) == []


@pytest.mark.parametrize("overrides", TAKEN, ids=" ".join)
def test_what_goes_with_drafts_is_taken(overrides: list[str]) -> None:
    assert draft_errors(recipe(*overrides)) == []


def test_all_errors_are_told_at_once() -> None:
    overrides = [
        "rollout.seeded=true",
        "rollout.engine.sglang.attention_backend=torch_native",
        *REPLAY,
    ]
    assert len(draft_errors(recipe(*overrides))) == 3


def test_the_attention_backends_are_those_of_sglangs_draft_models() -> None:
    source = sglang_source("speculative", "draft_utils.py")
    tables = source.split("backend_map = {")[1:]
    for table in tables:
        assert all(
            f'"{backend}": self._create' in table.partition("}")[0] for backend in DRAFT_BACKENDS
        )
    assert len(tables) == 2
    assert "torch_native" not in source
