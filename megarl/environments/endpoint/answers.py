"""Answers and errors in OpenAI's form: a whole completion, its chunks for a client that streams, an error. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megarl.environments.agents.chat import ChatAnswer
from megarl.environments.endpoint.request_fields import Completion
from megarl.types.json_objects import JsonObject

# some clients read lines of at most 64 KiB, and JSON writes a character in 12 bytes at most
_CHUNK_CHARACTERS = 4096


def error(message: str, code: str, param: str | None = None) -> JsonObject:
    details = {"message": message, "type": "invalid_request_error", "param": param or None}
    return {"error": {**details, "code": code}}


def models(created: int) -> JsonObject:
    """The list of models, which has the policy alone: it answers under any name."""
    model = {"id": "policy", "object": "model", "created": created, "owned_by": "megarl"}
    return {"object": "list", "data": [model]}


def whole(asked: Completion, answer: ChatAnswer, number: str, created: int) -> JsonObject:
    """The completion. number: its id; created: seconds since 1970."""
    choice = {
        "index": 0,
        "message": answer.message(),
        "logprobs": None,
        "finish_reason": answer.finish,
    }
    head = _head("chat.completion", asked, number, created)
    return {**head, "choices": [choice], "usage": _usage(answer)}


def events(asked: Completion, answer: ChatAnswer, number: str, created: int) -> Iterator[bytes]:
    """The same as server-sent events."""
    head = _head("chat.completion.chunk", asked, number, created)
    usage = {"usage": None} if asked.include_usage else {}
    for delta in _deltas(answer):
        # the last delta is empty, and tells why the answer has ended
        finish = None if delta else answer.finish
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield _event({**head, "choices": [choice], **usage})
    if asked.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _head(kind: str, asked: Completion, number: str, created: int) -> JsonObject:
    return {"id": number, "object": kind, "created": created, "model": asked.model}


def _deltas(answer: ChatAnswer) -> Iterator[JsonObject]:
    yield {"role": "assistant", "content": ""}
    for piece in _pieces(answer.content):
        yield {"content": piece}
    for index, call in enumerate(answer.calls):
        function = {"name": call.name, "arguments": ""}
        begun = {"index": index, "id": call.id, "type": "function", "function": function}
        yield {"tool_calls": [begun]}
        for piece in _pieces(call.arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
    yield {}


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _CHUNK_CHARACTERS):
        yield text[start : start + _CHUNK_CHARACTERS]


def _event(chunk: JsonObject) -> bytes:
    return b"data: " + json.dumps(chunk).encode("ascii") + b"\n\n"


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
