"""Evaluation: answers to the prompts of every evaluation set, sampled and scored as the recipe says of the set."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.controller.run import Run
from megarl.controller.silent_faults import step_of_faults
from megarl.tracking.metrics import eval_metrics
from megarl.tracking.run_log import Record
from megarl.types import UserError
from megarl.types.reward_result import REWARD_HINT
from megarl.types.sampling import Sampling

# beyond the rounds of a training step, whose samples have random streams of their own
_STREAMS = 1_000_000


def evaluate(run: Run, record: Record) -> None:
    """Sample and score all evaluation sets with the published weights.

    Raises UserError(reward.function), or (episode) where that rewards, where every reward of a set failed.
    """
    with record.phase("eval"):
        answered = {}
        for number, (name, prompts) in enumerate(run.inputs.eval_sets.items()):
            sampling = eval_sampling(run.recipe, name, record.step, number)
            with step_of_faults(run, record.step):
                answered[name] = run.fleet.engines.sample(prompts, sampling).summaries
    for name, groups in answered.items():
        record.failed(groups)
        if not any(len(group.rewards_G) for group in groups):
            first = groups[0].failures[0]
            reward = run.recipe.reward
            where = "reward.function" if reward.function or reward.by_source else "episode"
            problem = f"every verdict of data.eval.{name} failed, the first: {first}"
            raise UserError(where, problem, REWARD_HINT)
    record.add(eval_metrics(answered))


def eval_sampling(recipe: Recipe, name: str, step: int, number: int) -> Sampling:
    """How the answers to evaluation set `name`, the set at index `number`, are sampled."""
    keys = recipe.evaluation.of(name)
    return Sampling(
        keys.samples,
        keys.max_response_tokens or recipe.rollout.max_response_tokens,
        keys.temperature,
        keys.top_p,
        stream=(recipe.run.seed, step, _STREAMS + number),
        may_lose_all=True,
    )
