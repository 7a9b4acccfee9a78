"""Removes secrets from recipes and error texts that are printed or sent to trackers."""

from __future__ import annotations

import os
import re
from typing import Any

from megarl.tracking.secret_names import is_secret, may_be_secret

WITHHELD = "(withheld)"
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SHORTEST = 8  # a shorter value of a variable may be any word of a text


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of a tree of mappings and lists in which secrets, by their keys, and users of URLs are withheld."""
    if isinstance(value, dict):
        return {key: without_secrets(below, str(key)) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(below, name) for below in value]
    if not isinstance(value, str):
        return value
    return WITHHELD if is_secret(name, value) or (value and may_be_secret(name)) else redacted(value)


def redacted(text: str) -> str:
    """The text without users and passwords of URLs, and without values of secret environment variables."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and may_be_secret(name):
            text = text.replace(value, WITHHELD)
    return _USER_OF_URL.sub(f"{WITHHELD}@", text)
