"""Checks that yield their errors one by one, for callers that want all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

from megarl.types import UserError

Errors = list[UserError]
ErrorIterator = Iterator[UserError]
Arguments = ParamSpec("Arguments")


def listed(check: Callable[Arguments, ErrorIterator]) -> Callable[Arguments, Errors]:
    """The check as a function that returns the list of its errors."""

    @wraps(check)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Errors:
        return list(check(*args, **kwargs))

    return run
