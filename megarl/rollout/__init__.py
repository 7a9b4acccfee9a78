"""Sampling: prompts, episodes, sample files, SGLang engines, reward functions and the processes that run them."""
