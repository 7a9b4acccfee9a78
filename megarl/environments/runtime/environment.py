"""What a user's environment is made of. Users import it as `megarl.environments`."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.types.reward_result import RewardResult


@dataclass(frozen=True)
class Observation:
    """What a tool or an environment answers to the model.

    text: what the model reads. reward: of the turn that the model has just taken, beside the episode's. done: the
    episode ends with this turn.
    """

    text: str
    reward: float = 0.0
    done: bool = False


class Environment:
    """The base of a user's environment: every episode has an instance of its own, with its own state.

    Every public method with a docstring that a subclass defines is a tool, plain or `async def`, but for the reserved
    `reset`, `reply`, `reward` and `close`, which may be `async def` too, and `prepare`. A tool takes typed arguments
    and returns text, an Observation, None (an empty text) or a value that JSON can hold. The names of other methods
    begin with an underscore. The constructor gets `episode.arguments` as keywords, and so does `prepare`.

    The process of an instance may be ended at any time: because another episode's call hung, died or took too much
    memory. An instance whose own call was cancelled, and may be half done, is closed. A new instance then gets the same
    arguments, seed and row, and the same calls but for that one; each must have the outcome that it had before.
    Whatever is random must therefore come from `seed`, for example `random.Random(self.seed)`.
    """

    replayable: ClassVar[bool] = True
    """Whether calls can be repeated as above. If not, the end of its process is a failure of the episode."""

    seed: int
    """Set before the constructor is called; all episodes of one prompt in a step have the same, to be compared."""

    @classmethod
    def prepare(cls, **arguments: Any) -> None:
        """Get ready, once in each process and before its first episode, for example load an index.

        It gets `episode.arguments`, has the time of an import, and may raise megarl.types.UserError.
        """

    def reset(self, row: Mapping[str, Any]) -> str | None | Awaitable[str | None]:
        """Begin an episode with its data row. The text is appended to the row's prompt as a message of the user.

        None: the prompt stays as it is. The prompt itself is never replaced.
        """
        return None

    def reply(self, text: str) -> str | Observation | None | Awaitable[str | Observation | None]:
        """Answer a response of the model that calls no tool, with a message of the user; None: the episode ends.

        Without this method a response without a call ends the episode.
        """
        return None

    def reward(self) -> float | RewardResult | None | Awaitable[float | RewardResult | None]:
        """The episode's reward, asked for once at its end; None: the environment has none."""
        return None

    def close(self) -> None | Awaitable[None]:
        """Free what the instance holds, when it is not needed any more. Not called where its process was ended."""
        return None
