"""A run without a GPU: who sits where, what fills the memory, what a step takes."""
