"""What leaves the machine, or is printed, without the secrets that a recipe or an error's text may hold."""

from __future__ import annotations

import os
import re
from typing import Any

from megarl.tracking.secret_names import is_secret, may_be_secret

WITHHELD = "(withheld)"
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SHORTEST = 8  # a shorter value of the environment may be any word of a text


def without_secrets(value: Any, name: str = "") -> Any:
    """A tree of mappings and lists; text under a key that ends in `key`, `token`... and the users of URLs withheld."""
    if isinstance(value, dict):
        return {key: without_secrets(below, str(key)) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(below, name) for below in value]
    if not isinstance(value, str):
        return value
    return WITHHELD if is_secret(name, value) or (value and may_be_secret(name)) else scrubbed(value)


def scrubbed(text: str) -> str:
    """A text without the users and passwords of URLs and without the values of the environment's secrets."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and may_be_secret(name):
            text = text.replace(value, WITHHELD)
    return _USER_OF_URL.sub(f"{WITHHELD}@", text)
