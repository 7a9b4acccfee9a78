"""Engines and training ranks as the controller sees them, and who of them has the memory of a GPU."""
