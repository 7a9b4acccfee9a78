"""Episodes in files of samples: every bit comes back, and files of other formats are refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.isolation.process import as_line
from megarl.samples.buffer import PartialGroup
from megarl.samples.parquet import open_samples, writing
from megarl.types import (
    EpisodeFacts,
    EpisodeProgress,
    Prompt,
    Row,
    Sample,
    SampleGroup,
    TranscriptCall,
    TranscriptEntry,
    UserError,
)
from megarl.types.reward_result import RewardResult
from tests.samples.responses import refusal, response, with_row
from tests.training.episodes import cut, episode

PROMPT = Prompt("rows.jsonl:1", "1+2=", (1, 2, 3), "3")
SEED = 2**63 - 1
FACTS = EpisodeFacts(3, 2, 1, 0.1, "bad_calls", 9, 1, 1, 40, 30, 1, SEED)
CALL: TranscriptCall = {
    "name": "say",
    "arguments": {"words": "\ud800\u2028"},
    "result": "x",
    "error": None,
}
TRANSCRIPT: tuple[TranscriptEntry, ...] = (
    {"role": "user", "text": "\x1b[2J", "calls": [], "reward": 0.0},
    {"role": "assistant", "text": "so", "calls": [CALL], "reward": 0.1},
)
NOTHING = np.zeros(0, np.int64)


def plain(rows: list[Any]) -> list[Any]:
    """Everything about a sample or its rows, arrays with their types and bytes."""

    def of(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
        is_rows = isinstance(value, tuple) and all(isinstance(row, Row) for row in value)
        return plain(list(value)) if is_rows else value

    return [{name: of(value) for name, value in row.__dict__.items()} for row in rows]


def group_of(*samples: Sample) -> SampleGroup:
    rewards_G = np.arange(len(samples), dtype=np.float32)
    return SampleGroup(PROMPT, samples, rewards_G, rewards_G > 0)


def read(path: Path, *groups: SampleGroup) -> list[SampleGroup]:
    with writing(path, 99, 1.0) as file:
        file.write(groups)
    return open_samples(path).groups(1)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 9999),
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    pays=st.booleans(),
)
def test_every_bit_of_every_row_comes_back(
    tmp_path_factory: Any, seed: int, turns: list[int], pays: bool
) -> None:
    """Whole, cut into rows with experts of their own, with an own prompt; and plain samples beside them."""
    rng = np.random.default_rng(seed)
    whole = [episode(PROMPT, rng, count, pays=pays) for count in turns]
    rows = [cut(sample, rng.integers(1, 4, 2).tolist()) for sample in whole]
    routed = [
        replace(row, routed_experts=rng.integers(0, 8, (row.num_tokens - 1, 2, 2)).astype(np.int16))
        for row in rows[0].rows
    ]
    other = replace(rows[0], rows=tuple(routed))
    reprompted = with_row(whole[0], prompt_ids=(9, 9, 9, 9))
    usual = response(PROMPT.token_ids, np.arange(3), np.full(3, -0.1, np.float32), "x", version=1)
    given_groups = [group_of(*whole, *rows, usual), group_of(other, reprompted), group_of(usual)]
    groups = read(tmp_path_factory.mktemp("file") / "f.parquet", *given_groups)
    assert [plain(list(group.samples)) for group in groups] == [
        plain(list(group.samples)) for group in given_groups
    ]


def test_what_happened_comes_back_and_an_episode_may_have_no_token(tmp_path: Path) -> None:
    """As that of an agent that never asked the model, or one that is open before its first turn."""
    facts = replace(FACTS, sampled_tokens=2, seed=None)
    silent = response(PROMPT.token_ids, NOTHING, finished=False, facts=facts)
    played = episode(PROMPT, np.random.default_rng(0), 2)
    played = replace(
        played, facts=replace(FACTS, sampled_tokens=played.num_trained + 2), transcript=TRANSCRIPT
    )
    (group,) = read(tmp_path / "f.parquet", group_of(silent, played))
    assert [sample.facts for sample in group.samples] == [silent.facts, played.facts]
    assert [sample.transcript for sample in group.samples] == [(), TRANSCRIPT]
    assert plain(list(group.samples)) == plain([silent, played])
    unbegun = response(
        PROMPT.token_ids,
        NOTHING,
        finished=False,
        is_open=True,
        open_episode=EpisodeProgress(1, {"tool_s": 0.1}),
    )
    account = {
        "turns": 1,
        "tool_s": 0.1 + 0.2,
        "sampled_tokens": played.num_trained + 2,
        "dropped_anew": 2,
    }
    opened = EpisodeProgress(
        *(2, account, "message", 1 / 3, ("0f" * 64,), 3, (5, 2**31)),
        *(({"role": "user", "content": "\u2713 \ud800"},), '[[[["open"], null]]]', True, 2),
    )
    waiting = replace(played, is_open=True, finished=False, facts=None, open_episode=opened)
    partial = PartialGroup(
        PROMPT, (played, waiting, unbegun), (RewardResult(1.0, True), None, None)
    )
    with writing(tmp_path / "buffer.parquet", 99, 1.0) as file:
        file.write([partial])
    (buffered,) = open_samples(tmp_path / "buffer.parquet").buffered_groups()
    assert plain(list(buffered.samples)) == plain(list(partial.samples))
    assert [sample.open_episode for sample in buffered.samples] == [
        None,
        opened,
        unbegun.open_episode,
    ]
    dropped = replace(waiting, open_episode=replace(opened, account=account | {"dropped_anew": 0}))
    unread = replace(waiting, open_episode=FACTS)  # type: ignore[arg-type]
    for bad, says in ((dropped, "were dropped"), (unread, "an open episode that cannot be read")):
        with writing(tmp_path / "bad.parquet", 99, 1.0) as file:
            file.write([replace(partial, samples=(played, bad, unbegun))])
        with pytest.raises(UserError, match=says):
            list(open_samples(tmp_path / "bad.parquet").buffered_groups())


@pytest.mark.parametrize("number", [5, 6, 7, 8, 9, 11, [10]])
def test_a_file_of_another_format_is_refused_by_its_number(tmp_path: Path, number: Any) -> None:
    path = tmp_path / "f.parquet"
    read(path, group_of(episode(PROMPT, np.random.default_rng(0), 2)))
    ours = json.dumps({"format": number, "vocab_size": 99, "temperature": 1.0}).encode()
    table = pyarrow.parquet.read_table(path).replace_schema_metadata({b"megarl": ours})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(UserError) as caught:
        open_samples(path)
    problem = f"its format is {number}, this version reads 9 and 10"
    assert str(caught.value) == f"{path}: {problem}; make it again with `megarl rollout --out`"


def test_rows_that_make_no_episode_are_refused(tmp_path: Path) -> None:
    """By another program that writes our columns."""
    path, sample = tmp_path / "f.parquet", cut(episode(PROMPT, np.random.default_rng(3), 3), [1])
    read(path, group_of(sample))
    whole = path.read_bytes()
    first, second = pyarrow.parquet.read_table(path).to_pylist()[0]["rows"]
    facts = asdict(sample.facts)  # type: ignore[arg-type]
    for column, value, says in (
        (
            "rows",
            [first | {"trained": [True] * 9}, second],
            "has a row 0 with . tokens and 9 marks of trained tokens",
        ),
        (
            "rows",
            [first | {"token_rewards": [0.5] * 9}, second],
            "has a row 0 with . tokens and 9 rewards",
        ),
        ("rows", [first | {"prompt_ids": []}, second], "has 0 prompt tokens"),
        ("rows", [first, second | {"response_ids": None}], "has a row without response_ids"),
        ("rows", [first, None], "has a row without response_ids"),
        (
            "rows",
            [first, second | {"response_ids": [-1], "engine_logp": [0.0]}],
            "has a negative token id",
        ),
        ("rows", [first], r"has \d+ tokens to train on, and \d+ tokens that the engine sampled"),
        ("facts", facts | {"end": "bored"}, "has the facts .*bored"),
        ("facts", facts | {"turns": None}, "has the facts "),
        ("transcript", "[", "has the transcript '.', which is not a list in JSON"),
        ("transcript", '{"role": "user"}', "has the transcript "),
        (
            "transcript",
            '[{"role": "user", "text": 1}]',
            "has a transcript with {'role': 'user', 'text': 1}",
        ),
        ("transcript", json.dumps([TRANSCRIPT[0] | {"calls": [{}]}]), "has a transcript with "),
    ):
        path.write_bytes(whole)
        changed = {column: value}
        problem = refusal(path, lambda rows, changed=changed: rows[0].update(changed), says)
        assert problem.startswith("sample 0 of step 1 ")


def test_a_data_row_is_what_the_processes_of_environments_get(tmp_path: Path) -> None:
    """Also where its values have no type in JSON."""
    row = {
        "many": np.arange(2),
        "raw": b"x\xff",
        "day": date(2026, 1, 2),
        "text": "\ud800\u2028",
        "number": 0.1,
    }
    prompt = replace(PROMPT, row=row)
    whole = replace(group_of(episode(PROMPT, np.random.default_rng(0), 1)), prompt=prompt)
    (group,) = read(tmp_path / "f.parquet", whole)
    assert group.prompt.row == json.loads(as_line(row)) and group.prompt.row["many"] == [0, 1]
