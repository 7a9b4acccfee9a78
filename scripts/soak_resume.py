"""End a run with SIGKILL again and again, resume it each time, and compare its end with that of an undisturbed run.

    python scripts/soak_resume.py --points 50 [--seed 1] [--folder DIR] [--json] [--drain] [--spread] [--ahead]
        [--episodes] [--lora] [--elastic]

A tiny model, on CPU, seeded samples: weights, optimizer, metrics (but for times) and samples must be the same to the
last bit. A point is a moment drawn in advance: while everything starts, or so many seconds after a step was recorded,
which is in the middle of a rollout, an update, a save or a reshard. At one of the points SIGUSR1 asks the run to end,
as Slurm does before the time limit, with --drain `megarl drain`. --spread: also a run on two engines, whose rewards
take random seconds; its samples, weights and metrics must be the same, too. --ahead: the engine has a slot of its own
and samples a phase while the ranks learn; of two engines one has. --episodes: samples are episodes of several turns,
with an environment; phases cut their turns, and the environment's state is made again in the next one. --lora: the
policy learns adapters, merged into bfloat16 weights that are rounded stochastically. --elastic: engines have slots of
their own, and `megarl engines` asks the disturbed run for a second one, then for one again. Exit code 1: something
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
BUFFER_FILE = "buffer.parquet"
STEPS, WARM_STEPS, EVERY, NUM_ENDS = 6, 2, 2, 20
REWARD = """import random, time
def score(response, answer, row):
    return sum(map(ord, response)) % 7 / 6  # one in seven is correct
def slow_score(response, answer, row):
    time.sleep(random.random() * 0.3)
    return score(response, answer, row)
"""
TALK = """import random
from megarl.environments import Environment, Observation, RewardResult
class Talk(Environment):
    def __init__(self):
        self.random, self.said = random.Random(self.seed), 0
    def reset(self, row):
        return "go"
    def reply(self, text):
        self.said += sum(map(ord, text)) + self.random.randrange(9)
        return Observation(str(self.said), reward=self.said % 3 / 9)
    def reward(self):
        return RewardResult(self.said % 7 / 6, self.said % 2 == 0)
"""
EPISODES = [
    "model.path=models/tiny-qwen3-moe-tools",
    "data.eval={sums: data/eval.jsonl}",
    "data.messages=null",
    "episode={tools: [], environment: odd_talk:Talk, max_turns: 3, max_tokens: 40, max_observation_tokens: 8}",
    "reward.function=null",
]
AHEAD = ["rollout.ahead=1", "placement.gpus=3", "placement.first_engine_gpu=2"]
MIXED = ["placement.first_engine_gpu=1"]  # of two engines one shares its slot with a training rank
ELASTIC = ["placement.gpus=4", "placement.first_engine_gpu=2", "rollout.engine.max_count=2"]
SPREAD = ["rollout.engine.count=2", "reward.function=odd_reward:slow_score"]
LORA = ["lora.rank=4", "lora.rounding=stochastic", "model.dtype=bfloat16", "train.lr=0.01"]
# what two engines measure otherwise
OF_ENGINES = ("reshard/", "rollout/imbalance", "rollout/logprob_diff_engine_max")
OVERRIDES = [
    "algorithm.name=vapo",  # so that there is a critic, too
    "algorithm.critic_warmup_steps=2",
    "algorithm.dynamic_sampling=true",  # and samples that wait for the next step
    "algorithm.rollout_correction=tis",
    # in eight phases: open samples wait too, also while few prompts are in flight
    "rollout.max_response_tokens=24",
    "rollout.phase_tokens=3",
    "rollout.prompts_in_flight=16",
    "critic.ranks.gpus=1",
    "critic.ranks.ep=1",
    f"warm_start.steps={WARM_STEPS}",
    "warm_start.sequences_per_step=16",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.seeded=true",
    "rollout.engine.tp=1",
    "train.tp=1",
    "train.pp=1",
    "train.ep=2",
    "train.updates_per_step=2",
    "train.replay=r3",
    "placement.gpus=2",
    "placement.train_gpus=2",
    "evaluation.max_prompts=4",
    "evaluation.every=3",
    "reward.function=odd_reward:score",
    "run.trackers=[]",
    "data.train=[{path: data/train.jsonl, weight: 2}, {path: data/eval.jsonl, weight: 1}]",
    f"run.steps={STEPS}",
    f"checkpoint.every={EVERY}",
]
_POLL_S = 0.02
_TRY_AGAIN, _DRAINED = 75, 79
_SECONDS = (
    "rollout/tail_s",
    "rollout/idle_s",
    "rollout/waited_s",
    "episode/tool_s_mean",
    "episode/tool_s_max",
)
LIMIT_S = 300.0


def prepare(folder: Path, overrides: list[str], *, episodes: bool, many_ends: bool = True) -> None:
    """The quickstart's model and data, a reward that teaches something from the first step on, and the overrides.

    many_ends: an untrained model ends a response now and then, by one of many tokens.
    """
    model, tools = ("tiny-qwen3-moe-tools", ["--tools"]) if episodes else ("tiny-qwen3-moe", [])
    for script, target in (("make_tiny_moe.py", f"models/{model}"), ("make_arithmetic.py", "data")):
        command = [
            sys.executable,
            str(ROOT / "scripts" / script),
            *tools,
            "--out",
            str(folder / target),
        ]
        subprocess.run(command, check=True, capture_output=True)
    if many_ends:
        file = folder / "models" / model / "generation_config.json"
        config = json.loads(file.read_text())
        ends = [config["eos_token_id"], *range(40, 40 + NUM_ENDS)]
        file.write_text(json.dumps(config | {"eos_token_id": ends}))
    (folder / "odd_reward.py").write_text(REWARD)
    (folder / "odd_talk.py").write_text(TALK)
    (folder / "recipe").write_text("quickstart_tools.yaml" if episodes else "quickstart.yaml")
    (folder / "overrides").write_text("\n".join(overrides))


def start(folder: Path, name: str, *more: str) -> subprocess.Popen[bytes]:
    recipe = ROOT / "recipes" / (folder / "recipe").read_text()
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), "--resume"]
    log = (folder / f"{name}.log").open("ab")
    settings = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [*command, *(folder / "overrides").read_text().splitlines(), *more, f"run.name={name}"],
        cwd=folder,
        env=os.environ | settings,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / "runs" / name / "metrics.jsonl"
    try:
        lines = file.read_text().splitlines(keepends=True)
    except (
        FileNotFoundError
    ):  # a run without a checkpoint begins anew, and removes what the one before it recorded
        lines = []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill(process: subprocess.Popen[bytes]) -> None:
    """What the death of a node does: the command and all of its processes, at once. Their session's files go too."""
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    sessions = set()
    for member in tree:
        try:
            sessions.add(member.environ().get("TMPDIR", ""))
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, timeout=30)
    process.wait()
    for folder in sessions:
        if Path(folder).name.startswith("megarl-"):
            shutil.rmtree(folder, ignore_errors=True)


def finish(folder: Path, name: str, *more: str) -> None:
    process = start(folder, name, *more)
    if process.wait(LIMIT_S) != 0:
        raise RuntimeError(f"the run failed:\n{(folder / f'{name}.log').read_text()[-4000:]}")


def points(count: int, seed: int) -> Iterator[tuple[int, float]]:
    """(record that is waited for, seconds after it); records are counted over the whole run, 0: the start of it."""
    rng = random.Random(seed)
    for index in range(count):
        after = round((index + 1) / (count + 1) * (STEPS + WARM_STEPS)) if index else 0
        yield after, rng.uniform(2.0, 6.0) if after == 0 else rng.uniform(0.0, 0.8)


def disturb(folder: Path, name: str, after: int, delay_s: float, *, more_engines: bool) -> str:
    """Resume the run, kill it at a point, and say where that was; more_engines: ask for a second one before."""
    process = start(folder, name)
    began = time.monotonic()
    while len(records(folder, name)) < after or not (folder / "runs" / name).exists():
        if process.poll() is not None:
            return f"had ended (code {process.returncode})"
        if time.monotonic() - began > LIMIT_S:
            kill(process)
            raise TimeoutError(f"no record {after} in {LIMIT_S} s")
        time.sleep(_POLL_S)
    if more_engines:
        ask_for_engines(folder, name, 2)
    time.sleep(delay_s)
    kill(process)
    steps = [record["step"] for record in records(folder, name)]
    return f"killed {delay_s:.2f} s after record {after}, at step {steps[-1] if steps else 'none'}"


def has_open(folder: Path, name: str) -> bool:
    """Whether the newest complete checkpoint of a run holds responses that have not ended."""
    states = sorted((folder / "runs" / name / "checkpoints").glob("step-*/run.json"))
    return bool(states) and json.loads(states[-1].read_text())["buffer"]["has_open"]


def megarl(folder: Path, verb: str, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What a command that concerns a run has said."""
    settings = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-m", "megarl.cli", verb, f"runs/{name}", *options],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def drain(folder: Path, name: str) -> None:
    """`megarl drain`, which waits until the run has ended."""
    done = megarl(folder, "drain", name)
    if done.returncode != 0 or "is complete" not in done.stdout:
        raise RuntimeError(f"megarl drain failed:\n{done.stdout}{done.stderr}")


def ask_for_engines(folder: Path, name: str, count: int) -> None:
    """`megarl engines`, as soon as the run that has just begun takes requests."""
    began = time.monotonic()
    while (done := megarl(folder, "engines", name, "--count", str(count))).returncode:
        if time.monotonic() - began > LIMIT_S:
            raise RuntimeError(f"megarl engines failed:\n{done.stdout}{done.stderr}")


def ask(folder: Path, name: str, *, drains: bool, fewer_engines: bool) -> str:
    """Resume the run, ask it to end soon, and say whether it did, with a checkpoint of all that it recorded.

    Two steps after a checkpoint another was due; the step that is asked in has none of its own. fewer_engines: it
    begins with two, and is asked for one after its first step.
    """
    log = folder / f"{name}.log"
    log_size = log.stat().st_size
    process, began = start(folder, name), time.monotonic()

    def wait_for(words: bytes, count: int) -> None:
        while len(re.findall(words, log.read_bytes()[log_size:], re.MULTILINE)) < count:
            is_late = time.monotonic() - began > LIMIT_S
            if is_late and process.poll() is None:
                kill(process)
            if is_late or process.poll() is not None:
                raise RuntimeError(f"the run has no {words!r}:\n{log.read_text()[-4000:]}")
            time.sleep(_POLL_S)

    if fewer_engines:
        wait_for(rb"^step \d+/", 1)
        ask_for_engines(folder, name, 1)
        wait_for(rb"^engine 1 has left", 1)
    wait_for(rb"^step \d+/", EVERY)
    if drains:
        drain(folder, name)
    else:
        process.send_signal(signal.SIGUSR1)
    code = process.wait(LIMIT_S)
    expected = _DRAINED if drains else _TRY_AGAIN
    if code != expected:
        return f"ended with code {code}, not {expected}"
    last = records(folder, name)[-1]["step"]
    saved = (folder / "runs" / name / "checkpoints" / f"step-{last:06d}" / "manifest.json").exists()
    return (
        f"asked after {EVERY} steps, ended with{'' if saved else 'out'} a checkpoint of step {last}"
    )


def differences(
    folder: Path, run_name: str, other: str, others: tuple[str, ...] = (), *, episodes: bool
) -> list[str]:
    """What is not the same in two runs that ended; others: beginnings of metrics that may differ.

    Seconds of tools, which the samples of episodes have, may differ, and the file of the buffer with them.
    """
    unequal = []
    for record, theirs in zip(records(folder, run_name), records(folder, other), strict=True):
        is_time = (
            "time/",
            "idle/",
            "plan/",
            "memory/",
            "checkpoint/",
            "speed/",
            "reshard/seconds",
            "reshard/plan_s",
            *others,
        )
        names = [
            name
            for name in record | theirs
            if not name.startswith(is_time) and name not in _SECONDS
        ]
        wrong = [name for name in names if record.get(name) != theirs.get(name)]
        unequal += [
            f"step {record['step']}: {name} {record.get(name)} {theirs.get(name)}" for name in wrong
        ]
    runs = [folder / "runs" / name for name in (run_name, other)]
    if (
        len(
            {
                re.sub(rb'"tool_s": [^,}]*', b"", (run / "samples.jsonl").read_bytes())
                for run in runs
            }
        )
        > 1
    ):
        unequal.append("samples.jsonl")
    ends = [
        json.loads((run / "checkpoints" / f"step-{STEPS:06d}" / "manifest.json").read_text())
        for run in runs
    ]
    # .metadata names the folder that it was written to
    files, theirs = (end["files"] for end in ends)
    apart = {".metadata", BUFFER_FILE} if episodes else {".metadata"}
    names = [name for name in sorted(files | theirs) if Path(name).name not in apart]
    return unequal + [name for name in names if files.get(name) != theirs.get(name)]


def engine_changes(folder: Path, name: str) -> list[str]:
    """Whether a second engine has joined the run and left it."""
    log = (folder / f"{name}.log").read_text()
    missing = [words for words in ("engine 1 has joined", "engine 1 has left") if words not in log]
    counts = [record.get("reshard/engines") for record in records(folder, name)]
    if 2.0 not in counts or counts[-1] != 1.0:
        missing.append(f"reshard/engines: {counts}")
    return missing


def asked_for() -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="where the runs are written (default: a temporary folder)"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drain", action="store_true", help="megarl drain in place of SIGUSR1")
    parser.add_argument(
        "--spread", action="store_true", help="also a run on two engines with slow rewards"
    )
    parser.add_argument("--ahead", action="store_true", help="sample a phase while the ranks learn")
    parser.add_argument(
        "--episodes", action="store_true", help="samples are episodes with an environment"
    )
    parser.add_argument(
        "--lora", action="store_true", help="learn adapters, merged and rounded stochastically"
    )
    parser.add_argument(
        "--elastic", action="store_true", help="engines join and leave the disturbed run"
    )
    return parser.parse_args()


def overrides_of(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Those of all runs, and those that the run on two engines has besides."""
    overrides = [*OVERRIDES]
    spread = [*SPREAD]
    if arguments.ahead:
        overrides += AHEAD
        spread += MIXED
    if arguments.elastic:
        overrides += ELASTIC
    if arguments.lora:
        overrides += LORA
    if arguments.episodes:
        overrides += EPISODES
        spread = [override for override in spread if not override.startswith("reward.")]
    return overrides, spread


def end_again_and_again(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """End the disturbed run at every point; what is told of each, and how many left responses that have not ended."""
    elastic = arguments.elastic
    ends = []
    num_open = 0
    for index, (after, delay_s) in enumerate(points(arguments.points, arguments.seed)):
        if index == arguments.points // 2:
            end = ask(folder, "disturbed", drains=arguments.drain, fewer_engines=elastic)
        else:
            is_first = index == 0
            end = disturb(folder, "disturbed", after, delay_s, more_engines=elastic and is_first)
        ends.append(end)
        num_open += has_open(folder, "disturbed")
        if not arguments.json:
            print(end, flush=True)
    return ends, num_open


def main() -> int:
    arguments = asked_for()
    episodes = arguments.episodes
    overrides, spread = overrides_of(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, overrides, episodes=episodes)
        finish(folder, "undisturbed")
        ends, num_open = end_again_and_again(folder, arguments)
        finish(folder, "disturbed")
        others = OF_ENGINES if arguments.elastic else ()
        unequal = differences(folder, "undisturbed", "disturbed", others, episodes=episodes)
        if arguments.elastic:
            unequal += engine_changes(folder, "disturbed")
        if not num_open:
            unequal.append(
                "no run was resumed from a checkpoint with responses that have not ended"
            )
        if arguments.spread:
            finish(folder, "spread", *spread)
            unequal += differences(folder, "undisturbed", "spread", OF_ENGINES, episodes=episodes)
    if arguments.json:
        print(json.dumps({"ends": ends, "differences": unequal}))
    else:
        print(
            "\n".join(unequal)
            or f"identical after {len(ends)} ends: weights, optimizer, metrics, samples"
        )
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
