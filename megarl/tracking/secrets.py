"""Secrets: a narrow rule for keys that a recipe may not have, a wide one for what is printed or sent to trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = {
    "apikey",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "authorization",
    "bearer",
}
_BEFORE_KEY = {"api", "judge", "private", "access", "secret", "auth"}  # not: answer, sort
# not: stop, eos, pad
_BEFORE_TOKEN = {"hf", "auth", "access", "api", "bearer", "judge", "refresh", "tracking"}
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_WIDE = re.compile(  # of keys and variables that may be secrets; a false positive costs nothing
    r"(?:^|[^a-z])(?:api)?(?:key|token|passw(?:or)?d|secret|credentials?|authorization|bearer)$",
    re.IGNORECASE,
)
_PASSWORD_OF_URL = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")
_WITHHELD = "(withheld)"
_SHORTEST = 8  # a shorter value of a variable may be any word of a text


def is_secret(name: str, value: object) -> bool:
    """Whether the value of a recipe's key is a secret, by the key's name; the name of a variable is not."""
    return (
        isinstance(value, str)
        and bool(value)
        and _names_secret(name)
        and not _VARIABLE.fullmatch(value)
    )


def secrets_in(value: Any, where: str, name: str = "") -> Iterator[tuple[str, str]]:
    """(place, description without the secret) of each secret in a tree of mappings and lists."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from secrets_in(below, f"{where}.{key}", str(key))
    elif isinstance(value, list | tuple):
        for number, below in enumerate(value):
            yield from secrets_in(below, f"{where}[{number}]", name)
    elif is_secret(name, value):
        yield where, "holds a secret"
    elif isinstance(value, str) and _PASSWORD_OF_URL.search(value):
        yield where, "holds a URL with a password"


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of a tree of mappings and lists in which secrets, by their keys, and users of URLs are withheld."""
    if isinstance(value, dict):
        return {key: without_secrets(below, str(key)) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(below, name) for below in value]
    if not isinstance(value, str):
        return value
    if is_secret(name, value) or (value and _WIDE.search(name)):
        return _WITHHELD
    return redacted(value)


def redacted(text: str) -> str:
    """The text without users and passwords of URLs, and without values of secret environment variables."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _WIDE.search(name):
            text = text.replace(value, _WITHHELD)
    return _USER_OF_URL.sub(f"{_WITHHELD}@", text)


def _names_secret(name: str) -> bool:
    """Whether the last words of a name mean a secret; `key` and `token` only after certain words, unlike in columns."""
    *before, last = _SEPARATORS.split(_CAMEL.sub("_", name).lower())
    previous = before[-1] if before else ""
    if last == "token":
        return not previous or previous in _BEFORE_TOKEN
    last = last.removesuffix("s")
    return last in _PLAIN or (last == "key" and previous in _BEFORE_KEY)
