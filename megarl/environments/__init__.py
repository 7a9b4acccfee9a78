"""What a user's environment inherits and an agent gets, and the tools and environments that megarl ships."""

from megarl.environments.agents.chat import EpisodeOver
from megarl.environments.agents.chat_client import Chat
from megarl.environments.runtime.environment import Environment, Observation
from megarl.isolation.service import Service, ServiceError, TryAgain, Unavailable
from megarl.types.reward_result import RewardResult

__all__ = [
    "Chat",
    "Environment",
    "EpisodeOver",
    "Observation",
    "RewardResult",
    "Service",
    "ServiceError",
    "TryAgain",
    "Unavailable",
]
