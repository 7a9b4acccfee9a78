"""Resharding of weights from Megatron's shards to SGLang's parameters: two maps, a pure plan, a thin executor."""
