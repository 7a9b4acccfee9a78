"""The environment that Ray reads when it is first imported; import this before anything that may import Ray."""

from __future__ import annotations

import os
import secrets
import sys

_OWN_TOKEN = secrets.token_hex(32)


def use_own_token() -> None:
    """Use a new token for a session that this process starts, even where the environment names another one."""
    os.environ["RAY_AUTH_TOKEN"] = _OWN_TOKEN
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)


if "ray" not in sys.modules:  # a worker has imported Ray already, with the settings of the run
    # Authentication is always on: Ray listens on every interface, and whoever connects may run code.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's server keeps an event of each of the last 100,000 calls, hundreds of MB, for a dashboard that we do not run.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # An engine spans several GPUs from one process: every process sees all GPUs of its node and picks by slot.
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    # A call of Ray's after the end of a session would start another one here.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    # The calls of a process that has died are many, and it is named once.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
