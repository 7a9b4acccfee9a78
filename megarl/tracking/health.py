"""Signs of a sick run in the history of its metrics, each with the recipe key that is the likely cause. Pure.

CONDITIONS is the table. A condition is reported with the step in which it begins, and again if it returns after it was
over. `Health` is what is known after some records: a run that resumes folds the records that it keeps, and goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from megarl.types import Metrics

_REFERENCE_STEPS = 5  # the first training steps, with whose medians later ones are compared
# steps in a row without a condition, after which it is over: some groups may differ by chance
_OVER_STEPS = 3
_EQUAL = 1e-6  # a standard deviation of equal rewards, relative to them: rounding of their mean
_ZERO_GRADIENT = 1e-10
_FAR = 0.1  # nats a token between engine and trainer: half of the usual clip
_GROWN = 5.0  # times the log-probability difference at the start
_NEAR = 0.02  # nats a token between engine and trainer that no clip feels
_OFTEN_TRUNCATED = 0.5
_EXPLODED = 2.0  # times the length of responses at the start
_OFTEN_IDLE = 0.5  # of a step
_MANY_UNUSED = 0.05  # of all experts: with few tokens some have none by chance
_ZERO_ENTROPY = 1e-4  # nats a token: the most likely token has a probability of 0.99999

GROUPS = "reward/groups_without_variance"
REWARD = "reward/mean"
STD = "reward/std"
ACCURACY = "reward/accuracy"
GRADIENT = "train/grad_norm"
ENTROPY = "train/entropy"
DIFF = "rollout/logprob_diff_mean"
TRUNCATED = "rollout/truncated"
LENGTH = "rollout/response_length_mean"
UNUSED_EXPERTS = "experts/unused"
STEP_S = "time/step_s"
IDLE_RANKS_S = "idle/ranks_s"
IDLE_ENGINES_S = "idle/engines_s"


@dataclass(frozen=True)
class Past:
    """What a step is compared with: the first training steps, and the step with the highest mean reward that varied."""

    first: tuple[Metrics, ...] = ()
    best: Metrics = field(default_factory=dict)

    def typical(self, name: str) -> float:
        """The median of the first training steps; NaN where these have no such metric."""
        return median([record[name] for record in self.first if name in record] or [math.nan])

    def after(self, now: Metrics) -> Past:
        """The past of the next step."""
        first = self.first
        if len(first) < _REFERENCE_STEPS:
            first = (*first, now)
        varies = now.keys() >= {REWARD, STD} and not _is_constant(now)
        if varies and now[REWARD] > self.best.get(REWARD, -math.inf):
            return Past(first, now)
        return Past(first, self.best)


@dataclass(frozen=True)
class Condition:
    """One sign of a sick run.

    reads: the metrics that it needs; a step that lacks one of them, as a step in which only the critic learns, neither
    shows the condition nor ends it. sign: of a step that shows it, what is wrong, and the likely recipe key; else None.
    num_steps: in how many steps in a row it shows before it is reported. of_rewards: only of algorithms that learn from
    rewards.
    """

    reads: tuple[str, ...]
    sign: Callable[[Metrics, Past], str | None]
    num_steps: int = 1
    of_rewards: bool = True


@dataclass(frozen=True)
class ConditionState:
    """A condition's steps so far. num_sick, num_healthy: the last steps in a row; is_reported: since it was over."""

    num_sick: int = 0
    num_healthy: int = 0
    is_reported: bool = False

    def after_sick(self, num_steps: int) -> ConditionState:
        """The state after a step that shows the condition."""
        num_sick = self.num_sick + 1
        return ConditionState(num_sick, is_reported=self.is_reported or num_sick >= num_steps)

    def after_healthy(self) -> ConditionState:
        """The state after a step that does not."""
        num_healthy = self.num_healthy + 1
        is_reported = self.is_reported and num_healthy < _OVER_STEPS
        return ConditionState(num_healthy=num_healthy, is_reported=is_reported)


@dataclass(frozen=True)
class Health:
    """What the records of a run so far tell. learns_from_rewards: not from demonstrations or a teacher alone.

    states: of each condition.
    """

    learns_from_rewards: bool
    past: Past = Past()
    states: dict[Condition, ConditionState] = field(default_factory=dict)

    def after(self, record: Metrics) -> tuple[Health, list[str]]:
        """The health with one record more, and a line for each condition that begins with it."""
        if record["step"] < 1:  # start-up and warm start
            return self, []
        now = {name: value for name, value in record.items() if math.isfinite(value)}
        states = dict(self.states)
        lines = []
        for condition in CONDITIONS:
            is_watched = self.learns_from_rewards or not condition.of_rewards
            if not (is_watched and now.keys() >= set(condition.reads)):
                continue
            before = states.get(condition, ConditionState())
            sign = condition.sign(now, self.past)
            if sign is None:
                states[condition] = before.after_healthy()
                continue
            states[condition] = before.after_sick(condition.num_steps)
            if states[condition].is_reported and not before.is_reported:
                lines.append(f"step {record['step']:.0f}: {sign}")
        return replace(self, past=self.past.after(now), states=states), lines

    def after_all(self, history: Iterable[Metrics]) -> Health:
        """The health after the records of a run that resumes, whose lines were printed before."""
        health = self
        for record in history:
            health, _ = health.after(record)
        return health


def _is_constant(now: Metrics) -> bool:
    """Whether all samples of the step have one reward."""
    return now[STD] <= _EQUAL * max(1.0, abs(now[REWARD]))


def _has_no_variance(now: Metrics) -> bool:
    """Whether no sample's reward differs from those that it is compared with: its group's, or the whole step's."""
    return _is_constant(now) or now.get(GROUPS, 0.0) == 1.0


def _without_variance(now: Metrics, past: Past) -> str | None:
    if not _has_no_variance(now):
        return None
    rewards = "no group has two different rewards"
    if _is_constant(now):
        rewards = f"every sample has the reward {now[REWARD]:g}"
    gradient = ""
    if now.get(GRADIENT, 1.0) <= _ZERO_GRADIENT:
        gradient = f", and {GRADIENT} is 0"
    cause = _cause_without_variance(now, past.best)
    return f"{rewards}, so that rewards teach nothing{gradient}; {cause}"


def _cause_without_variance(now: Metrics, best: Metrics) -> str:
    if now[ACCURACY] == 1.0 and best:
        return "all answers are right: data.train is too easy by now, or the run may end"
    if _is_constant(now) and best and best[REWARD] > now[REWARD] + 0.1 * best[STD]:
        rate = ""
        if "train/lr" in now:
            rate = f" ({now['train/lr']:g})"
        was = f"the mean reward was {best[REWARD]:.3g} in step {best['step']:.0f}"
        return f"{was}: train.lr{rate} is probably too high, try a tenth of it"
    if now.get(ENTROPY, 1.0) <= _ZERO_ENTROPY:
        return f"the samples of a prompt are alike, since {ENTROPY} is 0: lower train.lr, or raise rollout.temperature"
    if not _is_constant(now):
        return "raise rollout.samples_per_prompt or rollout.temperature, or use data.train of medium difficulty"
    difficulty = "data.train may be too hard or too easy for the model"
    return f"reward.function may not tell samples apart (try it with megarl reward-check), or {difficulty}"


def _few_varied_groups(now: Metrics, past: Past) -> str | None:
    """Nearly all groups have equal rewards, though not because the answers are right."""
    if not 0.95 <= now[GROUPS] < 1.0 or now[ACCURACY] >= 0.9:
        return None
    hint = "raise rollout.samples_per_prompt, use data.train of medium difficulty, or set algorithm.dynamic_sampling"
    return f"{now[GROUPS]:.0%} of the groups have equal rewards, so that few samples teach anything; {hint}"


def _is_explained(now: Metrics) -> bool:
    """Whether the rewards are why there is no gradient: that is reported by itself."""
    return STD in now and REWARD in now and _has_no_variance(now)


def _no_gradient(now: Metrics, past: Past) -> str | None:
    if now[GRADIENT] > _ZERO_GRADIENT or _is_explained(now):
        return None
    cause = _SATURATED
    if now.get("train/rollout_correction_masked", 0.0) >= 0.99:
        cause = (
            "algorithm.rollout_correction drops every token: engine and trainer disagree,"
            " see rollout/logprob_diff_mean"
        )
    elif now.get("train/clipped", 0.0) >= 0.99:
        cause = "every token is clipped: lower train.lr or train.updates_per_step, or raise algorithm.clip_high"
    return f"{GRADIENT} is 0, so that the policy does not change; {cause}"


def _faded_gradient(now: Metrics, past: Past) -> str | None:
    typical = past.typical(GRADIENT)
    if not _ZERO_GRADIENT < now[GRADIENT] < 1e-3 * typical or _is_explained(now):
        return None
    fall = f"{GRADIENT} has fallen from {typical:.2g} to {now[GRADIENT]:.2g}"
    return f"{fall}, so that the policy hardly changes; {_SATURATED}"


def _no_entropy(now: Metrics, past: Past) -> str | None:
    if now[ENTROPY] > _ZERO_ENTROPY or now[ACCURACY] >= 1.0:
        return None
    problem = f"{ENTROPY} is {now[ENTROPY]:.1g}, so that the policy gives one answer to a prompt and explores no other"
    return f"{problem}; {_MORE_ENTROPY}"


def _collapsed_entropy(now: Metrics, past: Past) -> str | None:
    """The entropy is a tenth of that at the start without the wrong answers having halved.

    A policy that is right more often is also more certain.
    """
    entropy = past.typical(ENTROPY)
    accuracy = past.typical(ACCURACY)
    is_still_wrong = 1.0 - now[ACCURACY] > 0.5 * (1.0 - accuracy)
    if not (_ZERO_ENTROPY < now[ENTROPY] < 0.1 * entropy and is_still_wrong):
        return None
    fall = f"{ENTROPY} has fallen from {entropy:.2g} to {now[ENTROPY]:.2g}"
    gain = f"{ACCURACY} from {accuracy:.0%} to {now[ACCURACY]:.0%} alone"
    return f"{fall}, with {gain}: the policy explores little; {_MORE_ENTROPY}"


def _far_engine(now: Metrics, past: Past) -> str | None:
    if now[DIFF] < _FAR:
        return None
    problem = f"{DIFF} is {now[DIFF]:.2g}: the engine gives the sampled tokens other probabilities than the trainer"
    return f"{problem}; {_NEARER}"


def _grown_diff(now: Metrics, past: Past) -> str | None:
    """The difference is several times that of the start, and not yet far: the engine's rounding alone does not grow."""
    typical = past.typical(DIFF)
    if not (_NEAR <= now[DIFF] < _FAR and now[DIFF] >= _GROWN * typical):
        return None
    growth = f"{DIFF} has grown from {typical:.2g} to {now[DIFF]:.2g}"
    return f"{growth}: the ratio measures the engine's error more and the policy's change less; {_NEARER}"


def _worse_policy(now: Metrics, past: Past) -> str | None:
    """The mean reward is below that of the best step by more than samples deviate there, at the start, and now."""
    best = past.best
    if not best or _has_no_variance(now):
        return None
    spread = max(best[STD], past.typical(STD), now[STD])
    if now[REWARD] > best[REWARD] - spread:
        return None
    rate = ""
    if "train/lr" in now:
        rate = f" ({now['train/lr']:g})"
    fall = f"{REWARD} has fallen from {best[REWARD]:.3g} in step {best['step']:.0f} to {now[REWARD]:.3g}"
    hint = "go back to a checkpoint of before with a third of it"
    return (
        f"{fall}: train.lr{rate} is probably too high, {hint}, unless data.train has become harder"
    )


def _truncated(now: Metrics, past: Past) -> str | None:
    if now[TRUNCATED] < _OFTEN_TRUNCATED:
        return None
    problem = f"{now[TRUNCATED]:.0%} of the responses are cut off, and have no answer to reward"
    return f"{problem}; raise rollout.max_response_tokens (of episodes episode.max_turns, episode.max_tokens)"


def _exploded_length(now: Metrics, past: Past) -> str | None:
    """Longer responses are welcome as long as more of them are right."""
    length = past.typical(LENGTH)
    accuracy = past.typical(ACCURACY)
    if not (now[LENGTH] >= _EXPLODED * length and now[ACCURACY] <= accuracy):
        return None
    growth = f"{LENGTH} has grown from {length:.0f} to {now[LENGTH]:.0f}"
    share = f"{ACCURACY} is {now[ACCURACY]:.0%}, at the start it was {accuracy:.0%}"
    hint = "set algorithm.overlong_share, lower train.lr, or see samples for a reward that pays for length"
    return f"{growth} tokens, and {share}; {hint}"


def _dead_experts(now: Metrics, past: Past) -> str | None:
    """More experts have no tokens than at the start, when the same data used more experts."""
    unused = past.typical(UNUSED_EXPERTS)
    if math.isnan(unused) or now[UNUSED_EXPERTS] < max(_MANY_UNUSED, 2 * unused):
        return None
    growth = f"{now[UNUSED_EXPERTS]:.0%} of the experts get no token in an update, at the start it was {unused:.0%}"
    return f"{growth}: the router collapses; raise train.aux_loss, or lower train.lr"


def _idle_ranks(now: Metrics, past: Past) -> str | None:
    return _idle(now, IDLE_RANKS_S, "train", "placement.gpus for more engines")


def _idle_engines(now: Metrics, past: Past) -> str | None:
    return _idle(now, IDLE_ENGINES_S, "sample", "placement.train_gpus")


def _idle(now: Metrics, metric: str, task: str, key: str) -> str | None:
    """task: what the GPUs do that wait; key: what makes the others faster when it is raised."""
    if not now[STEP_S] or now[metric] < _OFTEN_IDLE * now[STEP_S]:
        return None
    share = now[metric] / now[STEP_S]
    wait = f"GPUs that only {task} wait for {share:.0%} of a step ({metric})"
    return f"{wait}; set rollout.ahead to 1 where it is 0, or raise {key}"


_NEARER = "set train.replay to r3, or algorithm.rollout_correction (which algorithm.old_logprobs engine excludes)"
_SATURATED = "train.lr is probably too high and has saturated the probabilities, try a tenth of it"
_MORE_ENTROPY = "lower train.lr, or raise algorithm.clip_high or algorithm.entropy_coefficient"

CONDITIONS = (
    Condition((REWARD, STD, ACCURACY), _without_variance),
    Condition((GROUPS, ACCURACY), _few_varied_groups, num_steps=3),
    Condition((GRADIENT,), _no_gradient, of_rewards=False),
    Condition((GRADIENT,), _faded_gradient, num_steps=3, of_rewards=False),
    Condition((ENTROPY, ACCURACY), _no_entropy),
    Condition((ENTROPY, ACCURACY), _collapsed_entropy, num_steps=3),
    Condition((DIFF,), _far_engine, of_rewards=False),
    Condition((DIFF,), _grown_diff, num_steps=3, of_rewards=False),
    Condition((REWARD, STD, ACCURACY), _worse_policy, num_steps=3),
    Condition((TRUNCATED,), _truncated, num_steps=3),
    Condition((LENGTH, ACCURACY), _exploded_length, num_steps=3),
    Condition((UNUSED_EXPERTS,), _dead_experts, num_steps=3, of_rewards=False),
    Condition((IDLE_RANKS_S, STEP_S), _idle_ranks, num_steps=3, of_rewards=False),
    Condition((IDLE_ENGINES_S, STEP_S), _idle_engines, num_steps=3, of_rewards=False),
)
