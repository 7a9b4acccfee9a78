"""Reads sample files of format 9: a sample's first row is in columns of its own, further rows are in `more_rows`.

Checkpoints of 24 November 2026 have their waiting groups in such files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.samples import columns
from megarl.types.json_objects import Columns

FORMAT = 9
_OWN_PROMPT = "own_prompt_ids"
_MORE_ROWS = "more_rows"
_FLAT = (
    "response_ids",
    "engine_logp",
    "versions",
    "part_tokens",
    _OWN_PROMPT,
    "trained",
    "token_rewards",
    "experts",
    "experts_type",
    "experts_shape",
)


def schema() -> Any:
    """The columns of a file, in no order."""
    import pyarrow as pa

    now = {field.name: field.type for field in columns.schema()}
    of_row = {field.name: field.type for field in now.pop("rows").value_type}
    of_row[_OWN_PROMPT] = of_row.pop("prompt_ids")
    flat = {name: of_row[name] for name in _FLAT}
    return pa.schema([*{**now, **flat, _MORE_ROWS: pa.list_(pa.struct([*flat.items()]))}.items()])


def upgraded(row: Columns) -> Columns:
    """A row of such a file as a row of `columns.FORMAT`."""
    flat = {name: row[name] for name in _FLAT}
    others = {name: row[name] for name in row.keys() - {*_FLAT, _MORE_ROWS}}
    conversations = [flat, *(row[_MORE_ROWS] or ())]
    return {**others, "rows": [_conversation(conversation) for conversation in conversations]}


def _conversation(flat: Columns) -> Columns:
    """A row of a sample; where nothing said which tokens the model sampled it sampled all."""
    conversation = dict(flat)
    conversation["prompt_ids"] = conversation.pop(_OWN_PROMPT)
    ids = flat["response_ids"]
    if flat["trained"] is None and ids is not None:
        conversation["trained"] = np.ones(len(ids), np.bool_)
    return conversation
