"""Outputs of a model's layers by two computations of the same tokens, and the first that differ: NumPy alone."""
