"""The environment that Ray reads when it is first imported; import this before anything that may import Ray."""

from __future__ import annotations

import os
import secrets
import sys

_OWN_TOKEN = secrets.token_hex(32)


def _set() -> None:
    """Authentication is not the caller's choice: Ray listens on every interface, and whoever gets in may run code."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's server keeps an event of each of the last 100,000 calls, hundreds of MB, for a dashboard that is not there.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # An engine spans several GPUs from one process: every process sees all GPUs of its node and picks by slot.
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"


def use_own_token() -> None:
    """For a session of this process's own: nobody else has its token, also where the environment has one of others."""
    os.environ["RAY_AUTH_TOKEN"] = _OWN_TOKEN
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)


if "ray" not in sys.modules:  # in a worker Ray is there first, with the settings of the run
    _set()
