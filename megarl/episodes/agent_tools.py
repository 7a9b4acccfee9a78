"""How one model reads and writes the messages of agents, whose tools every request may name anew."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

from megarl.environments.agents.chat import AgentCall, ChatRefused
from megarl.episodes.call_probe import FoundFormat, find_format
from megarl.episodes.template import has_half_pair
from megarl.episodes.tool_calls import CallFormat, Turn
from megarl.episodes.turn_tokenizer import TurnTokenizer
from megarl.types import UserError
from megarl.types.json_objects import Message, ToolSchema

_KEPT = 64  # sets of tools
_MOST_CHARACTERS = 2**18  # of the tools of a request as JSON
_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "A probe.", "parameters": {}},
}


@dataclass(frozen=True)
class ToolSet:
    """Of one set of tools: the splice, and the format of calls, None without tools. key: equal for equal tools."""

    key: str
    turn_tokenizer: TurnTokenizer
    calls: CallFormat | None

    def read(self, text: str, *, after_tools: bool) -> Turn:
        """Read the text of a turn."""
        if self.calls:
            return self.calls.read(text, after_tools=after_tools)
        return Turn(text)


class ToolSets:
    """The sets of tools that agents have named so far, the last ones. May be used in any thread."""

    def __init__(self, tokenizer: Any, stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._sets: OrderedDict[str, ToolSet] = OrderedDict()
        self._lock = Lock()

    def of(self, schemas: Sequence[ToolSchema]) -> ToolSet:
        """Raises ChatRefused where the schemas are wrong, or the model's template writes no calls."""
        key = json.dumps(schemas, sort_keys=True)
        if len(key) > _MOST_CHARACTERS:
            raise ChatRefused(
                f"the tools have {len(key)} characters of JSON, and {_MOST_CHARACTERS} are allowed"
            )
        if has_half_pair(schemas):
            raise ChatRefused("the tools have half a surrogate pair, which is no character")
        with self._lock:
            if key not in self._sets:
                self._sets[key] = self._made(key, schemas)
                if len(self._sets) > _KEPT:
                    self._sets.popitem(last=False)
            self._sets.move_to_end(key)
            return self._sets[key]

    def refusal(self) -> str | None:
        """Why the model cannot be given any tools; None: it can."""
        try:
            self.of([_PROBE])
        except ChatRefused as refusal:
            return str(refusal)
        return None

    def _made(self, key: str, schemas: Sequence[ToolSchema]) -> ToolSet:
        try:
            turn_tokenizer = TurnTokenizer(self._tokenizer, self._stop_ids, schemas)
            if not schemas:
                return ToolSet(key, turn_tokenizer, None)
            return ToolSet(
                key,
                turn_tokenizer,
                CallFormat.of(self._format, self._tokenizer, schemas, are_users=False),
            )
        except UserError as error:
            raise ChatRefused(f"the tools cannot be used: {error.problem}") from error

    @cached_property
    def _format(self) -> FoundFormat:
        return find_format(self._tokenizer, self._stop_ids)


def calls_of(message: Message) -> tuple[AgentCall, ...]:
    """The calls of an assistant's message."""
    return tuple(
        AgentCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
