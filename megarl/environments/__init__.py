"""Environments: what a user's environment inherits, and the tools and environments that megarl ships."""

from megarl.rollout.environments.interface import Environment, Observation
from megarl.rollout.rewards import Verdict

__all__ = ["Environment", "Observation", "Verdict"]
