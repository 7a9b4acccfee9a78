"""What the training bench compares: megarl's step, and a bare megatron-core loop."""
