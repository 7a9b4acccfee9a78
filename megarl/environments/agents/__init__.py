"""Agents: a user's own program that runs an episode and asks the model as often as it likes."""
