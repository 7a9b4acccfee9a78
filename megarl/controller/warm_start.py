"""The warm start: supervised steps on the data's own answers before step 1."""

from __future__ import annotations

from dataclasses import replace

from megarl.controller.evaluation import evaluate
from megarl.controller.run import Run, Step
from megarl.controller.stages import learn, reshard
from megarl.fleet.rank_groups import GroupBuffer
from megarl.tracking.metrics import train_metrics


def warm_start(run: Run) -> None:
    """Steps of the row "sft", with a learning rate of their own; the weights are published once, after the last."""
    warm = run.recipe.warm_start
    supervised = replace(
        run,
        algorithm="sft",
        learning_rate=lambda step: warm.lr * min(1.0, step / max(1, warm.warmup_steps)),
        prompts_per_step=warm.sequences_per_step,
        # after a failure the run begins again
        repetition=None,
    )
    readings = run.fleet.onload_for("train")
    for number in range(1, warm.steps + 1):
        run.saver.leave_within_step()
        with run.log.warm_step(number) as record:
            step = learn(supervised, Step(number, record))
            assert step.trained is not None
            record.add(train_metrics(step.trained.updates, "warm_start"))
            if number == warm.steps:
                record.add(readings | run.saver.begin(0, GroupBuffer()))
                reshard(run.fleet, record)
                evaluate(run, record)
    run.saver.settle(0)
