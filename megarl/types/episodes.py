"""Episodes: attempts at a prompt in which the model samples in turns, and tools or an environment answer in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from megarl.types.json_objects import JsonObject, Message

# Why an episode ended: the model answered, or the environment said so; a limit of turns, of tokens, or of a turn's
# tokens; too many broken calls; time, or phases; or a failure of the environment, or of the agent.
EpisodeEnd = Literal[
    "answered",
    "done",
    "max_turns",
    "max_tokens",
    "cut",
    "bad_calls",
    "timeout",
    "environment",
    "agent",
]
TRUNCATED: frozenset[EpisodeEnd] = frozenset({"max_tokens", "cut"})  # ends at a limit of tokens

# Why a token that the model sampled is in no row: the turn did not reach its agent, or the episode began anew.
DropReason = Literal["unawaited", "anew"]


@dataclass(frozen=True)
class EpisodeFacts:
    """What happened in an episode that has ended.

    call_errors: of the calls, those that were broken or failed. tool_s: that tools and the environment took.
    sampled_tokens: counted at the engine's answers; dropped_...: of them, those that are in no row, by `DropReason`.
    reusable_tokens: of the contexts of all turns, those that the engine had computed in the turns before;
    cached_tokens: of them, those that were still in its prefix cache. begun_anew: how often it began anew, because a
    phase had left it open and its environment could not go on. Of what was before, the tokens and the seconds alone are
    counted. seed: of its environment or agent; None: not known.
    """

    turns: int
    calls: int
    call_errors: int
    tool_s: float
    end: EpisodeEnd
    sampled_tokens: int
    dropped_unawaited: int = 0
    dropped_anew: int = 0
    reusable_tokens: int = 0
    cached_tokens: int = 0
    begun_anew: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class EpisodeProgress:
    """What an episode that a phase has left open needs to go on, beside its rows; all of it can be JSON.

    phases: that it has had. account: its counts so far. following: what comes first: all of it (`begin`), the rest of
    the last turn, an answer to the last turn, or, after a `message`, a further turn. seconds: since it had its first
    place at an engine, in phases alone. digests: of all tokens of each row, hexadecimal. turn_tokens: of the last turn,
    with which the last row ends. said: the message after it; None where the history is rendered. messages: after those
    of the prompt, where the history is rendered. history: of its environment; None: it cannot be done again.
    after_tools, bad_turns: as they were.
    """

    phases: int
    account: Mapping[str, Any]
    following: Literal["begin", "turn", "answer", "message"] = "begin"
    seconds: float = 0.0
    digests: tuple[str, ...] = ()
    turn_tokens: int = 0
    said: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = field(default=())
    history: str | None = None
    after_tools: bool = False
    bad_turns: int = 0


class TranscriptCall(TypedDict):
    """A call that the model made in a turn, as JSON.

    name, arguments: None where they could not be read; long arguments are their JSON text, shortened. result: what the
    model was told. error: None, or what was wrong: `bad_call` (the call could not be made), or as of a `CallResult`.
    """

    name: str | None
    arguments: Any
    result: str
    error: str | None


class TranscriptEntry(TypedDict):
    """A turn of the model, or a message to it, as JSON.

    role: `assistant` for a turn; `user` for the environment's text; `left_out` for entries that were too many. text: of
    a turn all that the model wrote, reasoning and calls included, without special tokens. reward: of the turn.
    """

    role: Literal["assistant", "user", "left_out"]
    text: str
    calls: list[TranscriptCall]
    reward: float


Transcript = tuple[TranscriptEntry, ...]


def episode_dict(facts: EpisodeFacts, transcript: Sequence[TranscriptEntry]) -> JsonObject:
    """An episode as reward functions and samples.jsonl have it: a JSON value."""
    return {
        "turns": list(transcript),
        "calls": facts.calls,
        "call_errors": facts.call_errors,
        "end": facts.end,
        "tool_s": facts.tool_s,
    }
