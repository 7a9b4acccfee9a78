"""Tools and environments of episodes: their schemas, their calls, and the worker processes that run them."""
