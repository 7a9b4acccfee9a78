"""What a recipe names as `module:name`: rewards, tools, environments, agents, model families."""

from __future__ import annotations

import importlib
from typing import Any

from megarl.printable import describe_error
from megarl.types.errors import UserError


def load_object(path: str, where: str, form: str, hint: str) -> Any:
    """The object at `module:name`. Raises UserError(where, hint) when there is none.

    form: the expected form of a path in words, for an error about a path without it.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserError(where, f"{path!r} is not {form}", hint)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a user's module may raise any exception while it is imported
        reason = describe_error(error)
        raise UserError(
            where, f"{module_name} cannot be imported ({reason})", "correct or install it"
        ) from error
    loaded = getattr(module, name, None)
    if loaded is None:
        raise UserError(where, f"{module_name} has no {name!r}", hint)
    return loaded
