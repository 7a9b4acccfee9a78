"""Sampling: prompts, episodes, sample files, SGLang engines, reward functions and their sandboxes."""
