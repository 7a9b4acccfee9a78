"""The recipes of the container images, as far as the tree can prove them: nothing builds them here."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.test_locks import PYTHONS, lock

ROOT = Path(__file__).parents[2]
BASE = re.compile(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu\d+\.\d+@sha256:[0-9a-f]{64}")


def instructions(text: str) -> list[tuple[str, str]]:
    """Of a Dockerfile: each instruction with its arguments, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "\n", "\n".join(lines).replace("\\\n", "\x00"))
    parts = [
        line.replace("\x00", "\\\n").partition(" ") for line in joined.splitlines() if line.strip()
    ]
    return [(name, arguments.strip()) for name, _, arguments in parts]


def dockerfile() -> list[tuple[str, str]]:
    return instructions((ROOT / "Dockerfile").read_text())


def section(name: str) -> str:
    """Of the Apptainer definition."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "apptainer.def").read_text())
    return re.split(rf"(?m)^%{name}$", text)[1].partition("\n%")[0]


def is_in_context(path: str) -> bool:
    """Whether Docker sends a path of the tree. The last line of .dockerignore that fits its first folder counts."""
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and line[0] != "#"
    ]
    fits = [line for line in lines if fnmatch.fnmatch(path.split("/")[0], line.removeprefix("!"))]
    return not fits or fits[-1].startswith("!")


def tracked() -> set[str]:
    """The files of the tree, without what runs and tools have left there."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("the tree is no git repository")
    files = listed.stdout.split()
    return {*files, *(str(folder) for file in files for folder in Path(file).parents)}


def test_the_reader_of_dockerfiles_joins_lines() -> None:
    text = "# x\nFROM a AS b\nRUN c && \\\n    d\nCOPY e f\n"
    assert instructions(text) == [("FROM", "a AS b"), ("RUN", "c && \\\n    d"), ("COPY", "e f")]


def test_every_stage_begins_with_the_pinned_base_or_another_stage() -> None:
    stages: list[str] = []
    for name, arguments in dockerfile():
        if name == "FROM":
            image, _, stage = arguments.partition(" AS ")
            assert BASE.fullmatch(image) if not stages else image in stages
            stages.append(stage)
        elif name == "COPY" and arguments.startswith("--from="):
            assert arguments.removeprefix("--from=").split()[0] in stages[:-1]
    assert len(stages) == 3


def test_every_path_that_is_copied_is_there() -> None:
    there = tracked()
    copies = [arguments.split()[:-1] for name, arguments in dockerfile() if name == "COPY"]
    for path in (
        path for paths in copies if "--from" not in paths[0] for path in paths if path != "."
    ):
        assert path in there and is_in_context(path), path
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert set(kept) <= there
    assert not any(
        is_in_context(path) for path in (".venv", ".git", "models", "data", "runs", "tests")
    )
    pairs = [line.split() for line in section("files").strip().splitlines()]
    assert all(source in there and target == f"/opt/megarl/{source}" for source, target in pairs)
    assert {source for source, _ in pairs} == set(kept)


def test_both_images_are_the_same() -> None:
    dockers, apptainers = (ROOT / "Dockerfile").read_text(), (ROOT / "apptainer.def").read_text()
    for pattern in (
        BASE.pattern,
        r"install -y --no-install-recommends \\\n\s+([^&\n\\]+)",
        r"source (scripts/\S+)'",
    ):
        first, second = re.search(pattern, dockers), re.search(pattern, apptainers)
        assert first and second, pattern
        assert first[0].split() == second[0].split(), pattern
    assert (ROOT / "scripts" / "setup_env.sh").is_file()


def test_the_base_has_the_cuda_and_a_python_of_the_lock() -> None:
    text = (ROOT / "Dockerfile").read_text()
    base = BASE.search(text)
    assert base and lock("gpu")["cuda-toolkit"].startswith(f"{base[1]}."), (
        "apex wants torch's own CUDA"
    )
    assert set(re.findall(r"python(3\.\d+)", text)) <= set(PYTHONS)


def test_the_build_sees_all_that_the_set_up_reads() -> None:
    """Files that setup_env.sh names lie in the stage that runs it."""
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    named = set(re.findall(r"requirements/\w+\.txt|setup\.py|pyproject\.toml", script))
    assert {"requirements/gpu.txt", "setup.py", "pyproject.toml"} <= named
    text = (ROOT / "Dockerfile").read_text().split("AS environment")[1].split("FROM base")[0]
    copied = set(re.findall(r"(?m)^COPY (.*) \S+$", text))
    assert {path.partition("/")[0] if "/" in path else path for path in named} <= {
        x for c in copied for x in c.split()
    }


def test_apex_is_the_same_commit_everywhere() -> None:
    texts = [(ROOT / name).read_text() for name in ("Dockerfile", "docs/install.md")]
    commits = {commit for text in texts for commit in re.findall(r"\b[0-9a-f]{40}\b", text)}
    assert len(commits) == 1 and all(
        commits & set(re.findall(r"\b[0-9a-f]{40}\b", text)) for text in texts
    )


@pytest.mark.parametrize("of", ["Dockerfile", "apptainer.def"])
def test_the_commands_are_sound_shell(of: str, tmp_path: Path) -> None:
    runs = (
        [arguments for name, arguments in dockerfile() if name == "RUN"]
        if of == "Dockerfile"
        else [section("post")]
    )
    shellcheck = Path(sys.executable).with_name("shellcheck")
    for number, text in enumerate(runs):
        script = tmp_path / f"{number}.sh"
        script.write_text(f"{text}\n")
        # APEX and APEX_COMMIT come from ARG; Apptainer ends %post at the first failure, so that cd needs no check.
        done = subprocess.run(
            [shellcheck, "-s", "sh", "-e", "SC2154,SC2164", script], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
