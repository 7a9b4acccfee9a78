"""Imported once by the fork server of tests, whose children have these imports then."""

from __future__ import annotations

import gc

from megarl.collector import collector_paused

with collector_paused():
    import megarl.training.policy  # noqa: F401
    import tests.parallel.worlds  # noqa: F401
    import tests.resharding.worlds  # noqa: F401

    gc.freeze()
