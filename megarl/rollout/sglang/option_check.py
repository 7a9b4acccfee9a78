"""An engine's server arguments against SGLang's own class, without an engine or a GPU.

Importing this module imports SGLang's arguments (seconds): import it where they are checked.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import msgspec

from megarl.device import DEVICE
from megarl.rollout.sglang import cpu
from megarl.rollout.sglang.arguments import WHERE
from megarl.types import UserFault

if DEVICE == "cpu":
    cpu.prepare()

with cpu.quiet_import():
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.server_args import ServerArgs

Faults = list[UserFault]
# What SGLang's checks ask of a GPU: those that find none choose for a machine without one, or fail with such words.
NOT_CHECKED = "SGLang's choices of kernels and memory, which ask the GPU"
_NO_GPU = ("CUDA", "NVIDIA driver")


def server_faults(arguments: Mapping[str, Any]) -> Faults:
    """Every argument that is not of its field's type or choices; else what SGLang says of all of them together.

    arguments: as of `server_arguments`; model_path may be a folder with its config.json alone.
    """
    struct: Any = ServerArgs  # made at run time, which type checkers do not see
    kinds = {field.name: field.type for field in msgspec.structs.fields(struct)}
    faults = [fault for key, value in arguments.items() for fault in _field_faults(key, value, kinds[key])]
    return faults or _resolution_faults(arguments)


def _field_faults(key: str, value: Any, kind: Any) -> Faults:
    where = f"{WHERE}.{key}"
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return [UserFault(where, f"{value!r:.60} is of another type", str(error).replace("Expected", "write"))]
    except TypeError:
        return []  # a union of lists, which msgspec does not tell apart
    of_field = [one for one in get_args(kind) if isinstance(one, Arg)]
    choices = of_field[0].choices if of_field else None
    if choices and value is not None and value not in choices:
        mend = f"use one of {', '.join(map(str, choices))}"
        return [UserFault(where, f"{value!r} is none of SGLang's choices", mend)]
    return []


def _resolution_faults(arguments: Mapping[str, Any]) -> Faults:
    """SGLang completes the arguments in the light of the model's config, and refuses what contradicts itself."""
    try:
        with _environment_kept(), cpu.quiet_import():
            server = ServerArgs(**arguments)
            server.resolve_once()
            server.check_server_args()
    except Exception as error:  # its checks raise whatever their authors chose, assertions without words among it
        words = str(error).strip().splitlines() or [traceback.extract_tb(error.__traceback__)[-1].line or ""]
        if any(sign in words[0] for sign in _NO_GPU):
            return []
        return [UserFault(WHERE, f"SGLang refuses the engine's arguments ({words[0]})", "change them")]
    return []


@contextmanager
def _environment_kept() -> Iterator[None]:
    """SGLang writes some of its arguments into the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
