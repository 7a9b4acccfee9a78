"""Child processes for tests, forked from a server that has the heavy imports done and no second thread.

Not from pytest itself: a child forked while another thread holds a lock (tqdm, OpenMP) may wait for it for ever. With a
GPU they are spawned: asking whether there is one initialises CUDA's driver, which no fork survives.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

from megarl.device import DEVICE

CONTEXT: Any = multiprocessing.get_context("forkserver" if DEVICE == "cpu" else "spawn")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["tests.preload"])


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """A child that runs target(its end of a pipe, *args); the child, and our end of the pipe."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)
    # a server of these tests' own: the process-wide one may have imported SGLang
    connect = patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process)
    # the server keeps the environment of its first request
    with connect, patch.dict(os.environ, _ENVIRONMENT):
        process.start()
    theirs.close()
    return process, ours
