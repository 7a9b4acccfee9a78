"""`megarl plan`: the placement, memory and seconds of a run, computed without a GPU."""
