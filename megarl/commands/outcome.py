"""How a command ends: its exit code, and the cause on the last lines of standard error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megarl.cluster.processes import was_terminated
from megarl.cluster.supervisor import in_child
from megarl.commands.output import last_word, tell_output_failed
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.printable import OutputFailed, one_line
from megarl.types import (
    Drained,
    EndedEarly,
    FolderGone,
    Silence,
    SilentFault,
    UserError,
    UserErrors,
)

# no code of sysexits.h: a job that is queued again after others is not after this one
_DRAINED = 79


def run_recipe(path: Path, overrides: list[str] | None, run: Callable[[Recipe], int | None]) -> int:
    """Load a recipe and run; the exit code."""
    return ended(lambda: run(load_recipe(path, overrides or [])))


def run_recipe_with_ray(
    path: Path, overrides: list[str] | None, run: Callable[[Recipe], int | None]
) -> int:
    """The same in a child process, which Ray may end."""
    return in_child(partial(run_recipe, path, overrides, run), last_word)


def ended(run: Callable[[], int | None]) -> int:
    """Run, say how it ended on the last lines of stderr, and return the exit code: the result, or 0 without one."""
    # where a user's reward function lies; the console script does not look there
    sys.path.append(os.getcwd())
    try:
        return run() or 0
    except (FolderGone, Silence, SilentFault) as error:
        last_word(f"megarl: {error}")
        return 1
    except (UserError, UserErrors) as error:
        last_word(error)
        return 2
    except Drained as end:
        last_word(f"megarl: {end}")
        return _DRAINED
    except EndedEarly as end:
        last_word(f"megarl: {end}")
        return os.EX_TEMPFAIL  # 75: try again
    except KeyboardInterrupt:
        if was_terminated():
            last_word("megarl: terminated")
            return 143
        last_word("megarl: interrupted")
        return 130
    except OutputFailed as raised:
        tell_output_failed(raised)
        return 1
    except Exception as raised:
        last_word(getattr(raised, "evidence", None) or traceback.format_exc())
        cause = str(raised).strip().splitlines() or [""]
        last_word(one_line(f"megarl: {type(raised).__name__}: {cause[0]}"))
        return 1
