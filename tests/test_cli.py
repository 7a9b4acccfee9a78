"""The command: exit codes, last lines, and that a bad recipe is answered before anything heavy is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from megarl.commands import launching
from megarl.commands.outcome import run_recipe
from megarl.commands.version import version_lines
from megarl.config import Recipe
from megarl.types import FolderGone, Silence, UserError, UserErrors
from tests.stalling_disk import stalling_disk

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "matplotlib")


Done = subprocess.CompletedProcess[str]


def python(*arguments: str) -> Done:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def megarl(*arguments: str) -> Done:
    return python("-m", "megarl.cli", *arguments)


def imported(arguments: list[str], modules: tuple[str, ...]) -> tuple[Done, list[str]]:
    """A command's end, and its exit code with those of the modules that it has imported."""
    program = f"""
import sys
from megarl import cli
from megarl.commands import launching
try:
    cli.app({arguments!r})
except SystemExit as end:
    print(end.code, *[name for name in {modules!r} if name in sys.modules])
"""
    done = python("-c", program)
    return done, done.stdout.splitlines()[-1].split()


def test_help_names_the_recipe_and_the_overrides() -> None:
    done = megarl("train", "--help")
    assert done.returncode == 0 and "RECIPE" in done.stdout and "a.b=c" in done.stdout


def test_a_bad_recipe_is_answered_with_every_error_and_code_2() -> None:
    result = megarl(
        "train", str(QUICKSTART), "train.tpp=2", "model.dtype=fp8", "rollot.temperature=1"
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert sorted(result.stderr.splitlines()) == [
        "override model.dtype=fp8: model.dtype is 'fp8'; it should be 'float32' or 'bfloat16'",
        "override rollot.temperature=1: unknown key rollot; did you mean rollout?",
        "override train.tpp=2: unknown key train.tpp; did you mean train.tp or train.pp or train.vpp?",
    ]


def test_what_keeps_one_side_of_a_run_from_running_alone_is_told_before_it_starts(
    tmp_path: Path,
    quickstart_inputs: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    keys = [
        *quickstart_inputs,
        f"run.dir={tmp_path / 'runs'}",
        "checkpoint.every=1",
        "algorithm.name=grop",
        "rollout.phase_tokens=2",
    ]
    old = tmp_path / "old.parquet"
    old.write_bytes(b"PAR1")
    errors = [
        "algorithm.name: 'grop'",
        "warm_start.steps: ",
        "checkpoint.every: 1",
        "rollout.phase_tokens: 2",
    ]
    for run, starts in (
        (partial(launching.rollout, out=old), [*errors, f"--out {old}: it is there already"]),
        (
            partial(launching.rollout, out=tmp_path / "no" / "f"),
            [*errors, f"--out {tmp_path}/no/f: {tmp_path}/no is not a"],
        ),
        (
            partial(launching.train_from, samples=old, resume=False),
            [*errors, f"{old}: not a complete"],
        ),
        (partial(launching.train_from, samples=old, resume=True), ["--resume: "]),
    ):
        assert run_recipe(QUICKSTART, keys, run) == 2
        lines = capsys.readouterr().err.splitlines()
        for start in starts:
            assert sum(line.startswith(start) for line in lines) == 1, lines
        assert len(lines) == len(starts)
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize(
    "arguments",
    [["trian", "x.yaml"], ["train", "--fast", "x.yaml"], ["rollout", str(QUICKSTART)]],
)
def test_a_wrong_command_line_is_code_2(arguments: list[str]) -> None:
    assert megarl(*arguments).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["plan", str(QUICKSTART), "--picture", "/dev/full"],
            2,
            "--picture /dev/full: it is not a regular file; ",
        ),
        (
            ["plan", str(QUICKSTART), "--picture", "x", "--search", "both"],
            2,
            "--picture: a search has no picture; ",
        ),
        (["train", str(QUICKSTART), "train.tpp=2"], 2, "override train.tpp=2: unknown key"),
        (["--version"], 0, f"megarl {metadata.version('megarl')}\nPython "),
    ],
    ids=["picture", "search", "recipe", "version"],
)
def test_what_needs_nothing_heavy_imports_nothing_heavy(
    arguments: list[str], code: int, says: str
) -> None:
    done, code_and_modules = imported(arguments, HEAVY)
    assert code_and_modules == [str(code)]
    assert (done.stderr or done.stdout).startswith(says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["train.optimizer.adam_beta2=0.99"], "megatron"),
        (["rollout.engine.sglang.chunked_prefill_size=512"], "sglang"),
    ],
    ids=["megatron", "sglang"],
)
def test_a_dry_run_asks_the_libraries_that_the_recipe_passes_options_to(
    quickstart_inputs: list[str], options: list[str], asked: str
) -> None:
    arguments = ["train", str(QUICKSTART), *quickstart_inputs, *options, "--dry-run"]
    done, code_and_modules = imported(arguments, ("megatron", "sglang"))
    assert code_and_modules == ["0", asked], done.stderr


def test_the_version_names_every_package_that_decides_what_a_run_computes() -> None:
    first, second = version_lines()
    assert first == f"megarl {metadata.version('megarl')}"
    for package in ("torch", "megatron-core", "sglang", "ray", "transformers"):
        assert f"{package} {metadata.version(package)}" in second
    assert "transformer-engine " in second


@pytest.mark.parametrize(
    "words", ["say_all('a report')", "show('a line')", "cli._show_versions(True)"]
)
def test_output_on_a_full_disk_is_one_line_and_code_1(words: str) -> None:
    """Python itself fails a second time as it ends, unless what is buffered is dropped."""
    program = "import sys; from megarl import cli; from megarl.cli import say_all, show\n"
    program += "from megarl.commands.outcome import ended\n"
    program += f"sys.exit(ended(lambda: {words}))"
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=-1, text=True
        )
    assert result.returncode == 1
    assert result.stderr == "megarl: the output cannot be written (No space left on device)\n"


def test_without_room_for_the_last_word_the_exit_code_says_it() -> None:
    """The log of a job has both streams, and its disk is full."""
    program = "import sys; from megarl.commands.outcome import ended\n"
    program += "from megarl.types import UserError\n"
    program += "def run(): raise UserError('run.dir', 'no space', 'make room')\n"
    program += "sys.exit(ended(run))"
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=full)
    assert result.returncode == 2


def test_a_command_ends_with_its_code_while_a_disk_does_not_answer(tmp_path: Path) -> None:
    """Threads of a pool, as those that read the files of a checkpoint, would keep Python from ending."""
    program = (
        "import sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pathlib import Path\n"
        "from megarl import cli\n"
        "from megarl.commands.outcome import ended\n"
        "from megarl.disk import while_answering\n"
        "folder = Path(sys.argv[1])\n"
        "def read():\n"
        "    with ThreadPoolExecutor(1) as pool:\n"
        "        list(pool.map(Path.read_bytes, [folder / 'x']))\n"
        "run = lambda: while_answering(read, folder, 'x', 0.5)\n"
        "cli.app = lambda: sys.exit(ended(run))\n"
        "cli.main()\n"
    )
    with stalling_disk(tmp_path / "disk") as disk:
        (disk.path / "x").write_bytes(b"x")
        disk.stop()
        command = [sys.executable, "-c", program, disk.path]
        result = subprocess.run(command, cwd=ROOT, stderr=-1, text=True, timeout=30)
    assert result.returncode == 1
    silence = rf"megarl: the disk of {disk.path} has not answered for [01] s while x was written\n"
    assert re.fullmatch(silence, result.stderr)


@pytest.mark.parametrize(
    ("raised", "code", "last"),
    [
        (UserError("train.tp", "is 3", "set it to 2"), 2, "train.tp: is 3; set it to 2"),
        (
            FolderGone("runs/a", "is not there", "start again"),
            1,
            "megarl: runs/a: is not there; start again",
        ),
        (UserErrors([UserError("a", "b", "c"), UserError("d", "e", "f")]), 2, "d: e; f"),
        (KeyboardInterrupt(), 130, "megarl: interrupted"),
        (Silence("the disk of x has not answered"), 1, "megarl: the disk of x has not answered"),
        (ValueError("rank 2: loss is nan\nand more"), 1, "megarl: ValueError: rank 2: loss is nan"),
        (RuntimeError(), 1, "megarl: RuntimeError: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_how_a_run_ended_is_its_code_and_last_line(
    raised: BaseException, code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(recipe: Recipe) -> None:
        raise raised

    assert run_recipe(QUICKSTART, [], run) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == last
    assert captured.out == ""
    assert ("Traceback" in captured.err) == (
        code == 1 and not isinstance(raised, FolderGone | Silence)
    )
