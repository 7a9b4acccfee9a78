"""Why a run hangs or is out of memory: evidence of its processes, and the likeliest culprit. No process of Ray's."""
