"""The loop, and what it decides: which samples a step learns from, when a checkpoint is written."""
