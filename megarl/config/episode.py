"""Episodes: samples of several turns, in which tools or an environment answer the model, or an agent asks it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import Branch, Count, Seconds, Text


class EpisodeConfig(Branch):
    """What answers the model, and how far an episode may go (docs/environments.md).

    `tools` are typed functions with docstrings, `environment` is a class, `agent` is an `async def` function that asks
    the model itself, all as `module:name`; `arguments` are keywords for them. A turn has at most
    `rollout.max_response_tokens`, the tokens after the prompt, observations among them, at most `max_tokens`; of an
    observation that has more than `max_observation_tokens` the middle is left out.

    A call, or a method of the environment, may take `call_timeout_s`. `timeout_s` after it got its place at an engine
    an episode gets no further turn and waits for no call, and an agent is ended. Tools, environments and agents of each
    engine run in `workers` processes, each with `memory_mb` beyond what loading takes.

    With `rollout.phase_tokens` an episode may wait `phase_tool_s` for tools and its environment in a phase; then the
    call is given up, and made again in the next one.

    `history`: what the model reads of its earlier turns. `append`: the tokens that it sampled. `render`: what the chat
    template makes of them at every turn; where that differs from the tokens, the turn begins another row of training
    data. `endpoint`: whether agents may ask by HTTP too, on loopback and on a Unix socket.
    """

    tools: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    environment: Text | None = None
    agent: Text | None = None
    arguments: dict[str, Any] = {}
    max_turns: Count = 8
    max_tokens: Count
    max_observation_tokens: Count = 512
    timeout_s: Seconds = 300.0
    call_timeout_s: Seconds = 10.0
    phase_tool_s: Seconds = 30.0
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    memory_mb: Annotated[int, Field(ge=1, le=2**24)] = 1024
    history: Literal["append", "render"] = "append"
    endpoint: Literal["off", "loopback"] = "off"
