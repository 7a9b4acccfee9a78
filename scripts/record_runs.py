"""Record what seeded runs compute, and compare it after a refactor: nothing of it may change.

    python scripts/record_runs.py OUT            # metrics, samples, the weights' digests and all plans, one file each
    python scripts/record_runs.py OUT --against EARLIER      # exit code 1 where something differs, a line for each

On CPU, with the quickstarts' models and data; about ten minutes. Figures depend on the CPU: record both on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What is measured differs between two runs.
MEASURED = re.compile(
    r"^(time|memory|speed|perf)/|_s$|_s_(mean|max)$|_per_s$|rollout_error$|mfu|tflops|held_bytes|host_bytes|seconds$"
)
SMALL = [
    "rollout.seeded=true", "run.trackers=[]", "placement.gpus=2", "train.tp=1", "train.pp=1", "train.ep=2",
    "rollout.engine.tp=1", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "evaluation.max_prompts=8",
    "train.updates_per_step=2", "warm_start.steps=2", "warm_start.sequences_per_step=16", "reward.function=odd:score",
]  # fmt: skip
ADAPTERS = ["lora.rank=4", "lora.sync=merged"]  # seeded samples rule out adapters of SGLang's own
RUNS = {  # name -> the lives of a run: overrides of each, a later one with --resume
    "grpo": [["rollout.seeded=true", "run.trackers=[]", "warm_start.steps=30", "run.steps=10", "checkpoint.every=10"]],
    "vapo": [[*SMALL, "algorithm.name=vapo", "algorithm.critic_warmup_steps=1", "run.steps=4", "checkpoint.every=4"]],
    "prime": [[*SMALL, "algorithm.name=prime", "run.steps=3", "checkpoint.every=3"]],
    "dapo": [[*SMALL, "algorithm.name=dapo", "algorithm.dynamic_sampling=true", "run.steps=4", "checkpoint.every=4"]],
    "remax": [[*SMALL, "algorithm.name=remax", "run.steps=2", "checkpoint.every=2"]],
    "resumed": [[*SMALL, f"run.steps={steps}", "checkpoint.every=2"] for steps in (2, 4)],
    "tools": [[*SMALL, "warm_start.steps=20", "run.steps=3", "checkpoint.every=3"]],
    "adapters": [[*SMALL, *ADAPTERS, "run.steps=3", "checkpoint.every=3"]],
    "from_samples": [[*SMALL, "warm_start.steps=0", "run.steps=2"]],
}  # fmt: skip
REWARD = "def score(response, answer, row):\n    return sum(map(ord, response)) % 7 / 6\n"


def megarl(folder: Path, *arguments: str) -> str:
    """What the command prints. Raises RuntimeError with its words where it fails."""
    command = [sys.executable, "-m", "megarl.cli", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr}"
        )
    return done.stdout


def prepare(folder: Path) -> None:
    for options, model, data in (
        ([], "tiny-qwen3-moe", "data"),
        (["--tools"], "tiny-qwen3-moe-tools", "data/tools"),
    ):
        for script, target in (
            ("make_tiny_moe.py", f"models/{model}"),
            ("make_arithmetic.py", data),
        ):
            command = [
                sys.executable,
                str(ROOT / "scripts" / script),
                *options,
                "--out",
                str(folder / target),
            ]
            subprocess.run(command, check=True, capture_output=True)
    (folder / "odd.py").write_text(REWARD)


def run(folder: Path, name: str) -> dict[str, Any]:
    """The records and samples of a run, and its last weights' digests by file."""
    recipe = str(
        ROOT / "recipes" / ("quickstart_tools.yaml" if name == "tools" else "quickstart.yaml")
    )
    runs = folder / "runs" / name
    for overrides in RUNS[name]:
        if name == "from_samples":
            file = str(folder / "samples.parquet")
            megarl(folder, "rollout", recipe, *overrides, f"run.name={name}-rollout", "--out", file)
            megarl(folder, "train", recipe, *overrides, f"run.name={name}", "--from-samples", file)
        else:
            megarl(folder, "train", recipe, *overrides, f"run.name={name}", "--resume")
    return {
        "metrics": [
            _computed(json.loads(line))
            for line in (runs / "metrics.jsonl").read_text().splitlines()
        ],
        "samples": [
            _computed(json.loads(line))
            for line in (runs / "samples.jsonl").read_text().splitlines()
        ],
        "weights": {} if name == "from_samples" else _weights(folder, runs),
    }


def _computed(record: dict[str, Any]) -> dict[str, Any]:
    """What the seed decides of a record or a sample, an episode's own facts included."""
    kept = {key: value for key, value in record.items() if not MEASURED.search(key)}
    if isinstance(kept.get("episode"), dict):
        kept["episode"] = _computed(kept["episode"])
    return kept


def _weights(folder: Path, runs: Path) -> dict[str, str]:
    """The digests of a run's last weights by file; training on a file of samples writes none."""
    weights = folder / f"{runs.name}-weights"
    megarl(folder, "convert", str(runs), str(weights))
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in weights.glob("*.safetensors")
    }


def plans() -> dict[str, Any]:
    """Of every recipe that says which hardware it is for."""
    plans_by_recipe = {}
    for recipe in sorted((ROOT / "recipes").glob("*_*.yaml")):
        command = [sys.executable, "-m", "megarl.cli", "plan", str(recipe), "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        plans_by_recipe[recipe.name] = {
            "exit_code": done.returncode,
            "plan": json.loads(done.stdout or "null"),
        }
    return plans_by_recipe


def differences(now: Any, before: Any, where: str) -> Iterator[str]:
    """A line for each value that is not what it was."""
    if isinstance(now, dict) and isinstance(before, dict):
        for key in sorted(now.keys() | before.keys()):
            yield from differences(now.get(key), before.get(key), f"{where}/{key}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for number, pair in enumerate(zip(now, before, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif now != before:
        yield f"{where}: {before!r} became {now!r}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a folder for what is recorded")
    parser.add_argument("--against", type=Path, help="a folder that was recorded earlier")
    parser.add_argument(
        "--only", nargs="*", default=[*RUNS, "plans"], help="some of the runs, or the plans"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    room, num_differences = Path(tempfile.mkdtemp(prefix="record-")), 0
    try:
        prepare(room)
        for name in args.only:
            now = plans() if name == "plans" else run(room, name)
            (args.out / f"{name}.json").write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
            before = (
                json.loads((args.against / f"{name}.json").read_text()) if args.against else now
            )
            lines = [*differences(json.loads(json.dumps(now)), before, name)]
            reward_result = f"{len(lines)} differences" if args.against else "recorded"
            print("\n".join([*lines[:20], f"{name}: {reward_result}"]), flush=True)
            num_differences += len(lines)
    finally:
        shutil.rmtree(room)
    return 1 if num_differences else 0


if __name__ == "__main__":
    sys.exit(main())
