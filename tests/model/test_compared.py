"""Every family of the table goes through every comparison, or it is said here why not; the page says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.model.families import FAMILIES
from tests.model import test_families
from tests.parallel import test_parity, test_reference
from tests.parallel.checkpoints import architecture
from tests.resharding import test_real_engines
from tests.rollout.sglang import test_families as test_engines

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MEGATRON = "the parameters of Megatron's model"
LOGPROBS = "the log-probabilities of transformers"
RANKS = "what several training ranks compute, which is what one does"
SGLANG = "the parameters of SGLang's class at full width"
LOADER = "what SGLang's own loader makes of a checkpoint"
ENGINE = "what a tiny SGLang engine samples, whose log-probabilities are those of transformers"
# comparison -> the architectures that a test has it of
COMPARED = {
    MEGATRON: {architecture(name) for name in (*test_families.SPARSE, *test_families.DENSE)},
    LOGPROBS: {
        architecture(name) for name in (*test_families.WITH_LOGPROBS, *test_reference.FAMILIES)
    },
    RANKS: {
        architecture(name)
        for name in (*test_parity.SETTINGS, *test_parity.OTHERS, *test_families.ON_FOUR_RANKS)
    },
    SGLANG: {
        str(test_real_engines.CONFIGS[model]["architectures"][0])
        for model in test_real_engines.LAYOUTS
    },
    LOADER: {
        str(test_real_engines.SMALL_MODELS[model]["architectures"][0])
        for model, _ in test_real_engines.LOADED
    },
    ENGINE: {architecture(family) for family, _ in test_engines.CASES.values()},
}
# (architecture, comparison) -> why no test has it
LEFT_OUT: dict[tuple[str, str], str] = {
    ("DeepseekV32ForCausalLM", ENGINE): "SGLang's indexer needs a GPU",
    ("GlmMoeDsaForCausalLM", ENGINE): "SGLang's indexer needs a GPU",
}


@pytest.mark.parametrize("comparison", COMPARED)
def test_every_family_is_compared_or_it_is_said_why_not(comparison: str) -> None:
    missing = FAMILIES.keys() - COMPARED[comparison]
    assert missing == {name for name, where in LEFT_OUT if where == comparison}


def test_the_page_says_what_each_family_is_compared_with() -> None:
    lines = [
        "By tests every row is compared with:",
        "",
        *(f"- {comparison}" + left_out(comparison) for comparison in COMPARED),
        "",
    ]
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")


def left_out(comparison: str) -> str:
    """The rows that are left out, with the reason."""
    rows_of: dict[str, list[str]] = {}
    for (name, where), why in LEFT_OUT.items():
        if where == comparison:
            rows_of.setdefault(why, []).append(f"`{name}`")
    return "".join(f", but for {' and '.join(rows)}: {why}" for why, rows in rows_of.items())
