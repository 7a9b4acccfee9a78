"""Why a run hangs: evidence of its processes, and the likeliest culprit. No process of Ray's, no tensor."""
