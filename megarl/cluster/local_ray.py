"""Starts a Ray session on this machine."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from megarl.cluster import ray_environment  # isort: skip  (before Ray)
import ray
from ray._private.node import Node

from megarl.cluster import processes
from megarl.cluster.actor import SHARES
from megarl.device import LOOPBACK
from megarl.printable import Say

# samples of a step, mostly
_OBJECT_STORE_BYTES = max(2**30, min(2**35, psutil.virtual_memory().total // 10))
_MOST_STARTS = 3
# Python processes for an autoscaler, a dashboard and the printing of logs, seconds of processor time in each session
_HELPERS = ("start_monitor", "start_api_server", "start_log_monitor")
_SLOW_START = "timed out during startup"  # Ray raises no class of its own


def start_ray(gpus: int, folder: Path, say: Say, not_ours: Collection[int]) -> None:
    """Start Ray with so many GPUs; again where it has not started within its own 30 s, as on a machine that is busy.

    folder: of its files; it is opened to everyone. not_ours: processes that are left alone where a start has failed.
    """
    ray_environment.use_own_token()
    for starts_left in reversed(range(_MOST_STARTS)):
        try:
            with mock.patch.multiple(Node, **dict.fromkeys(_HELPERS, _start_nothing)):
                ray.init(
                    address="local",
                    num_gpus=gpus,
                    num_cpus=SHARES * gpus,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                    _node_ip_address=LOOPBACK,
                )
            return
        except Exception as error:
            if _SLOW_START not in str(error) or not starts_left:
                raise
        say("Ray has not started within its 30 s: it is started again")
        ray.shutdown()
        processes.kill_descendants(spare=not_ours)


def _start_nothing(*_: Any, **__: Any) -> None: ...
