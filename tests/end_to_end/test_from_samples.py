"""The two sides of a run, one after the other: samples into a file, and the file through several layouts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.samples.parquet import open_samples
from tests.samples.test_parquet import SHAPE, group, write

pytestmark = pytest.mark.slow

# of a rank: longer samples are split over both
ROW = 12
LAYOUTS = {
    "one": ("train.tp=1", "train.pp=1", "train.ep=1", "placement.gpus=1"),
    "many": (
        "train.tp=1",
        "train.pp=1",
        "train.ep=2",
        "placement.gpus=2",
        "train.cp=auto",
        f"train.tokens_per_micro_batch={ROW}",
        "critic.ranks.tp=2",
        "critic.ranks.ep=1",
        "critic.ranks.tokens_per_micro_batch=4096",
    ),
}
# An untrained model is never right: by the exact answer every advantage, loss and gradient would be 0.
REWARD = """
def score(response, answer, row):
    return sum(map(ord, response)) % 7 / 7
"""


# By day one layout; that all train alike, tests/training and tests/parallel hold of the ranks.
@pytest.mark.parametrize(
    "layouts", [["many"], pytest.param(["one", "many"], marks=pytest.mark.nightly)]
)
def test_a_file_of_samples_trains_alike_in_every_layout(
    launch: Callable, tmp_path: Path, layouts: list[str]
):
    (tmp_path / "text_reward.py").write_text(REWARD)
    common = (
        "warm_start.steps=0",
        "rollout.prompts_per_step=4",
        "reward.function=text_reward:score",
    )
    common += ("rollout.temperature=0.7",)
    engine = ("rollout.engine.tp=1", *LAYOUTS["one"])
    sampling = launch(
        *common, *engine, "run.name=sampling", "--out=two.parquet", "--steps=2", verb="rollout"
    )
    sampling.ends_well(200)
    file = open_samples(sampling.folder / "two.parquet")
    assert file.num_samples == (32, 32)
    samples = [sample for step in (1, 2) for group in file.groups(step) for sample in group.samples]
    rows = [sample.only_row for sample in samples]
    assert any(len(row.prompt_ids) + len(row.response_ids_T) > ROW for row in rows)
    assert {part.version for row in rows for part in row.parts} == {0}

    for name in layouts:
        keys = (
            *common,
            *LAYOUTS[name],
            f"run.name={name}",
            "run.steps=2",
            "train.updates_per_step=2",
        )
        # the critic's ranks hear of it
        keys += ("algorithm.name=ppo", "algorithm.kl_coefficient=0.1")
        training = launch(*keys, "--from-samples=two.parquet")
        while not (training.folder / "runs" / name / "recipe.yaml").exists():
            assert training.process.poll() is None
            time.sleep(0.1)
        training.process.send_signal(signal.SIGUSR2)
        training.ends_well(200)
        (page,) = (training.folder / "runs" / name / "hangs").iterdir()
        assert "because SIGUSR2 asked for it" in page.read_text()
        saved = (training.folder / "runs" / name / "recipe.yaml").read_text()
        assert "#     moe_router_dtype: fp32\n" in saved, "what the ranks ran with"
    sampled, (first, *others) = (
        sampling.records("sampling"),
        [sampling.records(name) for name in layouts],
    )
    for step, alone in enumerate(first, start=1):
        assert alone["step"] == step
        assert alone["reward/mean"] == sampled[step]["reward/mean"] > 0
        assert not any(key.startswith(("reshard/", "eval/", "time/rollout")) for key in alone), (
            "no engine has a part"
        )
        assert min(alone["train/grad_norm/1"], alone["train/grad_norm/2"]) > 0.1
        assert abs(alone["train/loss/2"]) > 1e-4
        for spread in others:
            # two updates whose gradients have a norm of 30 have multiplied the rounding by then
            _assert_alike(alone, spread[step - 1], rel=1e-4 if step == 1 else 5e-4)
    assert len(first) == 2
    assert first[0]["rollout/logprob_diff_mean"] < 1e-6, (
        "the first step's policy is the one that sampled"
    )
    assert first[1]["rollout/logprob_diff_mean"] > 1e-3, "the second's has learnt since"


def _assert_alike(alone: dict[str, float], spread: dict[str, float], *, rel: float) -> None:
    """The records of one step in two layouts."""
    assert spread["reward/mean"] == alone["reward/mean"]
    for key in ("loss", "grad_norm", "tokens"):
        for name in (f"train/{key}", f"train/{key}/1", f"train/{key}/2"):
            assert spread[name] == pytest.approx(alone[name], rel=rel, abs=1e-6)
    for key in ("loss", "grad_norm", "value_mean", "return_mean", "explained_variance"):
        assert spread[f"critic/{key}"] == pytest.approx(alone[f"critic/{key}"], rel=rel, abs=1e-5)
    assert spread["rollout/logprob_diff_mean"] == pytest.approx(
        alone["rollout/logprob_diff_mean"], rel=1e-3, abs=1e-6
    )


def test_more_steps_than_the_file_has(launch: Callable, tmp_path: Path):
    """Told with both numbers, before a rank starts."""
    file = write(tmp_path / "few.parquet", [group(1)])
    command = launch("warm_start.steps=0", "run.steps=2", f"--from-samples={file.path}")
    assert command.finish(60) == 2
    lines = command.err.splitlines()
    assert (
        f"run.steps: 2 is more than the 1 steps in {file.path}; set it to at most 1, or sample more"
        in lines
    )
    other = f"{file.path}: it was sampled from a vocabulary of {SHAPE.vocab_size} "
    assert any(line.startswith(other) for line in lines)
    assert not (command.folder / "runs").exists()
