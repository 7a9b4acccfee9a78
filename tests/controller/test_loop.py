"""The loop's source, and the calls of a step in their order; fleet, saver and metrics are fakes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.algos import ALGORITHMS, hyperparameters_of
from megarl.algos.statistics import LOSS
from megarl.config.loading import load_recipe
from megarl.controller import loop, stages, warm_start
from megarl.controller.learning_rate import policy_lr
from megarl.controller.run import Run, Step
from megarl.controller.stages import LEARNING_STAGES, STAGES
from megarl.episodes.demonstrations import demonstrations
from megarl.fleet.rank_groups import GroupBuffer, RolloutBatch, Trained
from megarl.resharding.member import Stats
from megarl.tracking.run_log import Record
from megarl.training.row_diffs import RowDiffs
from megarl.types import (
    EndedEarly,
    GroupSummary,
    PhaseBalance,
    Prompt,
    SampleGroup,
    SamplePart,
    UserError,
)
from tests.samples.responses import response_rows

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
AHEAD = ("algorithm.rollout_correction=tis", "rollout.ahead=1")
LOOP = Path(loop.__file__).read_text(encoding="utf-8")


def summary(
    prompt: str, rewards: list[float], finished: bool = True, version: int = 1
) -> GroupSummary:
    count, rewards_G = len(rewards), np.array(rewards, np.float32)
    finished_G = np.full(count, finished)
    rows = response_rows(1, [(SamplePart(version, 3),)] * count)
    return GroupSummary(
        prompt,
        "",
        ("",) * count,
        rows,
        finished_G,
        rewards_G,
        rewards_G > 0,
    )


def refs(buffer: GroupBuffer) -> list[Any]:
    return [entry.ref for entry in buffer.entries]


class Values(str):
    """In place of token values."""

    def for_readers(self) -> Values:
        return Values(f"{self} for the policy")


class Fleet:
    """Notes its calls. A round of sampling gives each prompt a correct and a wrong response."""

    def __init__(self, has_critic: bool, recipe: Any) -> None:
        self.calls: list[str] = []
        self.version, self.attempts, self.reward_model = 1, 1, None
        self.finished, self.rewards = True, [1.0, 0.0]
        self.engines = SimpleNamespace(
            begin=self.begin,
            processes=SimpleNamespace(engines=["engine 0"]),
            have_own_gpus=recipe.rollout.ahead > 0,
            num_engines=1,
        )
        self.trainers = SimpleNamespace(
            compute_logprobs=self.compute_logprobs,
            train=self.train,
            row_diffs=self.row_diffs,
            plan_of=lambda *_: "policy's plan",
        )
        critic = SimpleNamespace(
            plan_of=lambda _: "critic's plan", values=self.values, train=self.train_critic
        )
        critic.recipe = recipe
        self.critic = critic if has_critic else None

    def onload_for(self, phase: str) -> dict[str, float]:
        self.calls.append(f"hand over to {phase}")
        return {f"memory/after_{phase}_bytes": 1.0}

    def begin(self, entries: Any, sampling: Any, *, beside_training: bool = False) -> Any:
        self.calls.append(f"sample {len(entries)}{' ahead' if beside_training else ''}")
        ids = [entry.prompt.id for entry in entries]
        new = [summary(name, self.rewards, self.finished, self.version) for name in ids]
        sampled = [
            replace(entry, summary=of, ref=f"ref {of.prompt_text}")
            for entry, of in zip(entries, new, strict=True)
        ]

        def result() -> tuple[list[Any], PhaseBalance]:
            self.calls.extend(["await what was sampled ahead"] if beside_training else [])
            return sampled, PhaseBalance((1,), tail_s=0.0, idle_s=0.0, seconds=0.0)

        return SimpleNamespace(result=result, sampled_s=0.0)

    def put(self, groups: list[SampleGroup]) -> RolloutBatch:
        self.calls.append(f"put {len(groups)}")
        summaries = [summary(group.prompt.id, [1.0]) for group in groups]
        return RolloutBatch(summaries, [f"ref {group.prompt.id}" for group in groups])  # type: ignore[misc]

    def compute_logprobs(self, algorithm: str, samples: Any, refs: list[str], readers: str) -> str:
        self.calls.append(f"observe {len(samples)} for the {readers}")
        return "penalties"

    def values(self, samples: Any, refs: list[str], readers: str) -> Values:
        self.calls.append(f"values of {len(samples)} for the {readers}")
        return Values("values")

    def train_critic(self, token_values: str, lr: float, logprobs: str | None) -> str:
        self.calls.append(f"train the critic on {token_values}, {logprobs}")
        return "updates"

    def train(
        self,
        algorithm: str,
        samples: Any,
        refs: Any,
        lr: float,
        *,
        token_values: Any,
        logprobs: Any,
    ) -> Trained:
        self.calls.append(
            f"train {algorithm} on {len(samples)} of {refs}, {token_values}, {logprobs}"
        )
        return Trained([{LOSS: (lr,)}], {"speed/train_tokens_per_s": 1.0})

    def row_diffs(self) -> RowDiffs:
        return RowDiffs.joined([])

    def reshard(self) -> tuple[Stats, dict[str, float]]:
        self.calls.append("reshard")
        self.version += 1
        return Stats(1, 0, 0, 0, 0.0, 0.0), {"memory/after_rollout_bytes": 1.0}

    def take_engine_losses(self) -> int:
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of the quickstart's recipe with these overrides."""
    monkeypatch.setattr(stages, "update_metrics", lambda updates, room: {"critic/loss": 1.0})

    def make(*overrides: str) -> tuple[Run, Fleet]:
        recipe = load_recipe(QUICKSTART, ["rollout.prompts_per_step=2", "run.steps=9", *overrides])
        fleet: Any = Fleet(bool(ALGORITHMS[recipe.algorithm.name].critic), recipe)
        taken = iter(range(100))

        def begin(step: int, buffer: GroupBuffer) -> dict[str, float]:
            fleet.calls.append(f"save {step} and {refs(buffer)}")
            return {"memory/after_save_bytes": 1.0}

        saver: Any = SimpleNamespace(
            begin=begin, leave_within_step=lambda: None, settle=lambda step: fleet.calls.append(f"settle {step}"),
            is_due=lambda step: recipe.checkpoint.every is not None,
        )  # fmt: skip
        prompts = SimpleNamespace(
            take=lambda n: [Prompt(str(next(taken)), "", (1,), "7") for _ in range(n)]
        )
        tokenizer = type(
            "Tokenizer", (), {"eos_token_id": 0, "__call__": lambda *_, **__: {"input_ids": [1, 2]}}
        )()
        demonstrate = demonstrations(tokenizer, turn_tokenizer=None, messages=None)
        inputs: Any = SimpleNamespace(prompts=prompts, demonstrate=demonstrate, eval_sets={})
        log: Any = None
        timeline: Any = None
        run = Run(
            recipe=recipe,
            fleet=fleet,
            algorithm=recipe.algorithm.name,
            learning_rate=policy_lr(recipe, fleet),
            inputs=inputs,
            saver=saver,
            log=log,
            prompts_per_step=recipe.rollout.prompts_per_step,
            repetition=None,
            timeline=timeline,
        )
        return run, fleet

    return make


def step(
    run: Run, number: int = 1, buffer: GroupBuffer | None = None
) -> tuple[GroupBuffer, Record]:
    """The buffer and the record of a step after one with this buffer."""
    record = Record(number)
    return loop.train_step(run, Step(number, record, buffer or GroupBuffer())), record


def test_the_step_has_no_branch_and_knows_no_algorithm() -> None:
    source = textwrap.dedent(inspect.getsource(loop.train_step))
    branches = ast.If, ast.IfExp, ast.Match, ast.BoolOp
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, branches)]
    strings = {node.value for node in ast.walk(ast.parse(LOOP)) if isinstance(node, ast.Constant)}
    assert not strings & ALGORITHMS.keys()
    assert "ALGORITHMS" not in LOOP and "hyperparameters" not in LOOP


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_stage_of_a_row_is_known(algorithm: str) -> None:
    other: Any = SimpleNamespace(name="", given={})
    source, *learning = ALGORITHMS[algorithm].stages(hyperparameters_of(algorithm, other))
    assert source in STAGES.keys() - LEARNING_STAGES.keys()
    assert learning and set(learning) <= LEARNING_STAGES.keys()


def test_a_step_of_rollout_reward_train_and_reshard(made: Any) -> None:
    run, fleet = made("algorithm.name=grpo")
    buffer, record = step(run)
    assert refs(buffer) == []
    assert fleet.calls == [
        *("sample 2", "hand over to train", "train grpo on 4 of ['ref 0', 'ref 1'], None, None"),
        *("save 1 and []", "reshard"),
    ]
    assert {
        "reward/mean",
        "train/lr",
        "train/loss",
        "reshard/version",
        "speed/train_tokens_per_s",
    } <= set(record.metrics)
    assert record.metrics["reshard/version"] == 2 and len(record.groups) == 2
    phases = [name for name in record.close() if name.startswith("time/")]
    assert phases[:-2] == ["time/rollout_s", "time/train_s", "time/save_s", "time/reshard_s"]


@pytest.mark.parametrize(
    ("algorithm", "rewards", "advantages", "without_variance"),
    [
        ("rloo", [1.0, 0.0], [1.0, -1.0], 0.0),
        ("rloo", [1.0, 1.0], [0.0, 0.0], 1.0),
        ("reinforce_pp", [1.0, 1.0], [1.0, 1.0], None),
        ("ppo", [1.0, 0.0], [None, None], None),
    ],
)
def test_a_step_records_its_samples_advantages_and_groups_that_teach_nothing(
    made: Any,
    algorithm: str,
    rewards: list[float],
    advantages: list[float | None],
    without_variance: float | None,
) -> None:
    """The share of such groups is of algorithms that compare the samples of a prompt; GAE is of tokens."""
    run, fleet = made(f"algorithm.name={algorithm}")
    fleet.rewards = rewards
    _, record = step(run)
    assert record.advantages == {
        (group, sample): advantages[sample] for group in (0, 1) for sample in (0, 1)
    }
    assert record.metrics.get("reward/groups_without_variance") == without_variance


def test_a_critic_learns_from_kl_penalties_and_before_the_policy(made: Any) -> None:
    run, fleet = made(
        "algorithm.name=ppo", "algorithm.kl_coefficient=0.1", "algorithm.critic_warmup_steps=1"
    )
    _, first = step(run)
    assert fleet.calls == [
        *("sample 2", "hand over to train", "observe 4 for the critic's plan"),
        *(
            "hand over to critic",
            "values of 4 for the policy's plan",
            "train the critic on values, penalties",
        ),
        *("save 1 and []", "reshard"),
    ]
    assert "critic/lr" in first.metrics and not {"train/lr", "speed/train_tokens_per_s"} & set(
        first.metrics
    )
    fleet.calls.clear()
    step(run, 2)
    assert fleet.calls[-4:] == [
        *(
            "hand over to train",
            "train ppo on 4 of ['ref 2', 'ref 3'], values for the policy, penalties",
        ),
        *("save 2 and []", "reshard"),
    ]
    lr = [policy_lr(run.recipe, fleet)(step) for step in range(1, 10)]
    assert lr[0] is None and None not in lr[1:]


def test_demonstrations_are_neither_sampled_nor_scored(made: Any) -> None:
    run, fleet = made("algorithm.name=sft")
    _, record = step(run)
    assert fleet.calls[:3] == [
        "put 2",
        "hand over to train",
        "train sft on 2 of ['ref 0', 'ref 1'], None, None",
    ]
    assert "reward/mean" not in record.metrics


def test_leftover_groups_come_back_in_the_next_step(made: Any) -> None:
    run, fleet = made("algorithm.name=dapo", "algorithm.oversample=2.0")
    buffer, _ = step(run)
    assert refs(buffer) == ["ref 2", "ref 3"]
    assert "save 1 and ['ref 2', 'ref 3']" in fleet.calls, "a checkpoint has them too"
    fleet.calls.clear()
    buffer, record = step(run, 2, buffer)
    assert refs(buffer) == []
    assert (record.metrics["stale/token_mean"], record.metrics["stale/token_max"]) == (1.0, 1)
    assert fleet.calls[1] == "train dapo on 4 of ['ref 2', 'ref 3'], None, None", (
        "nothing is sampled"
    )


@pytest.mark.parametrize("more", [[], AHEAD], ids=["shared", "own GPUs"])
def test_idle_seconds_are_of_engines_with_gpus_of_their_own(made: Any, more: list[str]) -> None:
    run, _ = made("algorithm.name=grpo", *more)
    _, record = step(run)
    closed = record.close()
    assert ("idle/engines_s" in closed) == bool(more)
    assert 0.0 <= closed["idle/engines_share"] <= 1.0, "of engines that share GPUs, too"


def test_ahead_the_next_phase_is_sampled_while_the_ranks_learn(made: Any) -> None:
    """It has begun before the ranks get the memory, and has ended before the checkpoint, which has its groups."""
    run, fleet = made("algorithm.name=grpo", *AHEAD)
    buffer, record = step(run)
    assert fleet.calls == [
        *(
            "sample 2",
            "sample 2 ahead",
            "hand over to train",
            "train grpo on 4 of ['ref 0', 'ref 1'], None, None",
        ),
        *("await what was sampled ahead", "save 1 and ['ref 2', 'ref 3']", "reshard"),
    ]
    metrics = record.close()
    times = [name for name in metrics if name.startswith("time/")]
    assert times[:-2] == [
        "time/rollout_s",
        "time/train_s",
        "time/ahead_s",
        "time/save_s",
        "time/reshard_s",
    ]
    assert sum(metrics[name] for name in times[:-1]) == pytest.approx(metrics["time/step_s"])
    assert metrics["rollout/waited_s"] >= metrics["time/train_s"], "the stand-in samples in no time"
    fleet.calls.clear()
    _, record = step(run, 2, buffer)
    assert fleet.calls[:3] == [
        *(
            "sample 2 ahead",
            "hand over to train",
            "train grpo on 4 of ['ref 2', 'ref 3'], None, None",
        ),
    ]
    assert record.metrics["stale/token_max"] == 1


@pytest.mark.parametrize(("every", "calls"), [(None, 0), (4, 1)])
def test_ahead_the_last_step_samples_for_the_run_that_may_go_on(
    made: Any, every: int | None, calls: int
) -> None:
    """Its checkpoint is as that of any other step; without one nobody would have the samples."""
    overrides = [] if every is None else [f"checkpoint.every={every}"]
    run, fleet = made("algorithm.name=grpo", *AHEAD, *overrides)
    assert len(step(run, 9)[0].entries) == 2 * calls
    assert fleet.calls.count("sample 2 ahead") == calls


def test_ahead_a_run_that_goes_on_with_more_steps_is_as_one_that_had_them_from_the_start(
    made: Any,
) -> None:
    """What its last step did, and the buffer of its checkpoint, with the same prompts and random streams."""
    outcomes = []
    for steps in (2, 9):
        keys = ("algorithm.name=grpo", f"run.steps={steps}", "checkpoint.every=7")
        run, fleet = made(*keys, *AHEAD)
        buffer = GroupBuffer()
        for number in (1, 2):
            buffer = step(run, number, buffer)[0]
        drawn = [(entry.number, entry.prompt, entry.stream) for entry in buffer.entries]
        outcomes.append((fleet.calls, drawn, refs(buffer), buffer.trained))
    assert outcomes[0] == outcomes[1]
    assert buffer.entries[0].stream == (run.recipe.run.seed, 3, 0)


def test_ahead_what_waits_is_not_sampled(made: Any) -> None:
    """Enough groups that are complete, and none that is open: the next step has no phase, now as without ahead."""
    run, fleet = made("algorithm.name=dapo", "algorithm.oversample=2.0", *AHEAD)
    step(run)
    assert not any("ahead" in call for call in fleet.calls)


def test_a_wish_to_end_is_heard_before_each_phase(made: Any) -> None:
    """What the phases of the step gave is lost; the step before is what a run goes on from."""
    run, fleet = made("algorithm.name=dapo", "algorithm.oversample=1.0")
    wishes = iter([None, EndedEarly(3)])

    def leave() -> None:
        if wish := next(wishes):
            raise wish

    run.saver.leave_within_step = leave
    fleet.rewards = [1.0, 1.0]  # of which dynamic sampling keeps no group
    with pytest.raises(EndedEarly):
        step(run, 4)
    assert fleet.calls == ["sample 2"]


def test_a_step_without_a_finished_response_ends_the_run(made: Any) -> None:
    run, fleet = made("algorithm.name=grpo", "algorithm.overlong_filter=true")
    fleet.finished = False
    with pytest.raises(
        UserError, match=r"rollout\.max_response_tokens: every response of the step was cut"
    ):
        step(run)


def test_a_warm_start_is_supervised_steps_and_one_publication(made: Any) -> None:
    run, fleet = made(
        "algorithm.name=ppo", "warm_start.steps=2", "warm_start.sequences_per_step=3", "warm_start.lr=0.5",
        "warm_start.warmup_steps=2",
    )  # fmt: skip
    records: list[Record] = []

    class Log:
        def warm_step(self, number: int) -> Any:
            records.append(Record(0))
            return nullcontext(records[-1])

    warm_start.warm_start(replace(run, log=Log()))  # type: ignore[arg-type]
    assert fleet.calls == [
        "hand over to train",
        *(
            "put 3",
            "hand over to train",
            "train sft on 3 of ['ref 0', 'ref 1', 'ref 2'], None, None",
        ),
        *(
            "put 3",
            "hand over to train",
            "train sft on 3 of ['ref 3', 'ref 4', 'ref 5'], None, None",
        ),
        *("save 0 and []", "reshard", "settle 0"),
    ]
    assert [record.metrics["warm_start/loss"] for record in records] == [0.25, 0.5], (
        "the learning rate of the warm start"
    )
    assert not any("train/lr" in record.metrics for record in records)
    assert "reshard/version" in records[1].metrics and "reshard/version" not in records[0].metrics
