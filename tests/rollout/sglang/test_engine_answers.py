"""What an engine makes of SGLang's answers; nothing is started, and the answers are made by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.sampling_engine import unbegun
from megarl.rollout.sglang.engine import Engine
from megarl.types import Sample, SilentFault
from megarl.types.sampling import Sampling
from tests.tiny_engines import tiny_settings


def answered(logprobs: list[float]) -> Sample:
    """The sample of engine 3 whose tokens have these log-probabilities, of version 2 of the weights."""
    engine: Any = object.__new__(Engine)
    engine._settings = tiny_settings(model_path="", number=3)
    engine._tokenizer = SimpleNamespace(decode=lambda ids, **_: "text")
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [(logprob, 7, None) for logprob in logprobs],
        "weight_versions": [{"version": "2"}],
    }
    output = {"output_ids": [7] * len(logprobs), "meta_info": meta}
    return engine._continued(unbegun([1, 2]), output, Sampling(1, 8), 0)


def test_a_part_names_its_version_and_its_engine() -> None:
    (part,) = answered([-1.0, -2.0]).only_row.parts
    assert (part.version, part.num_tokens, part.engine) == (2, 2, 3)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_is_the_engines_fault(wrong: float) -> None:
    with pytest.raises(
        SilentFault, match="engine 3 returned a log-probability that is not"
    ) as caught:
        answered([-1.0, wrong])
    assert [member.number for member in caught.value.members] == [3]
