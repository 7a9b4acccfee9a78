"""The columns of a file of samples: a sample as a row of plain values and arrays, and back; what makes a row no sample.

`parquet` describes the columns. Here `row` is a row of the file, and a conversation a row of the sample.
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
    Prompt,
    Row,
    Sample,
    SampleGroup,
    SamplePart,
    TranscriptCall,
    TranscriptEntry,
)
from megarl.types.json_objects import Columns
from megarl.types.reward_result import Failure, RewardResult

FORMAT = 10
_EXPERT_TYPES = ("uint8", "int16")
_OPTIONAL = {"given_answer", "failure", "facts", "transcript", "open_episode"}
_OPTIONAL_IN_ROWS = {"prompt_ids", "token_rewards", "experts", "experts_type", "experts_shape"}


def schema() -> Any:
    """The columns of a file."""
    import pyarrow as pa

    ids = pa.list_(pa.int64())
    text = pa.string()
    whole = pa.int64()
    logps = pa.list_(pa.float32())
    row = {
        "prompt_ids": ids,
        "response_ids": ids,
        "engine_logp": logps,
        "trained": pa.list_(pa.bool_()),
        "versions": ids,
        "part_tokens": ids,
        "token_rewards": logps,
        "experts": pa.binary(),
        "experts_type": text,
        "experts_shape": ids,
    }
    kinds = {"tool_s": pa.float64(), "end": text}
    facts = {field.name: kinds.get(field.name, whole) for field in fields(EpisodeFacts)}
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
        "finished": pa.bool_(),
        "open": pa.bool_(),
        "baseline": pa.bool_(),
        "verifications": whole,
        "prefills": whole,
        "reward": pa.float32(),
        "correct": pa.bool_(),
        "given_answer": text,
        "failure": text,
        "rows": pa.list_(pa.struct(list(row.items()))),
        "facts": pa.struct(list(facts.items())),
        "transcript": text,
        "open_episode": text,
    }
    return pa.schema(list(columns.items()))


def row_of(step: int, number: int, group: SampleGroup | PartialGroup, index: int) -> Columns:
    """Sample `index` of a group, which has this number in its step."""
    prompt = group.prompt
    sample = group.samples[index]
    if isinstance(group, PartialGroup):
        reward_result = group.reward_results[index]
    else:
        reward_result = RewardResult(float(group.rewards_G[index]), bool(group.correct_G[index]))
    scored = reward_result
    if not isinstance(scored, RewardResult):
        scored = RewardResult(math.nan, False)
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
        "open": sample.is_open,
        "baseline": sample.is_baseline,
        "verifications": sample.verifications,
        "prefills": sample.prefills,
        "reward": scored.reward,
        "correct": scored.correct,
        "given_answer": scored.answer,
        "failure": reward_result.words if isinstance(reward_result, Failure) else None,
        "rows": [_columns_of(row, prompt) for row in sample.rows],
        "facts": None if sample.facts is None else asdict(sample.facts),
        "transcript": json_line(sample.transcript) if sample.transcript else None,
        "open_episode": json.dumps(asdict(sample.open_episode)) if sample.open_episode else None,
    }


def _columns_of(row: Row, prompt: Prompt) -> Columns:
    experts = row.routed_experts
    is_groups_prompt = np.array_equal(row.prompt_ids, prompt.token_ids)
    return {
        "prompt_ids": None if is_groups_prompt else row.prompt_ids,
        "response_ids": row.response_ids_T,
        "engine_logp": row.engine_logp_T,
        "trained": row.trained_T,
        "versions": [part.version for part in row.parts],
        "part_tokens": [part.num_tokens for part in row.parts],
        "token_rewards": row.token_rewards_T,
        "experts": None if experts is None else np.ascontiguousarray(experts).tobytes(),
        "experts_type": None if experts is None else experts.dtype.name,
        "experts_shape": None if experts is None else experts.shape,
    }


def table_rows(table: Any) -> list[Columns]:
    """The rows of a table; lists of numbers are NumPy arrays, so that a float32 keeps every bit."""
    import pyarrow as pa

    lists = [field.name for field in table.schema if pa.types.is_list(field.type)]
    rows = table.drop_columns(lists).to_pylist()
    for name in lists:
        for row, scalar in zip(rows, table[name], strict=True):
            row[name] = _array(scalar)
    return rows


def _array(scalar: Any) -> Any:
    """A list of numbers as an array, a list of structures as a list of dicts; None of nothing."""
    import pyarrow as pa

    if not isinstance(scalar, pa.ListScalar):
        return scalar.as_py()
    if scalar.values is None:
        return None
    if pa.types.is_struct(scalar.type.value_type):
        return [{name: _array(value) for name, value in struct.items()} for struct in scalar.values]
    return scalar.values.to_numpy(zero_copy_only=False).copy()


def row_error(row: Columns, step: int) -> str | None:
    """A description of what is wrong with a row, as a file that another program wrote may have it; else None."""
    if row["step"] != step:
        return f"has the step number {row['step']}"
    if empty := [name for name, value in row.items() if value is None and name not in _OPTIONAL]:
        return f"has no {empty[0]}"
    if not isinstance(_read_json(row["row"]), dict):
        return f"has the row {short(row['row'])}, which is not an object of JSON"
    if not row["rows"]:
        return "has no rows"
    may_be_empty = row["open"] or row["facts"] is not None
    for conversation in row["rows"]:
        if error := _conversation_error(conversation, row["prompt_ids"], may_be_empty):
            return error
    if row["facts"] and not _are_facts(row["facts"]):
        return f"has the facts {row['facts']}"
    if row["transcript"] is not None and (error := _transcript_error(row["transcript"])):
        return error
    if row["open_episode"] is not None and _open_episode(row["open_episode"]) is None:
        return "has an open episode that cannot be read"
    return sample_error(sample_of(row, prompt_of(row)))


def _read_json(text: str) -> Any:
    """The value; None where the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _are_facts(facts: Columns) -> bool:
    known = [value for name, value in facts.items() if name != "seed"]
    return None not in known and facts["end"] in get_args(EpisodeEnd)


def _transcript_error(text: str) -> str | None:
    entries = _read_json(text)
    if not isinstance(entries, list):
        return f"has the transcript {short(text)}, which is not a list in JSON"
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


def _conversation_error(row: Columns, prompt_ids: np.ndarray, may_be_empty: bool) -> str | None:
    """What makes the row none that a `Row` can be made of, or a wrong one that `sample_error` takes."""
    for name, value in row.items():
        if value is None and name not in _OPTIONAL_IN_ROWS:
            return f"has a row without {name}"
    if row["prompt_ids"] is not None:
        prompt_ids = row["prompt_ids"]
    ids = row["response_ids"]
    if not len(prompt_ids) or not (len(ids) or may_be_empty):
        return f"has {len(prompt_ids)} prompt tokens and {len(ids)} response tokens"
    if min(prompt_ids.min(), ids.min(initial=0)) < 0:
        return "has a negative token id"
    versions = row["versions"]
    part_tokens = row["part_tokens"]
    is_ascending = len(versions) == len(part_tokens) and (np.diff(versions) > 0).all()
    if not is_ascending or (part_tokens < 1).any():
        return f"has parts of {part_tokens.tolist()} tokens and of versions {versions.tolist()}"
    if row["experts"] is None:
        return None
    shape = row["experts_shape"]
    if row["experts_type"] not in _EXPERT_TYPES or shape is None:
        return f"has experts of type {row['experts_type']}"
    if len(shape) != 3 or shape.min() < 0:
        return f"has experts of shape {shape.tolist()}"
    num_bytes = int(np.prod(shape)) * np.dtype(row["experts_type"]).itemsize
    if num_bytes != len(row["experts"]):
        return f"has {len(row['experts'])} bytes of experts, not {num_bytes}"
    return None


def prompt_of(row: Columns) -> Prompt:
    """The prompt of a row's group."""
    return Prompt(
        id=row["prompt_id"],
        text=row["prompt"],
        token_ids=tuple(row["prompt_ids"].tolist()),
        answer=row["answer"],
        row=json.loads(row["row"]),
    )


def group_of(rows: Sequence[Columns]) -> SampleGroup | PartialGroup:
    """The group that these rows are: a partial one where it has an open sample."""
    prompt = prompt_of(rows[0])
    samples = tuple(sample_of(row, prompt) for row in rows)
    if any(sample.is_open for sample in samples):
        reward_results = tuple(None if row["open"] else _reward_result(row) for row in rows)
        return PartialGroup(prompt, samples, reward_results)
    return SampleGroup(
        prompt,
        samples,
        rewards_G=np.asarray([row["reward"] for row in rows], dtype=np.float32),
        correct_G=np.asarray([row["correct"] for row in rows], dtype=np.bool_),
    )


def _reward_result(row: Columns) -> RewardResult | Failure:
    if row["failure"] is not None:
        return Failure(row["failure"])
    return RewardResult(row["reward"], row["correct"], row["given_answer"])


def sample_of(row: Columns, prompt: Prompt) -> Sample:
    """The sample that a row is; prompt: of its group."""
    return Sample(
        rows=tuple(_conversation_of(conversation, prompt) for conversation in row["rows"]),
        text=row["response"],
        finished=row["finished"],
        is_open=row["open"],
        is_baseline=row["baseline"],
        verifications=row["verifications"],
        prefills=row["prefills"],
        facts=EpisodeFacts(**row["facts"]) if row["facts"] else None,
        transcript=tuple(json.loads(row["transcript"] or "[]")),
        open_episode=_open_episode(row["open_episode"]) if row["open_episode"] else None,
    )


def _open_episode(text: str) -> EpisodeProgress | None:
    """None where the text is not one."""
    try:
        progress = json.loads(text)
        for name in ("digests", "said", "messages"):
            progress[name] = None if progress[name] is None else tuple(progress[name])
        if len(progress) == len(fields(EpisodeProgress)):
            return EpisodeProgress(**progress)
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _conversation_of(row: Columns, prompt: Prompt) -> Row:
    prompt_ids = prompt.token_ids
    if row["prompt_ids"] is not None:
        prompt_ids = tuple(row["prompt_ids"].tolist())
    experts = None
    if row["experts"] is not None:
        flat = np.frombuffer(row["experts"], dtype=row["experts_type"])
        experts = flat.reshape(row["experts_shape"]).copy()  # writable, as the engine's own
    return Row(
        prompt_ids=prompt_ids,
        response_ids_T=row["response_ids"],
        engine_logp_T=row["engine_logp"],
        trained_T=row["trained"],
        parts=tuple(map(SamplePart, row["versions"].tolist(), row["part_tokens"].tolist())),
        token_rewards_T=row["token_rewards"],
        routed_experts=experts,
    )
