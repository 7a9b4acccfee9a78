"""Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector while much is made that is no garbage.

    It would traverse all of it again and again: a quarter of the time of an import of SGLang, half of a large plan's.
    """
    is_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_running:
            gc.enable()
