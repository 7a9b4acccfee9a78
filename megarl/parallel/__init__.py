"""The training side: Megatron-Core ranks, from rank arithmetic to one optimizer step."""

import warnings

# At import Megatron warns, module by module, of every optional library that is not installed.
warnings.filterwarnings("ignore", module=r"megatron\.")
# It calls collectives by the names that torch 2.13 deprecates, at every step.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
