"""The turns of a step's episodes: how many there are, and how many of their tokens are read and not sampled.

Nobody knows what a model will do with its tools, so a plan supposes it, as it supposes lengths (batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Recipe

MEAN_TURNS_SHARE = 0.5  # assumption: of episode.max_turns, the mean number of turns
MEAN_OBSERVATION_SHARE = 0.5  # assumption: of episode.max_observation_tokens, the mean observation
# assumption: of an episode's tokens, observations at most, where they would be more
MOST_OBSERVED_SHARE = 0.8
# assumption: between two turns, beside the tool's own time: the turn tokenizer, a request, and its admission
TURN_S = 0.02


@dataclass(frozen=True)
class Turns:
    """mean: turns of the mean episode. most: of any. observed_share: observations' share of its tokens.

    mean_tokens: of the mean episode, after its prompt. The default is a response: one turn, without observations.
    """

    mean: float = 1.0
    most: int = 1
    observed_share: float = 0.0
    mean_tokens: float = 1.0

    @property
    def observed_tokens(self) -> float:
        """Of the mean episode."""
        return self.observed_share * self.mean_tokens

    def turns_of(self, tokens: int) -> int:
        """The turns of an episode with so many tokens after its prompt: observations follow in equal distances."""
        return min(self.most, 1 + round((self.mean - 1) * tokens / self.mean_tokens))

    def observed_of(self, tokens: int) -> int:
        """Of so many tokens of an episode those that are read and not sampled."""
        if self.turns_of(tokens) > 1:
            return int(self.observed_share * tokens)
        return 0


@dataclass(frozen=True)
class ToolLoad:
    """What tools have to do in a step, if every call used its whole time.

    calls: turns that call tools, with one call each. call_s: seconds that a call may take; limit: the key that says so.
    """

    calls: float
    call_s: float
    limit: str

    def calls_per_s(self, rollout_s: float) -> float:
        """In a rollout of so many seconds."""
        return self.calls / rollout_s

    def cores(self, rollout_s: float) -> float:
        """Of all engines' hosts together, while the rollout lasts."""
        return self.calls * self.call_s / rollout_s


def turns_of(recipe: Recipe, mean_tokens: float) -> Turns:
    """mean_tokens: of a sample after its prompt."""
    episode = recipe.episode
    if episode is None:
        return Turns(mean_tokens=mean_tokens)
    mean = max(1.0, MEAN_TURNS_SHARE * episode.max_turns)
    observed = (mean - 1) * MEAN_OBSERVATION_SHARE * episode.max_observation_tokens
    share = min(MOST_OBSERVED_SHARE, observed / mean_tokens)
    return Turns(mean, episode.max_turns, share, mean_tokens)


def tool_load(recipe: Recipe, turns: Turns, num_drawn: int) -> ToolLoad | None:
    """num_drawn: episodes of a step. None without episodes, and for agents, whose own tools no key of a recipe limits.

    A call may take `episode.arguments.timeout_s` where the tools or the environment have that argument, and never more
    than `episode.call_timeout_s`.
    """
    episode = recipe.episode
    if episode is None or episode.agent:
        return None
    limits = {"episode.call_timeout_s": episode.call_timeout_s}
    timeout_s = episode.arguments.get("timeout_s")
    if isinstance(timeout_s, int | float) and timeout_s > 0:
        limits["episode.arguments.timeout_s"] = float(timeout_s)
    limit = min(limits, key=limits.__getitem__)
    return ToolLoad((turns.mean - 1) * num_drawn, limits[limit], limit)


def timeout_advice(recipe: Recipe, longest_s: float) -> list[str]:
    """Whether `episode.timeout_s` ends episodes that are only long; longest_s: of the longest, without its tools."""
    episode = recipe.episode
    if episode is None or longest_s <= episode.timeout_s:
        return []
    after = f"{episode.timeout_s:g} s after its first turn an episode gets no further one"
    return [
        f"episode.timeout_s: {after}, and the longest takes up to {longest_s:,.0f} s beside the others; raise it"
    ]


def tools_bytes(recipe: Recipe) -> int:
    """Of one engine's host, the most that its worker processes of tools may take beyond their imports."""
    if recipe.episode:
        return recipe.episode.workers * recipe.episode.memory_mb * 2**20
    return 0
