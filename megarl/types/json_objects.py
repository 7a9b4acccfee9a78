"""Objects of JSON by what they are: messages and tools of a chat, arguments of functions, rows of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
Message = Mapping[str, Any]  # of a chat, as OpenAI's `messages` have it
ToolSchema = Mapping[str, Any]  # as OpenAI's `tools` have it
CallArguments = Mapping[str, Any]  # by name: of a tool's call, or a recipe's for a user's function
Columns = Mapping[str, Any]  # a row of data: column -> value


def depth(value: list[Any] | dict[str, Any]) -> int:
    """How deeply lists and objects are nested."""
    levels = 0
    level: list[Any] = [value]
    while level:
        levels += 1
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return levels
