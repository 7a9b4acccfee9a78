"""What a user's environment inherits and an agent gets, and the tools and environments that megarl ships."""

from megarl.rollout.agents.chat import EpisodeOver
from megarl.rollout.agents.interface import Chat
from megarl.rollout.environments.interface import Environment, Observation
from megarl.types.verdicts import Verdict

__all__ = ["Chat", "Environment", "EpisodeOver", "Observation", "Verdict"]
