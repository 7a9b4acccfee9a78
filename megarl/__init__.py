"""megarl: reinforcement learning of MoE language models on the GPUs that also sample."""
