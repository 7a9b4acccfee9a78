"""The command line: `megarl train RECIPE [a.b=c ...]`; `plan`, `doctor`, `rollout` for samples alone, `convert`,
`compare-layers`, `drain`, `engines`, `report`, `reward-check`, `episode-check`; `explain` and `schema` for keys.

Exit codes: 0 done; 1 the run failed, its cause on the last line; 2 something to correct in the recipe or its files, a
line each; 75 ended early by SIGUSR1, to be started again with --resume; 79 ended by `megarl drain`; 130 Ctrl-C; 143
SIGTERM. Heavy imports wait until the recipe is known to be good.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from megarl.cluster.processes import note_sigusr1, note_sigusr2, raise_on_sigterm
from megarl.cluster.supervisor import in_child, let_be_supervised
from megarl.commands import launching
from megarl.commands.completion import complete_key, complete_override
from megarl.commands.outcome import ended, run_recipe, run_recipe_with_ray
from megarl.commands.output import check_picture, last_word, leave_at_once, say_all
from megarl.commands.version import version_lines
from megarl.config import Recipe
from megarl.config.loading import load_recipe
from megarl.disk import has_open_calls
from megarl.printable import show
from megarl.types import UserError, UserErrors

_RecipeFile = Annotated[Path, Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
_Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="a.b=c",
        help="Keys to set otherwise, or YAML files of such, in order.",
        autocompletion=complete_override,
    ),
]


class _Side(Enum):
    """What `megarl plan --search` looks for."""

    ENGINE = "engine"
    TRAIN = "train"
    BOTH = "both"


class _Against(Enum):
    """What `megarl compare-layers` compares the training ranks with."""

    ENGINE = "engine"
    RANK = "rank"


app = Typer(pretty_exceptions_enable=False)


def _show_versions(is_wanted: bool) -> None:
    if is_wanted:
        sys.exit(ended(lambda: say_all("\n".join(version_lines()))))


def _require_recipe(run: Path) -> None:
    """End the command where a folder is not that of a run."""
    if not (run / "recipe.yaml").is_file():
        hint = "name the folder of a run, as runs/quickstart"
        show(UserError(str(run), "has no recipe.yaml", hint), sys.stderr)
        sys.exit(2)


@app.callback()
def megarl(
    version: Annotated[
        bool,
        Option(
            "--version", callback=_show_versions, is_eager=True, help="Versions, and nothing else."
        ),
    ] = False,
) -> None:
    """Train MoE language models with reinforcement learning: Megatron-Core, SGLang and Ray on the same GPUs."""
    raise_on_sigterm()


@app.command()
def train(
    recipe: _RecipeFile,
    overrides: _Overrides = None,
    resume: Annotated[
        bool, Option(help="Go on in run.dir/run.name from its newest good checkpoint.")
    ] = False,
    from_samples: Annotated[
        Path | None,
        Option(metavar="FILE", help="Train on a file of `megarl rollout`, without engines."),
    ] = None,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Check everything that can be checked here, and launch nothing."),
    ] = False,
) -> None:
    """Run a recipe; everything it makes lies in run.dir/run.name."""
    run: Callable[[Recipe], None]
    note_sigusr2()
    if dry_run:
        others = {"--resume": resume, "--from-samples": from_samples}
        other = next((option for option, value in others.items() if value), None)
        sys.exit(run_recipe(recipe, overrides, partial(launching.dry_run, other=other)))
    if from_samples:  # a run on a file of samples writes no checkpoints
        run = partial(launching.train_from, samples=from_samples, resume=resume)
    else:
        note_sigusr1()
        run = partial(launching.train, resume=resume)
    sys.exit(run_recipe_with_ray(recipe, overrides, run))


@app.command()
def rollout(
    recipe: _RecipeFile,
    overrides: _Overrides = None,
    *,
    out: Annotated[Path, Option(metavar="FILE", help="The parquet file to write.")],
    steps: Annotated[
        int | None, Option(help="How many steps' prompts; run.steps unless it is given.")
    ] = None,
) -> None:
    """Sample and score a recipe's prompts into a file, and train nothing."""
    note_sigusr2()
    if steps is not None:
        overrides = [*(overrides or []), f"run.steps={steps}"]
    sys.exit(run_recipe_with_ray(recipe, overrides, partial(launching.rollout, out=out)))


@app.command()
def plan(
    recipe: _RecipeFile,
    overrides: _Overrides = None,
    *,
    hardware: Annotated[
        Path | None,
        Option(metavar="FILE", help="Which GPUs; placement.hardware unless it is given."),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object in place of the report.")
    ] = False,
    picture: Annotated[Path | None, Option(metavar="FILE", help="Draw it, too: a PNG.")] = None,
    response_share: Annotated[
        float | None,
        Option(min=0.001, max=1.0, help="The mean response, as a share of the longest; assumed."),
    ] = None,
    search: Annotated[
        _Side | None,
        Option(help="Find faster layouts of engines, training ranks or both, in minutes."),
    ] = None,
) -> None:
    """Say who sits where, what fills the memory and what a step takes, without a GPU; exit code 2: it does not fit."""

    def run(recipe: Recipe) -> None:
        if picture:
            check_picture(picture, is_search=search is not None)
        launching.advise(recipe)
        from megarl.commands.plan_report import draw_picture, planned, searched

        if search:
            say_all(searched(recipe, hardware, search.value, response_share, as_json=as_json))
            return
        run_plan, report = planned(recipe, hardware, response_share, as_json=as_json)
        say_all(report)
        if picture:
            draw_picture(run_plan, picture)
        if run_plan.errors:
            raise UserErrors(run_plan.errors)

    sys.exit(run_recipe(recipe, overrides, run))


@app.command()
def convert(
    run: Annotated[
        Path, Argument(metavar="RUN", help="The folder of a run, with its checkpoints.")
    ],
    out: Annotated[
        Path, Argument(metavar="OUT", help="The folder to write, which must not exist.")
    ],
    overrides: _Overrides = None,
    *,
    step: Annotated[
        int | None, Option(help="Which checkpoint; the newest unless it is given.")
    ] = None,
    fp8: Annotated[
        bool, Option("--fp8", help="In fp8 tiles with scales, as DeepSeek-V3 is published.")
    ] = False,
    adapter: Annotated[
        bool, Option("--adapter", help="The adapters (lora) alone, in PEFT's format.")
    ] = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model, adapters merged into it, or as adapters alone."""
    _require_recipe(run)

    def write(recipe: Recipe) -> None:
        from megarl.commands.convert import convert_run

        convert_run(recipe, run, out, step, show, fp8=fp8, adapter=adapter)

    sys.exit(run_recipe_with_ray(run / "recipe.yaml", overrides, write))


@app.command()
def compare_layers(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a run, which has ended.")],
    overrides: _Overrides = None,
    *,
    step: Annotated[
        int | None,
        Option(min=0, help="Which checkpoint; the newest unless it is given, 0: model.path."),
    ] = None,
    against: Annotated[
        _Against, Option(help="An engine, or one training rank with the same weights.")
    ] = _Against.ENGINE,
    samples: Annotated[
        Path | None,
        Option(metavar="FILE", help="Tokens of a file of `megarl rollout`, not of samples.jsonl."),
    ] = None,
    tokens: Annotated[int, Option(min=8, max=4096, help="How many, at most.")] = 64,
) -> None:
    """Name the first layer and operation whose outputs differ between training ranks and engine.

    Exit code 3: something differs.
    """
    _require_recipe(run)

    def compare(recipe: Recipe) -> int:
        from megarl.commands.compare_layers import CompareOptions, compare_run

        asked = CompareOptions(
            run=run,
            step=step,
            samples=samples,
            num_tokens=tokens,
            has_engine=against is _Against.ENGINE,
        )
        return compare_run(recipe, asked, show, launching.tell)

    sys.exit(run_recipe_with_ray(run / "recipe.yaml", overrides, compare))


@app.command()
def drain(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a live run.")],
    *,
    wait: Annotated[
        bool,
        Option("--wait/--no-wait", help="Wait until it has ended, or only until it has heard."),
    ] = True,
) -> None:
    """Ask a run to end after its step, with a checkpoint from which a newer version may go on."""

    def ask() -> int:
        from megarl.commands.drain import drain as drain_run

        return drain_run(run, show, wait=wait)

    sys.exit(ended(ask))


@app.command()
def engines(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a live run.")],
    *,
    count: Annotated[int, Option(help="How many: 1 to rollout.engine.max_count.")],
) -> None:
    """Ask a run for another number of engines, which it has from its next step on."""

    def ask() -> None:
        from megarl.commands.engines import ask_for_engines

        ask_for_engines(run, count, show)

    sys.exit(ended(ask))


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="The folders of runs.")],
    *,
    out: Annotated[
        Path | None,
        Option(metavar="FILE", help="The page; report.html of the run's folder by default."),
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="One page of several runs, laid over each other.")
    ] = False,
    samples: Annotated[
        Path | None,
        Option(metavar="FILE", help="A file of `megarl rollout`, in place of samples.jsonl."),
    ] = None,
    plans: Annotated[
        bool, Option("--plan/--no-plan", help="With what the recipe alone tells: ranks, bytes.")
    ] = True,
    watch: Annotated[
        bool, Option("--watch", help="Serve a page on 127.0.0.1 that follows the runs.")
    ] = False,
    port: Annotated[int, Option(min=0, max=65535, help="Of --watch; 0: a free one.")] = 0,
) -> None:
    """Write a run as one page for a browser: curves, phases, placement, recipe, samples."""

    def write() -> None:
        from megarl.commands.report import refuse_with_watch, watch_runs, write_reports

        if watch:
            refuse_with_watch(out, samples, compares=compare)
            watch_runs(runs, port, show, plans=plans)
            return
        write_reports(runs, out, show, compares=compare, plans=plans, samples=samples)

    sys.exit(ended(write))


@app.command()
def reward_check(
    function: Annotated[
        str, Argument(metavar="FUNCTION", help="module:function, as in reward.function.")
    ],
    *,
    data: Annotated[
        Path | None, Option(metavar="FILE", help="JSONL or parquet, as in data.train.")
    ] = None,
    samples: Annotated[
        Path | None, Option(metavar="FILE", help="Score a file's samples anew.")
    ] = None,
    argument: Annotated[
        list[str] | None,
        Option(metavar="k=v", help="A keyword argument for it; the value is JSON, or text."),
    ] = None,
    answer: Annotated[str, Option(help="The column of the answers in --data.")] = "answer",
    rows: Annotated[
        int, Option(min=1, help="How many rows, or groups of samples, from the first.")
    ] = 100,
    timeout_s: Annotated[
        float, Option(min=0.01, max=604_800, help="As in reward.timeout_s.")
    ] = 5.0,
    memory_mb: Annotated[int, Option(min=1, max=2**24, help="As in reward.memory_mb.")] = 1024,
) -> None:
    """Try a reward on its data's answers, on others, and on responses made to break it; or on samples of a file."""

    def run() -> int:
        from megarl.commands.reward_check import check, reward_config

        config = reward_config(function, argument or [], timeout_s, memory_mb)
        return 0 if check(config, data, samples, answer, rows) else 1

    sys.exit(ended(run))


@app.command()
def episode_check(
    recipe: _RecipeFile,
    overrides: _Overrides = None,
    *,
    rows: Annotated[
        int | None, Option(min=1, help="How many rows (3), or prompts of --samples (all).")
    ] = None,
    turns: Annotated[
        Path | None,
        Option(metavar="FILE", help="Turns to play: JSONL, a list of assistants' messages a line."),
    ] = None,
    samples: Annotated[
        Path | None, Option(metavar="FILE", help="Play a file's episodes again.")
    ] = None,
) -> None:
    """Try a recipe's tools or environment without a model.

    Exit code 2: something is to correct, or came out otherwise.
    """

    def run(recipe: Recipe) -> None:
        from megarl.commands.episode_check import check

        check(recipe, rows, turns, samples)

    sys.exit(run_recipe(recipe, overrides, run))


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, Argument(metavar="[RECIPE]", help="Also what this recipe needs.")
    ] = None,
    overrides: _Overrides = None,
    *,
    measure: Annotated[
        bool, Option("--measure", help="Measure the GPUs and their links, too.")
    ] = False,
    out: Annotated[Path, Option(metavar="FILE", help="Where --measure writes.")] = Path(
        "hardware.yaml"
    ),
    port: Annotated[
        list[int] | None, Option(min=1, max=65535, help="A port that must be free.")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object in place of the lines.")
    ] = False,
) -> None:
    """Say what keeps this machine, or every node of the Ray cluster at RAY_ADDRESS, from training; exit code 0 or 2."""

    def run() -> int:
        errors: tuple[UserError, ...] = ()
        loaded = None
        try:
            if recipe:
                loaded = load_recipe(recipe, overrides or [])
        except UserErrors as several:  # the machine is looked at all the same
            errors = several.errors

        try:
            from megarl.doctor.examine import examine
        except (ImportError, OSError) as error:  # without torch nothing can be looked at
            name = getattr(error, "name", None) or "Python"
            raise UserError(
                name,
                f"it cannot be imported ({error})",
                "install it as requirements/gpu.txt names it",
            ) from error

        report = examine(loaded, errors, out if measure else None, port or (), launching.tell)
        say_all(report.to_json() if as_json else "\n".join(report.lines()))
        return report.exit_code

    sys.exit(in_child(partial(ended, run), last_word))


@app.command()
def explain(
    key: Annotated[
        str | None,
        Argument(
            metavar="[KEY]", help="As train.lr, or a branch: train.", autocompletion=complete_key
        ),
    ] = None,
    recipe: Annotated[
        Path | None, Argument(metavar="[RECIPE]", help="Whose value of the key is told, too.")
    ] = None,
    overrides: _Overrides = None,
    *,
    reference: Annotated[
        bool, Option("--reference", help="Every key, as docs/recipe_reference.md has them.")
    ] = False,
) -> None:
    """Say what a recipe's key means: its type, its default, and which runs read it."""

    def run() -> None:
        from megarl.commands.explain import explained, reference_text

        loaded = load_recipe(recipe, overrides or []) if recipe else None
        say_all(reference_text() if reference else explained(key, loaded))

    sys.exit(ended(run))


@app.command()
def schema(
    overlay: Annotated[
        bool, Option("--overlay", help="Of overlays, in which any key may be left out.")
    ] = False,
    hardware: Annotated[
        bool, Option("--hardware", help="Of hardware files, as those of recipes/hardware.")
    ] = False,
) -> None:
    """Print the JSON schema of recipes, with which an editor completes and checks keys."""

    def run() -> None:
        from megarl.commands.explain import schema_text

        say_all(schema_text(of_overlays=overlay, of_hardware=hardware))

    sys.exit(ended(run))


def main() -> None:
    """The console script."""
    let_be_supervised()
    # at the end Python would traverse all that is there, and the process frees it anyway
    atexit.register(gc.freeze)
    try:
        app()
    finally:
        if has_open_calls():
            leave_at_once(sys.exception())


if __name__ == "__main__":
    main()
