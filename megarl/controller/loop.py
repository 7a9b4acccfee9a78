"""The training loop. It knows the order of the phases; what an algorithm needs is stages that its row names.

Each phase begins when the phase before it has ended, and the samples stay in the object store: the controller passes
references. With `rollout.ahead` engines that have GPUs of their own sample a phase of the buffer from the end of
`rollout` on, and `ahead` waits for it; otherwise the loop is synchronous.

| phase   | is fed by                                      | waits for                    | is freed by            |
|---------|------------------------------------------------|------------------------------|------------------------|
| rollout | prompts, the buffer, weights of version n       | the engines' KV cache        | the next hand-over     |
| score   | groups of the rollout                          | the reward model's memory    | the next hand-over     |
| observe | samples with their rewards                     | the policy's memory          | hand-over to `critic`  |
| critic  | samples, KL penalties of `observe`             | the critic's memory          | the next hand-over     |
| train   | samples with advantages, token values          | the policy's memory          | hand-over to `reshard` |
| ahead   | the buffer, prompts, weights of version n       | nothing                      | its own end            |
| save    | weights and optimizer after the updates        | the checkpoint before it     | `Saver.settle`         |
| reshard | the policy's weights                           | the engines' weights' memory | hand-over to `rollout` |
| eval    | evaluation prompts, weights of version n + 1   | the engines' KV cache        | the next step's phases |

An asynchronous checkpoint is copied in `save` and written while the next steps run. A reshard that fails is tried once
more, see `Fleet.reshard`. What is repeated when a process fails is decided in `megarl.recovery`.
"""

from __future__ import annotations

from megarl.checkpoints.snapshots import Snapshot
from megarl.cluster.ray_session import Cluster
from megarl.config import Recipe
from megarl.controller.evaluation import evaluate
from megarl.controller.learning_rate import policy_lr
from megarl.controller.run import Run, Step
from megarl.controller.saver import Saver
from megarl.controller.stages import finish_rollout, learn, publish, save, settle
from megarl.controller.steps import enter, run_steps
from megarl.data.inputs import Inputs
from megarl.fleet.external_fleet import make_fleet
from megarl.fleet.rank_groups import GroupBuffer
from megarl.fleet.rank_recovery import repetition
from megarl.fleet.step_timeline import StepTimeline
from megarl.tracking.run_log import RunLog
from megarl.tracking.secrets import redacted


def train(recipe: Recipe, inputs: Inputs, log: RunLog, start: Snapshot | None = None) -> None:
    """Run a checked recipe, from a checkpoint on where one is given.

    Raises WorkerFailed when a process of the run fails, UserError when the reward does, EndedEarly when asked to.
    """
    session = Cluster.of_run(recipe, log.say, log.losses)
    session.watch_phases(log.phases, log.folder, redacted)
    with session as cluster:
        log.say("starting training ranks and engines")
        run, buffer = begin(recipe, inputs, cluster, log, start)
        run_steps(run, start, buffer, take_step)


def begin(
    recipe: Recipe, inputs: Inputs, cluster: Cluster, log: RunLog, start: Snapshot | None
) -> tuple[Run, GroupBuffer]:
    """Everything before the warm start and the first step, of a new run or after a checkpoint; and its buffer."""
    with log.start(is_new=start is None) as record:
        record.add(inputs.metrics)
        with record.phase("start"):
            fleet = make_fleet(cluster, recipe, log.say)
        log.write_options(fleet.options())
        saver = Saver(recipe, fleet, inputs.prompts, log.folder, log.say, log.drain)
        run = Run(
            recipe=recipe,
            fleet=fleet,
            algorithm=recipe.algorithm.name,
            learning_rate=policy_lr(recipe, fleet),
            inputs=inputs,
            saver=saver,
            log=log,
            prompts_per_step=recipe.rollout.prompts_per_step,
            repetition=repetition(cluster, recipe, fleet, saver),
            timeline=StepTimeline(
                cluster, recipe.run.timeline, log.folder, log.say, lambda: fleet.trainers.workers
            ),
        )
        run.saver.leave_if_wanted()
        return run, enter(run, record, start)


def take_step(run: Run, number: int, buffer: GroupBuffer) -> GroupBuffer:
    """One training step with its evaluation and checkpoint; buffer: of the step before, and for the next."""
    run.saver.leave_if_wanted()
    with run.timeline.recording(number), run.log.step(number) as record:
        buffer = train_step(run, Step(number, record, buffer))
        if number % run.recipe.evaluation.every == 0 or number == run.recipe.run.steps:
            evaluate(run, record)
    settle(run, number)
    return buffer


def train_step(run: Run, step: Step) -> GroupBuffer:
    """Rollout -> reward -> advantage -> train -> reshard; the buffer for the next step."""
    # rollout, reward, advantage and train: the stages of the algorithm's row
    step = learn(run, step)
    step = finish_rollout(run, step)
    step.record.add(step.update_metrics)
    save(run, step)
    publish(run, step)
    step.record.add(step.speed)
    return step.buffer
