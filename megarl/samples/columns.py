"""The columns of a file of samples: a sample as a row of plain values and arrays, and back; what makes a row no sample.

`sample_file` describes the columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

import numpy as np

from megarl.printable import json_line, plain_value, short
from megarl.samples.accounting import sample_error
from megarl.samples.buffer import PartialGroup
from megarl.types import (
    EpisodeEnd,
    EpisodeFacts,
    EpisodeProgress,
    EpisodeRow,
    Prompt,
    Sample,
    SampleGroup,
    SamplePart,
    TranscriptCall,
    TranscriptEntry,
)
from megarl.types.reward_result import Failure, RewardResult

FORMAT = 9
FORMATS = (5, 6, 7, 8, FORMAT)  # that are read
_EPISODES_SINCE = 6
_TRANSCRIPTS_SINCE = 7
_OPEN_EPISODES_SINCE = 8
_REASONS_SINCE = 9
# others: 6
_FACTS_SINCE = {
    "reusable_tokens": 7,
    "cached_tokens": 7,
    "begun_anew": 8,
    "dropped_anew": 9,
    "seed": 9,
}
# the second had the tokens of every reason
_DROPPED = "dropped_unawaited"
_DROPPED_BEFORE = "dropped_tokens"
_EXPERT_TYPES = ("uint8", "int16")
_EXPERTS_OF = ("experts", "experts_type", "experts_shape")
_MARKS = ("own_prompt_ids", "trained", "token_rewards")
# of a conversation
_OF_ROW = ("response_ids", "engine_logp", "versions", "part_tokens", *_MARKS, *_EXPERTS_OF)
_OF_EPISODES = (*_MARKS, "more_rows", "facts", "transcript", "open_episode")
_OPTIONAL = {"given_answer", "failure", *_EXPERTS_OF, *_OF_EPISODES}
_LISTS = ("prompt_ids", *_OF_ROW[:4], *_MARKS, "experts_shape", "more_rows")


def schema(number: int = FORMAT) -> Any:
    """The columns of a format."""
    import pyarrow as pa

    ids = pa.list_(pa.int64())
    text = pa.string()
    whole = pa.int64()
    logps = pa.list_(pa.float32())
    columns = {
        "step": whole,
        "group": whole,
        "sample": whole,
        "prompt_id": text,
        "prompt": text,
        "prompt_ids": ids,
        "answer": text,
        "row": text,
        "response": text,
        "response_ids": ids,
        "engine_logp": logps,
        "finished": pa.bool_(),
        "versions": ids,
        "part_tokens": ids,
        "verifications": whole,
        "prefills": whole,
        "open": pa.bool_(),
        "given_answer": text,
        "failure": text,
        "reward": pa.float32(),
        "correct": pa.bool_(),
        "baseline": pa.bool_(),
        "experts": pa.binary(),
        "experts_type": text,
        "experts_shape": ids,
    }
    if number >= _EPISODES_SINCE:
        columns |= {"own_prompt_ids": ids, "trained": pa.list_(pa.bool_()), "token_rewards": logps}
        conversation = pa.struct([(name, columns[name]) for name in _OF_ROW])
        kinds = {"tool_s": pa.float64(), "end": text}
        facts = pa.struct([(name, kinds.get(name, whole)) for name in _facts(number)])
        columns |= {"more_rows": pa.list_(conversation), "facts": facts}
    if number >= _TRANSCRIPTS_SINCE:
        columns["transcript"] = text
    if number >= _OPEN_EPISODES_SINCE:
        columns["open_episode"] = text
    return pa.schema(list(columns.items()))


def _facts(number: int) -> list[str]:
    """The fields of EpisodeFacts, as a format names them."""
    names = [one.name for one in fields(EpisodeFacts) if number >= _FACTS_SINCE.get(one.name, 0)]
    return [
        _DROPPED_BEFORE if name == _DROPPED and number < _REASONS_SINCE else name for name in names
    ]


def row_of(step: int, number: int, group: SampleGroup | PartialGroup, index: int) -> dict[str, Any]:
    """Sample `index` of a group, which has this number in its step."""
    prompt = group.prompt
    sample = group.samples[index]
    if isinstance(group, PartialGroup):
        reward_result = group.reward_results[index]
    else:
        reward_result = RewardResult(float(group.rewards_G[index]), bool(group.correct_G[index]))
    if isinstance(reward_result, RewardResult):
        judged = reward_result
    else:
        judged = RewardResult(math.nan, False)
    first, *more = map(_conversation, sample.rows)
    return {
        "step": step,
        "group": number,
        "sample": index,
        "prompt_id": prompt.id,
        "prompt": prompt.text,
        "prompt_ids": prompt.token_ids,
        "answer": prompt.answer,
        "row": json_line(prompt.row, default=plain_value),
        "response": sample.text,
        "finished": sample.finished,
        "verifications": sample.verifications,
        "prefills": sample.prefills,
        "open": sample.is_open,
        "given_answer": judged.answer,
        "failure": reward_result.words if isinstance(reward_result, Failure) else None,
        "reward": judged.reward,
        "correct": judged.correct,
        "baseline": sample.is_baseline,
        **first,
        "more_rows": more or None,
        "facts": None if sample.facts is None else asdict(sample.facts),
        "transcript": json_line(sample.transcript) if sample.transcript else None,
        "open_episode": json.dumps(asdict(sample.open_episode)) if sample.open_episode else None,
    }


def _conversation(row: EpisodeRow) -> dict[str, Any]:
    experts = row.routed_experts
    return {
        "response_ids": row.response_ids_T,
        "engine_logp": row.engine_logp_T,
        "versions": [part.version for part in row.parts],
        "part_tokens": [part.num_tokens for part in row.parts],
        "own_prompt_ids": row.prompt_ids,
        "trained": row.trained_T,
        "token_rewards": row.token_rewards_T,
        "experts": None if experts is None else np.ascontiguousarray(experts).tobytes(),
        "experts_type": None if experts is None else experts.dtype.name,
        "experts_shape": None if experts is None else experts.shape,
    }


def rows_of(table: Any) -> list[dict[str, Any]]:
    """The rows of a table; lists of numbers are NumPy arrays, so that a float32 keeps every bit."""
    arrays = [name for name in _LISTS if name in table.column_names]
    rows = table.drop_columns(arrays).to_pylist()
    for name in arrays:
        for row, scalar in zip(rows, table[name], strict=True):
            row[name] = _array(scalar)
    return [dict.fromkeys(_OF_EPISODES) | row for row in rows]


def _array(scalar: Any) -> Any:
    """A list of numbers as an array, a list of structures as a list of dicts; None of nothing."""
    import pyarrow as pa

    if not isinstance(scalar, pa.ListScalar):
        return scalar.as_py()
    if scalar.values is None:
        return None
    if pa.types.is_struct(scalar.type.value_type):
        return [{name: _array(value) for name, value in one.items()} for one in scalar.values]
    return scalar.values.to_numpy(zero_copy_only=False).copy()


def row_error(row: dict[str, Any], step: int) -> str | None:
    """A description of what is wrong with a row, as a file that another program wrote may have it; else None."""
    if row["step"] != step:
        return f"has the step number {row['step']}"
    if empty := [name for name, value in row.items() if value is None and name not in _OPTIONAL]:
        return f"has no {empty[0]}"
    if not _is_object(row["row"]):
        return f"has the row {short(row['row'])}, which is not an object of JSON"
    may_be_empty = row["open"] or row["facts"] is not None
    for one in (row, *(row["more_rows"] or ())):
        if error := _conversation_error(one, row["prompt_ids"], may_be_empty):
            return error
    if row["facts"] and not _are_facts(row["facts"]):
        return f"has the facts {row['facts']}"
    if row["transcript"] is not None and (error := _transcript_error(row["transcript"])):
        return error
    if row["open_episode"] is not None and _open_episode(row["open_episode"]) is None:
        return "has an open episode that cannot be read"
    return sample_error(prompt_of(row), sample_of(row))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _are_facts(facts: dict[str, Any]) -> bool:
    # which an episode of an older file has not
    known = [value for name, value in facts.items() if name != "seed"]
    return None not in known and facts["end"] in get_args(EpisodeEnd)


def _transcript_error(text: str) -> str | None:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return f"has the transcript {short(text)}, which is not JSON"
    if not isinstance(entries, list):
        return f"has the transcript {short(text)}"
    wrong = (entry for entry in entries if not _is_entry(entry))
    return next((f"has a transcript with {short(entry)}" for entry in wrong), None)


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"role": str(), "text": str(), "calls": list(calls), "reward": int() | float()}:
            called = all(
                isinstance(call, dict) and set(call) == set(TranscriptCall.__annotations__)
                for call in calls
            )
            return called and set(entry) == set(TranscriptEntry.__annotations__)
    return False


def _conversation_error(
    row: dict[str, Any], prompt_ids: np.ndarray, may_be_empty: bool
) -> str | None:
    if row["own_prompt_ids"] is None:
        prompt_ids = prompt_ids
    else:
        prompt_ids = row["own_prompt_ids"]
    if empty := [name for name, value in row.items() if value is None and name not in _OPTIONAL]:
        return f"has a row without {empty[0]}"
    ids = row["response_ids"]
    logps = row["engine_logp"]
    if not len(prompt_ids) or not (len(ids) or may_be_empty) or len(ids) != len(logps):
        return f"has {len(prompt_ids)} prompt tokens, {len(ids)} response tokens and {len(logps)} logprobs"
    if min(prompt_ids.min(), ids.min(initial=0)) < 0:
        return "has a negative token id"
    versions = row["versions"]
    part_tokens = row["part_tokens"]
    is_ascending = len(versions) == len(part_tokens) and (np.diff(versions) > 0).all()
    if not is_ascending or (part_tokens < 1).any() or part_tokens.sum() != len(ids):
        return f"has parts of {part_tokens.tolist()} tokens and of versions {versions.tolist()}"
    if row["experts"] is None:
        return None
    return _experts_error(row, len(prompt_ids) + len(ids))


def _experts_error(row: dict[str, Any], num_tokens: int) -> str | None:
    if row["experts_type"] not in _EXPERT_TYPES or row["experts_shape"] is None:
        return f"has experts of type {row['experts_type']}"
    if len(row["experts_shape"]) != 3 or row["experts_shape"].min() < 0:
        return f"has experts of shape {row['experts_shape'].tolist()}"
    if row["experts_shape"][0] != num_tokens - 1:
        return f"has the experts of {row['experts_shape'][0]} tokens, and {num_tokens} tokens"
    wanted = int(np.prod(row["experts_shape"])) * np.dtype(row["experts_type"]).itemsize
    if wanted == len(row["experts"]):
        return None
    return f"has {len(row['experts'])} bytes of experts, not {wanted}"


def prompt_of(row: dict[str, Any]) -> Prompt:
    """The prompt of a row's group."""
    return Prompt(
        id=row["prompt_id"],
        text=row["prompt"],
        token_ids=tuple(row["prompt_ids"].tolist()),
        answer=row["answer"],
        row=json.loads(row["row"]),
    )


def partial_group_of(rows: Sequence[dict[str, Any]]) -> PartialGroup:
    """The group with open samples that these rows are."""
    reward_results = tuple(None if row["open"] else _reward_result(row) for row in rows)
    return PartialGroup(prompt_of(rows[0]), tuple(sample_of(row) for row in rows), reward_results)


def _reward_result(row: dict[str, Any]) -> RewardResult | Failure:
    if row["failure"] is not None:
        return Failure(row["failure"])
    return RewardResult(row["reward"], row["correct"], row["given_answer"])


def group_of(rows: Sequence[dict[str, Any]]) -> SampleGroup:
    """The complete group that these rows are."""
    return SampleGroup(
        prompt=prompt_of(rows[0]),
        samples=tuple(sample_of(row) for row in rows),
        rewards_G=np.asarray([row["reward"] for row in rows], dtype=np.float32),
        correct_G=np.asarray([row["correct"] for row in rows], dtype=np.bool_),
    )


def sample_of(row: dict[str, Any]) -> Sample:
    """The sample that a row is."""
    first, *more = (_episode_row(one) for one in (row, *(row["more_rows"] or ())))
    return Sample(
        response_ids_T=first.response_ids_T,
        engine_logp_T=first.engine_logp_T,
        text=row["response"],
        finished=row["finished"],
        parts=first.parts,
        routed_experts=first.routed_experts,
        is_baseline=row["baseline"],
        verifications=row["verifications"],
        prefills=row["prefills"],
        is_open=row["open"],
        prompt_ids=first.prompt_ids,
        trained_T=first.trained_T,
        token_rewards_T=first.token_rewards_T,
        more_rows=tuple(more),
        facts=EpisodeFacts(**_with_reasons(row["facts"])) if row["facts"] else None,
        transcript=tuple(json.loads(row["transcript"] or "[]")),
        open_episode=_open_episode(row["open_episode"]) if row["open_episode"] else None,
    )


def _with_reasons(counts: dict[str, Any]) -> dict[str, Any]:
    """The counts of an episode; those of an older file get the reason for which all of its tokens were dropped.

    Only an agent need not wait for a turn, and only an episode in phases, which agents do not have, begins anew.
    """
    if _DROPPED_BEFORE not in counts:
        return counts
    if counts.get("begun_anew"):
        reason = "dropped_anew"
    else:
        reason = _DROPPED
    return {reason if name == _DROPPED_BEFORE else name: value for name, value in counts.items()}


def _open_episode(text: str) -> EpisodeProgress | None:
    """None where the text is not one."""
    try:
        found = json.loads(text)
        for name in ("digests", "said", "messages"):
            found[name] = None if found[name] is None else tuple(found[name])
        found["account"] = _with_reasons(found["account"])
        if len(found) == len(fields(EpisodeProgress)):
            return EpisodeProgress(**found)
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _episode_row(row: dict[str, Any]) -> EpisodeRow:
    experts = None
    if row["experts"] is not None:
        flat = np.frombuffer(row["experts"], dtype=row["experts_type"])
        experts = flat.reshape(row["experts_shape"]).copy()  # writable, as the engine's own
    return EpisodeRow(
        response_ids_T=row["response_ids"],
        engine_logp_T=row["engine_logp"],
        parts=tuple(map(SamplePart, row["versions"].tolist(), row["part_tokens"].tolist())),
        prompt_ids=row["own_prompt_ids"],
        trained_T=row["trained"],
        token_rewards_T=row["token_rewards"],
        routed_experts=experts,
    )
