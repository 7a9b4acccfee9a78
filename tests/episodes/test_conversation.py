"""A conversation's row is what the engine was given and what it sampled, in one phase or in several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.episodes.conversation import Conversation
from tests.samples.responses import response


def conversation() -> Conversation:
    chat = Conversation([1, 2])
    chat.add_turn(response([1, 2], np.array([5, 6])))
    return chat


def test_a_row_that_was_changed_between_two_phases_is_found() -> None:
    chat = conversation()
    row = chat.row()
    assert Conversation.restored(row, row.prompt_ids, chat.digest).ids == [1, 2, 5, 6]
    changed = replace(row, response_ids_T=row.response_ids_T + 1)
    with pytest.raises(RuntimeError, match="other tokens than its phase has left"):
        Conversation.restored(changed, row.prompt_ids, chat.digest)


def test_a_turn_after_other_tokens_than_the_conversations_is_refused() -> None:
    chat = conversation()
    chat.add_message([7])
    with pytest.raises(RuntimeError, match="3 tokens that are not the 5 of its conversation"):
        chat.add_turn(response([1, 2, 5], np.array([8])))
    chat.add_turn(response([1, 2, 5, 6, 7], np.array([8])))
    row = chat.row()
    assert row.trained_T.tolist() == [True, True, False, True]
    assert [part.num_tokens for part in row.parts] == [4]
