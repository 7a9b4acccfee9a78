"""Tools for the bench of episodes, loaded by the worker processes."""

from __future__ import annotations

import time

from megarl.environments.calculator import calculate

HANGS = "hang"


def compute(expression: str) -> str:
    """Compute an arithmetic expression exactly, or hang.

    Args:
        expression: of the calculator; `hang` never returns
    """
    while expression == HANGS:
        time.sleep(3600)
    return calculate(expression)
