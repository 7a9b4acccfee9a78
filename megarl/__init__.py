"""megarl: reinforcement learning of MoE language models on the GPUs that also sample."""

__version__ = "0.1.0"
