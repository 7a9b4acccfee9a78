"""The page of what one machine's GPUs have settled: `python -m tests.gpu.report RESULTS_FOLDER PAGES_FOLDER`."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.cuda.nccl

UNVERIFIED = Path(__file__).parents[2] / "docs" / "gpu" / "UNVERIFIED.md"
PACKAGES = ("megatron-core", "transformer-engine", "sglang", "ray", "transformers")
KINDS = ("passed", "failed", "skipped", "not run")
Result = Mapping[str, Any]


class Row(NamedTuple):
    """A row of UNVERIFIED.md: where the code is, and the tests (files, or single ones) that settle it."""

    where: str
    tests: tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The rows of the table."""
    lines = [line.strip().strip("|") for line in text.splitlines() if line.startswith("| ")]
    table = [re.split(r"(?<!\\)\|", line) for line in lines]
    return [
        Row(where.strip(), tuple(re.findall(r"`([^`]+)`", tests))) for _, where, tests in table[1:]
    ]


def read(folder: Path) -> dict[int, list[Result]]:
    """Tier -> the outcomes of its tests, from the files that the plugin wrote; of those not reached, `not run`."""
    by_tier = {}
    for file in sorted(folder.glob("[123].jsonl")):
        names, *outcomes = [
            json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()
        ]
        done = {outcome["test"] for outcome in outcomes}
        missing = [name for name in names["collected"] if name not in done]
        late = {
            "outcome": "not run",
            "seconds": 0,
            "reason": "the tier's time was over",
            "figures": {},
        }
        by_tier[int(file.stem)] = outcomes + [{"test": name, **late} for name in missing]
    return by_tier


def reward_result(row: Row, results: Iterable[Result]) -> str:
    """`settled` where all tests that the row names have passed, `failed` where one has failed, else `open`.

    A test that skips itself here, or that the time did not suffice for, leaves the row open.
    """
    per_name = [[result for result in results if is_of(result["test"], name)] for name in row.tests]
    outcomes = {result["outcome"] for named in per_name for result in named}
    if "failed" in outcomes:
        return "failed"
    return "settled" if per_name and all(per_name) and outcomes == {"passed"} else "open"


def is_of(test: str, name: str) -> bool:
    """Whether a test, with its parameters, is the named one or of the named file."""
    return test.split("[")[0] == name or test.split("::")[0] == name


def versions() -> dict[str, str]:
    """Of everything that a result depends on."""
    facts = {
        "date": date.today().isoformat(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        facts |= {
            "GPU": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
            "driver": driver or "unknown",
        }
        facts |= {
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def page(
    about: Mapping[str, str], results: Mapping[int, Sequence[Result]], table: Sequence[Row]
) -> str:
    """The page as Markdown. Without a GPU nothing is settled, whatever passed."""
    on_gpu = "GPU" in about
    where = about.get("GPU", "a machine without a GPU")
    lines = [f"# What was run on {where}, {about['date']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in about.items()]
    for tier, outcomes in results.items():
        num_by_kind = Counter(outcome["outcome"] for outcome in outcomes)
        counts = ", ".join(f"{num_by_kind[kind]} {kind}" for kind in KINDS if num_by_kind[kind])
        lines += [
            "",
            f"## Tier {tier}: {counts}",
            "",
            "| test | outcome | s | figures |",
            "|---|---|---|---|",
        ]
        lines += [_line(outcome) for outcome in outcomes]
    lines += ["", "## Rows of UNVERIFIED.md", ""]
    if not on_gpu:
        return "\n".join([*lines, "None: only a GPU settles them.", ""])
    everything = [outcome for outcomes in results.values() for outcome in outcomes]
    reward_results = [(row, reward_result(row, everything)) for row in table]
    for kind in ("settled", "failed"):
        lines += [f"- {kind}: {row.where}" for row, result in reward_results if result == kind]
    num_open = sum(result == "open" for _, result in reward_results)
    return "\n".join([*lines, f"- open: {num_open} of {len(reward_results)} rows", ""])


def _line(outcome: Result) -> str:
    figures = [
        f"{name} {value:.4g} {unit}".strip() for name, (value, unit) in outcome["figures"].items()
    ]
    notes = "; ".join(figures + ([outcome["reason"]] if outcome["reason"] else []))
    return f"| `{outcome['test']}` | {outcome['outcome']} | {outcome['seconds']} | {notes.replace('|', '/')} |"


def main(results: Path, folder: Path) -> None:
    """Write the page into the folder, named by date and GPU; without a GPU a page is printed and not kept."""
    about = versions()
    text = page(about, read(results), rows(UNVERIFIED.read_text(encoding="utf-8")))
    if "GPU" not in about and folder.resolve() == UNVERIFIED.parent:
        print(text)
        return
    machine = torch.cuda.get_device_name() if "GPU" in about else "no-gpu"
    name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    file = folder / f"{about['date']}-{name}.md"
    file.write_text(text, encoding="utf-8")
    print(f"the results are in {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
