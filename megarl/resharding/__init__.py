"""Weights from Megatron's shards into SGLang's own parameters: two maps of rectangles, a pure plan, a thin executor."""
