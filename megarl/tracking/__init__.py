"""What a run leaves behind: records, samples, curves, and what its trackers are told."""
