"""Objects of JSON by what they are: messages and tools of a chat, arguments of functions, rows of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
Message = Mapping[str, Any]  # of a chat, as OpenAI's `messages` have it
ToolSchema = Mapping[str, Any]  # as OpenAI's `tools` have it
CallArguments = Mapping[str, Any]  # by name: of a tool's call, or a recipe's for a user's function
Columns = Mapping[str, Any]  # a row of data: column -> value
