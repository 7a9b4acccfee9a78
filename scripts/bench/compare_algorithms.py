"""Train the quickstart's model with each algorithm, on two layouts, from the same checkpoint, and plot the accuracies.

A short supervised phase (`algorithm.name: sft`) makes the checkpoint, which `megarl convert` writes, so that there is a
reference for the KL. A finished run is not run again, an interrupted run is started again.
See docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SET = "eval/arith/accuracy"
LAYOUTS = {
    "TP2 PP2 EP2 into one TP2 engine": (4, ["train.tp=2", "train.pp=2", "train.ep=2"]),
    "DP2 EP2 into two engines": (
        2, ["train.tp=1", "train.pp=1", "train.ep=2", "rollout.engine.count=2", "rollout.engine.tp=1"],
    ),
}  # fmt: skip
OWN_RANKS = "own ranks"  # of the critic, behind the others'; else it shares theirs
COMMON = ["warm_start.steps=0", "train.lr=3e-4", "evaluation.every=4", "run.trackers=[]"]
CRITIC = ["critic.lr=3e-3", "algorithm.critic_warmup_steps=3"]
# the paper's 0.05 makes lambda 0 for answers of up to 20 tokens
VAPO = [*CRITIC, "algorithm.lambda_alpha=1.0"]
VARIANTS = {
    "grpo": ("grpo", ["algorithm.kl_coefficient=0.001"]),
    # the longest answers of this task are right ones
    "dapo": ("dapo", ["algorithm.overlong_share=0.0"]),
    "vapo": ("vapo", VAPO),
    f"vapo, {OWN_RANKS}": ("vapo", VAPO),
    "ppo": ("ppo", ["algorithm.kl_coefficient=0.001", *CRITIC]),
    "rloo": ("rloo", []),
    "gspo": ("gspo", []),
    "dr_grpo": ("dr_grpo", []),
    "cispo": ("cispo", []),
    "remax": ("remax", []),
    "reinforce_pp": ("reinforce_pp", ["algorithm.kl_coefficient=0.001"]),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", ["algorithm.kl_coefficient=0.001"]),
    "prime": ("prime", ["critic.lr=1e-4"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/comparison"), help="folder of the runs and the plot"
    )
    parser.add_argument(
        "--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT"
    )
    parser.add_argument(
        "--layouts", type=int, choices=(1, 2), default=2, help="1: the second alone"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--start-steps", type=int, default=150, help="supervised steps before")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start, curves = make_start(args.out, args.start_steps), {}
    for name in args.only:
        for layout in list(LAYOUTS)[-args.layouts :]:
            curves[(name, layout)] = train(args.out, start, name, layout, args.steps)
            first, last = curves[(name, layout)][0][1], curves[(name, layout)][-1][1]
            print(f"{name:24}{layout:34}{first:.3f} -> {last:.3f}", flush=True)
    (args.out / "comparison.md").write_text(table(curves), encoding="utf-8")
    plot(curves, args.out / "comparison.png")
    print(f"{args.out / 'comparison.md'} and comparison.png are written")


def make_start(out: Path, steps: int) -> Path:
    """The checkpoint that every run begins with."""
    folder = out / "start"
    if not folder.exists():
        keys = [
            "run.name=supervised", f"run.steps={steps}", "algorithm.name=sft", "train.lr=3e-3",
            "train.warmup_steps=10", f"checkpoint.every={steps}", f"evaluation.every={steps}",
        ]  # fmt: skip
        recipe = ROOT / "recipes/quickstart.yaml"
        megarl("train", recipe, "--resume", f"run.dir={out}", "warm_start.steps=0", *keys)
        megarl("convert", out / "supervised", folder)
    return folder


def train(out: Path, start: Path, name: str, layout: str, steps: int) -> list[tuple[int, float]]:
    """(step, held-out accuracy) of one run."""
    algorithm, keys = VARIANTS[name]
    gpus, axes = LAYOUTS[layout]
    run = f"{name}-{layout}".replace(", ", "-").replace(" ", "-")
    if OWN_RANKS in name:
        axes = [
            *axes,
            f"placement.train_gpus={gpus}",
            f"critic.ranks.first_gpu={gpus}",
            f"critic.ranks.gpus={gpus}",
        ]
        gpus *= 2
    accuracies = curve(out / run)
    if not accuracies or accuracies[-1][0] != steps:
        megarl(
            "train", ROOT / "recipes/quickstart.yaml", "--resume", f"run.dir={out}", f"run.name={run}",
            f"run.steps={steps}", f"model.path={start}", f"algorithm.name={algorithm}", f"placement.gpus={gpus}",
            *COMMON, *axes, *keys,
        )  # fmt: skip
        accuracies = curve(out / run)
    return accuracies


def curve(folder: Path) -> list[tuple[int, float]]:
    """(step, held-out accuracy) of what a run has recorded so far."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [(max(0, record["step"]), record[SET]) for record in records if SET in record]


def megarl(*arguments: object) -> None:
    command = [sys.executable, "-m", "megarl.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")


def table(curves: dict[tuple[str, str], list[tuple[int, float]]]) -> str:
    lines = ["| algorithm | layout | before | after | best |", "|---|---|---|---|---|"]
    for (name, layout), points in curves.items():
        values = [value for _, value in points]
        lines.append(
            f"| {name} | {layout} | {values[0]:.3f} | {values[-1]:.3f} | {max(values):.3f} |"
        )
    return "\n".join(lines) + "\n"


def plot(curves: dict[tuple[str, str], list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layouts = list(dict.fromkeys(layout for _, layout in curves))
    figure, axes = pyplot.subplots(
        1, len(layouts), figsize=(6 * len(layouts), 4.5), sharey=True, squeeze=False
    )
    for place, layout in zip(axes[0], layouts, strict=True):
        for index, name in enumerate(dict.fromkeys(name for name, _ in curves)):
            style = "-" if index < 10 else "--"
            place.plot(
                *zip(*curves[(name, layout)], strict=True),
                style,
                color=f"C{index % 10}",
                label=name,
            )
        place.set(title=layout, xlabel="step")
        place.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out accuracy")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
