"""The environment that Ray reads when it is first imported; import this before anything that may import Ray."""

from __future__ import annotations

import os
import secrets
import sys


def _set() -> None:
    """Authentication is not the caller's choice: Ray listens on every interface, and whoever gets in may run code.

    The token is one of this run's own, but where a running cluster may be joined: then the one that it has.
    """
    given = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    os.environ["RAY_AUTH_MODE"] = "token"
    if not (given and "RAY_ADDRESS" in os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # An engine spans several GPUs from one process: every process sees all GPUs of its node and picks by slot.
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"


if "ray" not in sys.modules:  # in a worker Ray is there first, with the settings of the run
    _set()
