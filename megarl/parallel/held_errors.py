"""Errors of files that one rank writes between two collectives, kept until no other rank waits for it.

Megatron's first rank writes three small files of a checkpoint alone. An error there would leave all other ranks in the
next collective, where nothing but the end of the run can get them out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

_errors: list[Exception] = []


@cache
def hold_errors() -> None:
    """Have Megatron go on where it cannot write these files."""
    common: Any = TorchCommonSaveStrategy
    writer: Any = FileSystemWriterAsync
    common.save_common = _held(common.save_common)
    writer.finish = _held(writer.finish)
    serialization.save_config = _held(serialization.save_config)


def forget_errors() -> None:
    """Before a checkpoint: what was held of another is of no interest."""
    _errors.clear()


def raise_held() -> None:
    """Raise the first error since `forget_errors`, if there was one."""
    if _errors:
        raise _errors[0]


def _held(write: Callable[..., None]) -> Callable[..., None]:
    def write_or_hold(*args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except Exception as error:
            _errors.append(error)

    return write_or_hold
