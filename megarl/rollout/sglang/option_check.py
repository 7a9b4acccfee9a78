"""Checks an engine's server arguments with SGLang's own `ServerArgs`, without an engine or a GPU.

Importing this module imports SGLang (seconds): import it only where the arguments are checked.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from typing import Any, get_args
from unittest import mock

import msgspec

from megarl.cpu import sglang_patches
from megarl.device import DEVICE
from megarl.rollout.sglang.arguments import WHERE
from megarl.types import UserError

with sglang_patches.quiet_import():
    if DEVICE == "cpu":
        sglang_patches.prepare()
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.server_args import ServerArgs

Errors = list[UserError]
# SGLang's checks that need a GPU choose defaults for a machine without one, or fail with one of these phrases.
NOT_CHECKED = "SGLang's choices of kernels and memory, which ask the GPU"
_NO_GPU = ("CUDA", "NVIDIA driver")


def server_errors(arguments: Mapping[str, Any]) -> Errors:
    """An error for each argument with a wrong type or choice; where there is none, SGLang's own check of them all.

    arguments: as `server_arguments` returns them; the folder model_path may have nothing but a config.json.
    """
    struct: Any = ServerArgs  # its fields are made at run time, which type checkers do not see
    kinds = {field.name: field.type for field in msgspec.structs.fields(struct)}
    errors = [
        error for key, value in arguments.items() for error in _field_errors(key, value, kinds[key])
    ]
    return errors or _resolution_errors(arguments)


def _field_errors(key: str, value: Any, kind: Any) -> Errors:
    where = f"{WHERE}.{key}"
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        hint = str(error).replace("Expected", "write")
        return [UserError(where, f"{value!r:.60} has the wrong type", hint)]
    except TypeError:
        return []  # a union of lists, which msgspec does not tell apart
    choices = next(
        (annotation.choices for annotation in get_args(kind) if isinstance(annotation, Arg)), None
    )
    if choices and value is not None and value not in choices:
        hint = f"use one of {', '.join(map(str, choices))}"
        return [UserError(where, f"{value!r} is none of SGLang's choices", hint)]
    return []


def _resolution_errors(arguments: Mapping[str, Any]) -> Errors:
    """The error of SGLang's resolution of the arguments with the model's config, which refuses contradictions."""
    try:
        # SGLang writes some arguments into the environment.
        with mock.patch.dict(os.environ), sglang_patches.quiet_import():
            server = ServerArgs(**arguments)
            server.resolve_once()
            server.check_server_args()
    except Exception as error:  # of any type, among them assertions without a text
        message, *_ = str(error).strip().splitlines() or [
            traceback.extract_tb(error.__traceback__)[-1].line or ""
        ]
        if not any(sign in message for sign in _NO_GPU):
            problem = f"SGLang refuses the engine's arguments ({message})"
            return [UserError(WHERE, problem, "change them")]
    return []
