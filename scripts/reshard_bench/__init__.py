"""Helper modules of `scripts/bench_reshard.py`."""
