"""How a round of sampling went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSeconds:
    """What an engine takes for a decoding step, for each sequence in it, and for each token that it reads."""

    step_s: float
    sequence_s: float
    read_s: float


@dataclass(frozen=True)
class RoundBalance:
    """How evenly the engines worked in a round of sampling, and how long.

    group_tokens: of each attention group of each engine, tokens of prompts and responses. tail_s: from when 90 % of the
    samples had finished until all had. idle_s: that engines waited for the last of them, the mean engine. seconds:
    until all had finished. expected_s: those that the rounds before let expect of this round's work, by their fit.
    """

    group_tokens: tuple[int, ...]
    tail_s: float
    idle_s: float
    seconds: float
    fit: StepSeconds | None = None
    expected_s: float = 0.0
