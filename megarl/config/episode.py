"""Episodes: samples of several turns, in which tools or an environment answer the model, or an agent asks it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import Branch, Count, Seconds, Text


class EpisodeConfig(Branch):
    """What answers the model in an episode, and how far an episode may go (docs/environments.md)."""

    tools: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Typed functions with docstrings that the model may call, each as `module:function`; tools, an environment or an
    agent is named."""
    environment: Text | None = None
    """Class that answers the model, as `module:Class`."""
    agent: Text | None = None
    """`async def` function that asks the model itself, as `module:function` (docs/agents.md)."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the environment or the agent, or of the tools that take them."""
    max_turns: Count = 8
    """The most turns of an episode."""
    max_tokens: Count
    """The most tokens after the prompt, observations among them; a turn has at most `rollout.max_response_tokens`."""
    max_observation_tokens: Count = 512
    """The most tokens of an observation (a tool's result or an environment's reply); of a longer one the middle is left
    out, and a line in its place says how much."""
    timeout_s: Seconds = 300.0
    """Seconds after which an episode gets no further turn and waits for no call or reply, and an agent is cancelled.

    They count from when the episode got its place at an engine, in phases only; an agent's from when its process starts
    it. A turn that is being sampled is sampled to its end; then its calls are not made, and `reply` is not asked.
    """
    call_timeout_s: Seconds = 10.0
    """Seconds of one call of a tool, or of one method of the environment."""
    phase_tool_s: Seconds = 30.0
    """Seconds that an episode waits for tools and its environment in a phase, no less than `episode.call_timeout_s`;
    then the call is given up, and made again in the next phase."""
    workers: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes with tools, environments and agents for each engine."""
    memory_mb: Annotated[int, Field(ge=1, le=2**24)] = 1024
    """Memory of each of these processes in MB (2^20 bytes), beyond what loading takes."""
    history: Literal["append", "render"] = "append"
    """What the model reads of its earlier turns: the tokens that it sampled, or what the chat template makes of them at
    every turn; where that differs, the turn begins another row of training data."""
    endpoint: Literal["off", "loopback"] = "off"
    """loopback: agents may also ask by HTTP, on loopback and on a Unix socket."""
