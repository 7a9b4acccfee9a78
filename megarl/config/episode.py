"""Episodes: samples of several turns, in which tools or an environment answer the model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megarl.config.fields import Branch, Count, Seconds, Text


class EpisodeConfig(Branch):
    """What answers the model, and how far an episode may go (docs/environments.md).

    `tools` are typed functions with docstrings, `environment` is a class, both as `module:name`; `arguments` are
    keywords for them. A turn has at most `rollout.max_response_tokens`, the tokens after the prompt, observations among
    them, at most `max_tokens`; of an observation that has more than `max_observation_tokens` the middle is left out.

    A call, or a method of the environment, may take `call_timeout_s`. `timeout_s` after its first turn an episode gets
    no further one. Tools and environments of each engine run in `workers` processes, each with `memory_mb` beyond what
    loading takes.
    """

    tools: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    environment: Text | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    max_turns: Count = 8
    max_tokens: Count
    max_observation_tokens: Count = 512
    timeout_s: Seconds = 300.0
    call_timeout_s: Seconds = 10.0
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    memory_mb: Annotated[int, Field(ge=1, le=2**24)] = 1024
