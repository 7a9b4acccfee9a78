"""Episodes: attempts at a prompt in which the model samples in turns, and tools or an environment answer in between.

A row is a conversation of an episode: a prompt, then tokens that are only appended to. Nearly always an episode has one
row; only an agent that rewrites its history, or has several conversations, makes more. Each row is one sequence to
train on, and all of an episode's rows together are one sample: it has one reward, one advantage, and the loss weight of
one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import numpy.typing as npt

from megarl.types.arrays import BoolArray, FloatArray, IntArray

# Why an episode ended: the model answered, or the environment said so; a limit of turns, of tokens, or of a turn's
# tokens; too many broken calls; time, or phases; or a failure of the environment, or of the agent.
EpisodeEnd = Literal[
    "answered", "done", "max_turns", "max_tokens", "cut", "bad_calls", "timeout", "environment", "agent"
]  # fmt: skip
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
    messages: tuple[Mapping[str, Any], ...] = field(default=())
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


def episode_dict(facts: EpisodeFacts, transcript: Sequence[TranscriptEntry]) -> dict[str, Any]:
    """An episode as reward functions and samples.jsonl have it: a JSON value."""
    own = {
        "calls": facts.calls,
        "call_errors": facts.call_errors,
        "end": facts.end,
        "tool_s": facts.tool_s,
    }
    return {"turns": list(transcript), **own}


@dataclass(frozen=True)
class SamplePart:
    """Tokens of a response, one after another, that one version of the weights sampled.

    Tokens that the model did not sample belong to the part of the turn before them.
    """

    version: int
    num_tokens: int


def with_part(parts: tuple[SamplePart, ...], new: SamplePart) -> tuple[SamplePart, ...]:
    """Parts with a new one after them, which lengthens the last where both are of one version."""
    if parts and parts[-1].version == new.version:
        return *parts[:-1], SamplePart(new.version, parts[-1].num_tokens + new.num_tokens)
    return *parts, new


def num_stale(parts: Sequence[SamplePart], version: int) -> int:
    """How many of a response's tokens earlier weights than those of `version` sampled: its first ones."""
    return sum(part.num_tokens for part in parts if part.version < version)


@dataclass(frozen=True)
class EpisodeRow:
    """A conversation of an episode; all fields as of a `Sample`."""

    response_ids_T: IntArray
    engine_logp_T: FloatArray
    parts: tuple[SamplePart, ...]
    prompt_ids: IntArray | None = None
    trained_T: BoolArray | None = None
    token_rewards_T: FloatArray | None = None
    routed_experts: npt.NDArray[Any] | None = None

    @property
    def num_trained(self) -> int:
        """The tokens of the response that the model sampled."""
        if self.trained_T is None:
            return len(self.response_ids_T)
        return int(self.trained_T.sum())


@dataclass(frozen=True)
class RowSummary:
    """What the controller keeps of a row: lengths in tokens. parts: of the trained tokens alone."""

    length: int  # of prompt and response
    response_length: int
    num_trained: int
    parts: tuple[SamplePart, ...]
