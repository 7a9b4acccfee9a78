"""A reward and a tool that do not return before a file is there."""

import time
from pathlib import Path


def score(response: str, answer: str, row: dict, *, file: str) -> float:
    _wait_for(file)
    return 1.0


def look_up(word: str, *, file: str) -> str:
    """Look a word up.

    word: which.
    """
    _wait_for(file)
    return word


def _wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.05)
