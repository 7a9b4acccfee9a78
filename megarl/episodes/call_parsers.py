"""SGLang's tool-call parsers, one for each format that it knows, on text alone and without a server.

Importing this module imports SGLang (seconds).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.cpu import sglang_patches
from megarl.device import DEVICE
from megarl.types.json_objects import ToolSchema

with sglang_patches.quiet_import():
    if DEVICE == "cpu":
        sglang_patches.prepare()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

# A broken call is told to the model and counted; SGLang would write a line for each to the log.
logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
# calls of unknown tools would be left out without a word
os.environ["SGLANG_FORWARD_UNKNOWN_TOOLS"] = "true"


def _formats() -> tuple[str, ...]:
    """SGLang's formats in the order of its own table, each parser by its first name."""
    first: dict[Any, str] = {}
    for name, reader in FunctionCallParser.ToolCallParserEnum.items():
        first.setdefault(reader, name)
    return tuple(first.values())


FORMATS = _formats()
_READ = ("name", "description", "parameters")  # keys of a tool's function


@dataclass(frozen=True)
class ParsedCalls:
    """A turn as a reader sees it: the text beside its calls, and (name, arguments as JSON) of each call that it read.

    tries_calls: whether the text has the format's opening of a call, read or not.
    """

    text: str
    calls: tuple[tuple[str | None, str], ...]
    tries_calls: bool


class CallParser:
    """The reader of one of FORMATS, for tools in OpenAI's form; most readers read calls of unknown tools too."""

    def __init__(self, name: str, schemas: Sequence[ToolSchema], tokenizer: Any) -> None:
        self.name = name
        self._tokenizer = tokenizer
        functions = [schema["function"] for schema in schemas]
        self._tools = [
            Tool.model_validate({"function": {key: function.get(key) for key in _READ}})
            for function in functions
        ]

    def read(self, text: str) -> ParsedCalls:
        """Read a turn's text; a reader that raises has read nothing."""
        # readers keep a stream's state
        parser = FunctionCallParser(self._tools, self.name, self._tokenizer)
        try:
            tries = parser.has_tool_call(text)
            normal_text, calls = parser.parse_non_stream(text)
        except Exception:  # a reader raises whatever the JSON of a broken call leads it to
            return ParsedCalls(text, (), True)
        return ParsedCalls(
            normal_text, tuple((call.name, call.parameters) for call in calls), tries
        )
