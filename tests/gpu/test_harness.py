"""The harness itself: it runs on a bare machine, its rows name tests that exist, and its page says what was found."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.device import DEVICE
from tests.gpu import rank, report, results, tiers
from tests.gpu.child import Child, Failed

ROOT = Path(__file__).parents[2]
ABSENT = ("pydantic", "ray", "sglang", "transformer_engine", "hypothesis", "typer", "pyarrow")
SERVED = ("exchange", "lending", "rank", "vocabulary", "contexts", "peers")
ABOUT = {"date": "2026-01-02", "GPU": "1 x NVIDIA H100"}


def result(test: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": 1.5, "reason": "", "figures": {}, **more}


@pytest.mark.slow
def test_the_first_tier_imports_nothing_that_a_bare_machine_lacks() -> None:
    program = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
import pytest
modules = {[f"tests.gpu.{name}" for name in SERVED]!r}
for name in modules:
    __import__(name)
sys.exit(pytest.main([*{list(tiers.OPTIONS[1])!r}, "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]))
"""
    settings = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stand_in_has_the_keys_and_defaults_of_the_recipe() -> None:
    pytest.importorskip("pydantic")
    from megarl.config import TrainConfig

    keys = TrainConfig(lr=rank.LR, local_layers=True).model_dump()
    assert rank.train_keys() == keys


def test_every_row_names_tests_that_exist() -> None:
    table = report.rows(report.UNVERIFIED.read_text(encoding="utf-8"))
    assert len(table) > 1
    for row in table:
        assert row.tests, f"{row.where}: no test would settle it"
        for name in row.tests:
            file, _, function = name.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert not function or function in tests, f"{row.where}: there is no {name}"
            paths = [path for tier in tiers.TIERS.values() for path in tier]
            assert any(file == path or file.startswith(f"{path}/") for path in paths), (
                f"no tier runs {file}"
            )


def test_every_row_names_code_that_exists() -> None:
    for row in report.rows(report.UNVERIFIED.read_text(encoding="utf-8")):
        quoted = re.findall("`([^`]+)`", row.where)
        places = {name: [folder / name for folder in (ROOT, ROOT / "megarl")] for name in quoted}
        files = {
            name: place for name, either in places.items() for place in either if place.is_file()
        }
        assert files, f"{row.where} names no file"
        code = "".join(file.read_text(encoding="utf-8") for file in files.values())
        names = [
            name.rpartition(".")[2] if "/" not in name else name
            for name in quoted
            if name not in files
        ]
        assert [name for name in names if name not in code] == [], (
            f"{row.where}: the code has no such name"
        )


def test_every_tier_names_files_that_exist() -> None:
    assert list(tiers.TIERS) == [1, 2, 3]
    for paths in tiers.TIERS.values():
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_tier_is_asked_for_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiers.main(["4"]) == 2
    assert "4: no such tier" in capsys.readouterr().err
    assert tiers.main(["1"]) == 0
    assert capsys.readouterr().out == "1\n"


@pytest.mark.parametrize("has_engine", [True, False])
def test_the_simulated_gpu_is_run_in_the_named_folder(tmp_path: Path, has_engine: bool) -> None:
    """Which is taken as it is, if its TransformerEngine can be imported."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit {int(not has_engine)}\nprintf "%s|" "$@"\n'
    )
    python.chmod(0o755)
    settings = os.environ | {"MEGARL_SIMULATED_VENV": str(tmp_path)}
    command = ["bash", "scripts/gpu_check.sh", "--simulated", "-x"]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    if has_engine:
        assert (done.returncode, done.stdout) == (
            0,
            "-m|pytest|-p|no:cacheprovider|-m||tests/gpu/simulated|-x|",
        )
    else:
        assert (
            done.returncode == 2
            and f"TransformerEngine cannot be used in {tmp_path}" in done.stderr
        )


def test_rows_are_read_with_their_tests() -> None:
    text = "# Title\n\n| what | where | settled by |\n|---|---|---|\n| c | `a.py` `b` | `t.py::x`, `u.py` |\n"
    assert report.rows(text) == [report.Row("`a.py` `b`", ("t.py::x", "u.py"))]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([result("t.py::x[1]"), result("t.py::x[2]"), result("u.py::y")], "settled"),
        ([result("t.py::x[1]"), result("t.py::x[2]", "failed"), result("u.py::y")], "failed"),
        ([result("t.py::x"), result("u.py::y", "skipped")], "open"),
        ([result("t.py::x[1]"), result("t.py::x[2]", "not run"), result("u.py::y")], "open"),
        ([result("t.py::x"), result("t.py::xy"), result("other.py::y")], "open"),
        ([], "open"),
    ],
)
def test_a_row_is_settled_when_all_its_tests_passed(
    outcomes: list[dict[str, Any]], expected: str
) -> None:
    assert report.reward_result(report.Row("a", ("t.py::x", "u.py")), outcomes) == expected


def test_the_page_has_versions_outcomes_figures_and_rows() -> None:
    outcomes = [
        result("t.py::x", figures={"rate": [12.0, "GB/s"]}),
        result("t.py::y", "failed", reason="assert 1 | 2"),
    ]
    table = [
        report.Row("`a.py`", ("t.py::x",)),
        report.Row("`b.py`", ("t.py::y",)),
        report.Row("`c.py`", ("z.py",)),
    ]
    text = report.page(ABOUT, {1: outcomes}, table)
    assert "# What was run on 1 x NVIDIA H100, 2026-01-02" in text
    assert "## Tier 1: 1 passed, 1 failed\n" in text
    assert "| `t.py::x` | passed | 1.5 | rate 12 GB/s |" in text
    assert "| `t.py::y` | failed | 1.5 | assert 1 / 2 |" in text
    assert "- settled: `a.py`\n- failed: `b.py`\n- open: 1 of 3 rows" in text


def test_without_a_gpu_no_row_is_settled() -> None:
    text = report.page(
        {"date": "2026-01-02"}, {1: [result("t.py::x")]}, [report.Row("`a.py`", ("t.py::x",))]
    )
    assert "settled: " not in text and "None: only a GPU settles them." in text


def test_outcomes_are_written_when_each_test_ends(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(record_property):\n    record_property('rate', [2.0, 'GB/s'])\n"
        "def test_bad():\n    raise ValueError('the reason')\n"
        "@pytest.mark.skipif(True, reason='no GPU')\ndef test_left_out():\n    pass\n"
    )
    file = tmp_path / "1.jsonl"
    settings = os.environ | {results.VARIABLE: str(file), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.gpu.results",
    ]
    subprocess.run(
        [*command, str(tmp_path / "test_it.py")], cwd=ROOT, env=settings, capture_output=True
    )
    good, bad, left_out = report.read(tmp_path)[1]
    assert (good["outcome"], good["figures"]) == ("passed", {"rate": [2.0, "GB/s"]})
    assert (bad["outcome"], bad["reason"]) == ("failed", "ValueError: the reason")
    assert (left_out["outcome"], left_out["reason"]) == ("skipped", "no GPU")
    # as of a tier that was ended
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    assert [test["outcome"] for test in report.read(tmp_path)[1]] == ["passed", "failed", "not run"]


@pytest.mark.parametrize("fresh", [True] if DEVICE == "cuda" else [True, False])
def test_a_childs_fault_and_its_death_are_told_apart(fresh: bool) -> None:
    with Child("tests.gpu.contexts:Importer", fresh=fresh) as child:
        with pytest.raises(Failed, match="no_such_module") as raised:
            child.ask("load", modules=["no_such_module"])
        assert raised.value.kind == "ModuleNotFoundError"
        assert child.ask("load", modules=["json"]) is False
        child.kill()
        with pytest.raises(RuntimeError, match="the child ended with -9"):
            child.ask("load", modules=[])
