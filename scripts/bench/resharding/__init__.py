"""Helper modules of `scripts/bench/reshard.py`."""
