"""Code that is not megarl's, run apart: users' functions in worker processes with limits, programs in the sandbox."""
