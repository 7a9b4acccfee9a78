"""Programs that are not ours, run apart: worker processes with limits, and the sandbox."""
