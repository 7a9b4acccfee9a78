"""The command line: `megarl train RECIPE [a.b=c ...]`.

Exit codes: 0 done; 1 the run failed, its cause on the last line; 2 something to mend in the recipe or its files, a line
each; 130 Ctrl-C; 143 SIGTERM. Heavy imports wait until the recipe is known to be good.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from megarl.processes import raise_on_sigterm, was_terminated
from megarl.recipe_file import load_recipe
from megarl.types import UserFault, UserFaults

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def megarl() -> None:
    """Train MoE language models with reinforcement learning: Megatron-Core, SGLang and Ray on the same GPUs."""


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="a.b=c", help="Keys to set otherwise.")] = None,
) -> None:
    """Run a recipe; everything it makes lies in run.dir/run.name."""
    raise_on_sigterm()
    sys.exit(_outcome(recipe, overrides or []))


def _outcome(path: Path, overrides: list[str]) -> int:
    """Run, say how it ended on the last lines of stderr, and return the exit code."""
    try:
        _run(path, overrides)
    except (UserFault, UserFaults) as fault:
        print(fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megarl: {'terminated' if was_terminated() else 'interrupted'}", file=sys.stderr)
        return 143 if was_terminated() else 130
    except Exception as error:
        print(getattr(error, "evidence", None) or traceback.format_exc(), file=sys.stderr)
        cause = str(error).strip().splitlines() or [""]
        print(f"megarl: {type(error).__name__}: {cause[0]}", file=sys.stderr)
        return 1
    return 0


def _run(path: Path, overrides: list[str]) -> None:
    recipe = load_recipe(path, overrides)
    sys.path.append(os.getcwd())  # where a user's reward function lies; the console script does not look there

    from megarl import ray_settings  # noqa: F401  (before a reward module that imports Ray itself)
    from megarl.preflight import check

    inputs = check(recipe)

    from megarl.controller import train as train_recipe
    from megarl.metrics import RunLog

    with RunLog(recipe) as log:
        train_recipe(recipe, inputs, log)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
