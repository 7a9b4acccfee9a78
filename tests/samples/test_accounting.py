"""The account of an episode's tokens: what the controller is told of it, and which account is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.samples.accounting import sample_error, trained_parts
from megarl.samples.buffer import PartialGroup, PartialSummary
from megarl.samples.summaries import partial_summary, summary
from megarl.types import (
    UNKNOWN_ENGINE,
    EpisodeFacts,
    FloatArray,
    Prompt,
    Row,
    RowSummary,
    Sample,
    SampleGroup,
    SamplePart,
    num_stale,
    with_part,
)
from tests.samples.responses import response
from tests.training.episodes import cut, episode, sample_of

PROMPT = Prompt("rows.jsonl:1", "1+2=", (1, 2, 3), "3")
OWN = (8, 9, 8, 9)


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def first_row(**changes: Any) -> Row:
    """A turn of two tokens, an observation of two, a turn of one; the second turn by newer weights."""
    row = Row(
        PROMPT.token_ids, np.array([5, 6, 7, 8, 9]), floats(-1, -2, 0, 0, -3),
        np.array([True, True, False, False, True]), (SamplePart(3, 4), SamplePart(4, 1)),
        token_rewards_T=floats(0, 0.5, 0, 0, -0.25), routed_experts=np.zeros((7, 2, 2), np.uint8),
    )  # fmt: skip
    return replace(row, **changes)


def later_row(**changes: Any) -> Row:
    row = Row.response(OWN, np.array([5, 6]), floats(-1, -1), (SamplePart(4, 2),))
    return replace(row, **changes)


def group(*samples: Sample) -> SampleGroup:
    return SampleGroup(
        PROMPT, samples, np.ones(len(samples), np.float32), np.ones(len(samples), np.bool_)
    )


def test_a_summary_has_the_rows_and_what_of_them_was_sampled() -> None:
    plain = response(PROMPT.token_ids, np.arange(4), text="xy", finished=False, version=4)
    of_rows = sample_of([first_row(), later_row()])
    short = summary(replace(group(of_rows, plain), correct_G=np.array([False, True])))
    assert (short.prompt_text, short.answer) == (PROMPT.text, PROMPT.answer)
    assert short.responses == (of_rows.text, "xy")
    assert short.finished_G.tolist() == [of_rows.finished, False]
    assert short.correct_G.tolist() == [False, True]
    assert short.rows == (
        (
            RowSummary(8, 5, 3, (SamplePart(3, 2), SamplePart(4, 1)), has_group_prompt=True),
            RowSummary(6, 2, 2, (SamplePart(4, 2),)),
        ),
        (RowSummary(7, 4, 4, (SamplePart(4, 4),), has_group_prompt=True),),
    )
    assert short.response_lengths_G.tolist() == [5, 4]
    assert short.parts_G == ((SamplePart(3, 2), SamplePart(4, 3)), (SamplePart(4, 4),))
    assert short.turn_rewards_G is not None and short.turn_rewards_G.tolist() == [0.25, 0.0]
    assert short.total_rewards_G.tolist() == [1.25, 1.0] and short.rewards_G.tolist() == [1.0, 1.0]
    assert short.facts == (of_rows.facts, None)
    of_plain = summary(group(plain))
    assert of_plain.turn_rewards_G is None and of_plain.total_rewards_G is of_plain.rewards_G


def test_an_open_episode_is_as_long_as_its_longest_row() -> None:
    opened = replace(
        sample_of([first_row(), later_row()]), is_open=True, finished=False, facts=None
    )
    other = replace(sample_of([later_row()]), is_open=True, finished=False, facts=None)
    assert partial_summary(PartialGroup(PROMPT, (opened, other), (None, None))) == PartialSummary(
        2, 8
    )


@given(
    turns=st.integers(1, 6),
    seed=st.integers(0, 999),
    before=st.lists(st.integers(1, 6), max_size=3),
)
def test_parts_are_of_sampled_tokens_however_the_episode_is_cut(
    turns: int, seed: int, before: list[int]
) -> None:
    """So is the number of stale tokens: the first ones of each row."""
    whole = episode(PROMPT, np.random.default_rng(seed), turns)
    rows = cut(whole, before)
    assert sample_error(whole) is None and sample_error(rows) is None
    parts = whole.only_row.parts
    versions_T = np.repeat([part.version for part in parts], [part.num_tokens for part in parts])
    sampled = versions_T[whole.only_row.trained_T].tolist()
    for sample in (whole, rows):
        (sample_parts,) = summary(group(sample)).parts_G
        assert [part.version for part in sample_parts for _ in range(part.num_tokens)] == sampled
        for version in (2, 3, 4, 5):
            stale = [num_stale(trained_parts(row), version) for row in sample.rows]
            assert sum(stale) == sum(of < version for of in sampled)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (first_row(engine_logp_T=floats(-1, -2, 0, -1, -3)), "a row 0 with a logprob of a token that"),
        (first_row(token_rewards_T=floats(0, 0, 1, 0, 0)), "a row 0 with a reward of a token that"),
        (first_row(trained_T=np.array([True, True, False, False])), "a row 0 with 5 tokens and 4 marks of trained"),
        (first_row(token_rewards_T=floats(1)), "a row 0 with 5 tokens and 1 rewards"),
        (first_row(engine_logp_T=floats(1, 2)), "a row 0 with 5 tokens and 2 logprobs"),
        (first_row(parts=(SamplePart(3, 4),)), "a row 0 with 5 tokens and parts of 4"),
        (first_row(routed_experts=np.zeros((8, 2, 2))), "a row 0 with 8 tokens of prompt and response, and the exp"),
        (
            first_row(trained_T=np.array([True, True, True, False, False]), engine_logp_T=floats(-1, -1, -1, 0, 0),
                      token_rewards_T=None),
            "a row 0 with tokens after the last that the model sampled",
        ),
    ],
)  # fmt: skip
def test_an_account_that_is_wrong_stops_the_step(row: Row, says: str) -> None:
    with pytest.raises(RuntimeError, match=f"rows.jsonl:1: sample 0 has {says}"):
        summary(group(sample_of([row, later_row()])))


@pytest.mark.parametrize(
    ("sampled", "unawaited", "anew"), [(6, 0, 0), (5, 1, 0), (5, 0, 1), (4, 0, 0), (6, 1, 1)]
)
def test_each_sampled_token_is_in_a_row_or_dropped_for_a_reason(
    sampled: int, unawaited: int, anew: int
) -> None:
    facts = EpisodeFacts(3, 2, 0, 0.0, "done", sampled, unawaited, anew)
    dropped = f"of which {unawaited + anew} were dropped (unawaited {unawaited}, anew {anew})"
    problem = f"has 5 tokens to train on, and {sampled} tokens that the engine sampled, {dropped}"
    with pytest.raises(RuntimeError, match=re.escape(problem)):
        summary(group(sample_of([first_row(), later_row()], facts=facts)))
    right = replace(facts, sampled_tokens=8, dropped_unawaited=2, dropped_anew=1)
    assert summary(group(sample_of([first_row(), later_row()], facts=right))).facts == (right,)


def test_a_part_is_of_one_engine_or_of_none_that_is_known() -> None:
    """Parts of one version are one part, whichever engines sampled them."""
    begun = with_part((), SamplePart(3, 2, engine=1))
    (same,) = with_part(begun, SamplePart(3, 4, engine=1))
    assert (same, same.engine) == (SamplePart(3, 6), 1)
    (mixed,) = with_part(begun, SamplePart(3, 4, engine=0))
    assert (mixed, mixed.engine) == (SamplePart(3, 6), UNKNOWN_ENGINE)
    assert [part.engine for part in with_part(begun, SamplePart(4, 4, engine=0))] == [1, 0]


def test_the_trained_tokens_of_a_part_keep_its_engine() -> None:
    row = Row(
        OWN,
        np.array([5, 6, 7]),
        floats(-1, 0, -1),
        np.array([True, False, True]),
        (SamplePart(3, 2, engine=4), SamplePart(4, 1, engine=0)),
    )
    assert [(part.num_tokens, part.engine) for part in trained_parts(row)] == [(1, 4), (1, 0)]
