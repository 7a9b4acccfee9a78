"""`megarl episode-check --samples`: the episodes of a file of samples, played again without a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path

from megarl.commands.recorded_episodes import (
    Judged,
    RecordedEpisode,
    RecordedSampler,
    first_difference,
    recorded_turns,
)
from megarl.config import Recipe
from megarl.data.files import BadRow, column
from megarl.episodes.runtimes import EnvironmentRuntime
from megarl.episodes.template import TemplateRefusal, num_shared
from megarl.model.hf_config import model_shape
from megarl.printable import short, show
from megarl.samples.buffer import PartialGroup
from megarl.samples.parquet import SampleFile, open_samples
from megarl.types import Prompt, Sample, SampleGroup, UserError
from megarl.types.reward_result import RewardResult
from megarl.types.sampling import Sampling

_HINT = "name the recipe, the model and the tools that made the file, or sample it again with `megarl rollout --out`"
_CHANGED = "draw all randomness from self.seed, or sample the file again with the current tools or environment"
Group = SampleGroup | PartialGroup


def replay(recipe: Recipe, path: Path, num_groups: int | None) -> None:
    """Play the episodes of a file again: those of its first groups, or of all without a number.

    Prints how many came out the same. Raises UserError with the first that did not, and where none can be played.
    """
    file = open_samples(path)
    if (
        vocab_size := model_shape(recipe.model.path, recipe.model.family).vocab_size
    ) != file.vocab_size:
        raise UserError(
            str(path),
            f"it was sampled from a vocabulary of {file.vocab_size}, and that of model.path has {vocab_size}",
            _HINT,
        )
    runtime = EnvironmentRuntime(recipe)
    try:
        if not runtime.thread.is_replayable:
            raise UserError(
                "episode.environment",
                "it is not replayable: its episodes cannot be played again",
                "leave --samples out, or set `replayable` where its calls may be made once more",
            )
        trial = _Replay(recipe, path, runtime)
        asyncio.run(trial.play(islice(_groups(file), num_groups)))
    finally:
        runtime.shutdown()
    trial.tell()


def _groups(file: SampleFile) -> Iterator[tuple[str, Group]]:
    """The groups of a file, each with its place there."""
    for step in range(1, file.num_steps + 1):
        for number, group in enumerate(file.any_groups(step)):
            yield f"step {step}, group {number}", group


@dataclass
class _Replay:
    """What came of the episodes so far. first: the first that did not come out the same; left_out: the samples that
    cannot be played again, by the reason."""

    recipe: Recipe
    path: Path
    runtime: EnvironmentRuntime
    num_played: int = 0
    num_same: int = 0
    first: str = ""
    left_out: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        recipe = self.recipe
        reward_model = self.recipe.reward_model
        self._turn_tokenizer = self.runtime.prepared.turn_tokenizer
        self._numbers = count()
        self._sampler = RecordedSampler(self._turn_tokenizer)
        self._runner = self.runtime.runner(self._sampler)
        self._has_rewards = self.runtime.thread.has_reward and not (
            reward_model.path or reward_model.adapters
        )
        named = (file.prompt or recipe.data.prompt for file in recipe.data.train_files.values())
        self._columns = list(dict.fromkeys(named))

    async def play(self, groups: Iterator[tuple[str, Group]]) -> None:
        """Play the episodes of a group at once, one group after another. Raises UserError."""
        for place, group in groups:
            reasons = [self._reason(sample) for sample in group.samples]
            self.left_out.update(filter(None, reasons))
            chosen = [index for index, reason in enumerate(reasons) if not reason]
            if not chosen:
                continue
            prompt = self._with_messages(group.prompt)
            differences = await asyncio.gather(
                *(self._replayed(prompt, group, index) for index in chosen)
            )
            self.num_played += len(chosen)
            self.num_same += differences.count("")
            for index, difference in zip(chosen, differences, strict=True):
                if difference and not self.first:
                    self.first = f"{place}, sample {index} ({prompt.id}): {difference}"

    def tell(self) -> None:
        """Print what came of all. Raises UserError unless every episode came out the same."""
        reasons = ", ".join(f"{number} {words}" for words, number in self.left_out.items())
        if not self.num_played:
            if reasons:
                problem = f"none of its samples can be played again: {reasons}"
            else:
                problem = "it has no samples"
            raise UserError(str(self.path), problem, _HINT)
        if reasons:
            show(f"samples left out: {reasons}")
        if not self.runtime.thread.has_reward:
            show(
                "rewards are not compared: `megarl reward-check --samples` judges those of a function anew"
            )
        elif not self._has_rewards:
            show("rewards are not compared: a reward model has added its scores")
        show(f"{self.num_same} of {self.num_played} episodes came out the same")
        if self.first:
            raise UserError(str(self.path), self.first, _CHANGED)

    def _reason(self, sample: Sample) -> str:
        """Why a sample cannot be played again; empty where it can."""
        facts = sample.facts
        config = self.recipe.episode
        assert config
        if sample.is_open:
            return "that are open"
        if facts is None:
            return "that are no episodes"
        if facts.end == "agent" or (len(sample.rows) > 1 and config.history == "append"):
            return "of an agent or of several conversations"
        if facts.end == "timeout":
            return "that ended as `timeout`"
        if facts.seed is None and config.environment:
            return "without the seed of their environment"
        return ""

    def _with_messages(self, prompt: Prompt) -> Prompt:
        """The prompt of a file with its messages. Raises UserError where the recipe makes other tokens of them."""
        problem = ""
        for name in self._columns:
            try:
                messages = column(prompt.row, name, "")
                ids = self._turn_tokenizer.first(messages)
            except (BadRow, TemplateRefusal, TypeError, AttributeError) as error:
                if isinstance(error, BadRow):
                    why = error.problem
                else:
                    why = error
                problem = problem or f"the prompt of {prompt.id} cannot be made again ({why})"
                continue
            if ids == list(prompt.token_ids):
                return replace(prompt, messages=messages)
            shared = num_shared(ids, prompt.token_ids)
            file, now = (
                short(self._turn_tokenizer.template.decode(some[shared:]))
                for some in (prompt.token_ids, ids)
            )
            problem = f"the prompt of {prompt.id} has {file} at token {shared}, and this recipe makes {now} of it"
        raise UserError(str(self.path), problem, _HINT)

    async def _replayed(self, prompt: Prompt, group: Group, index: int) -> str:
        sample = group.samples[index]
        place = next(self._numbers)
        assert sample.facts
        recorded = RecordedEpisode(recorded_turns(sample), self._turn_tokenizer)
        sampling = Sampling(
            1, self.recipe.rollout.max_response_tokens, recorded_seed=sample.facts.seed
        )
        self._sampler.episodes[place] = recorded
        now = await self._runner.run(prompt, sampling, place)
        del self._sampler.episodes[place]
        return first_difference(
            recorded, sample, now, self._rewards(group, index, now.reward_result)
        )

    def _rewards(self, group: Group, index: int, now: Judged) -> tuple[Judged, Judged]:
        """The environment's reward of a sample in the file and now; None where they are not compared."""
        reward = self.recipe.reward
        if not self._has_rewards:
            return None, None
        if isinstance(group, PartialGroup):
            return group.reward_results[index], now
        if not isinstance(now, RewardResult) and reward.on_failure == "penalise":
            now = RewardResult(reward.penalty, False)
        return RewardResult(float(group.rewards_G[index]), bool(group.correct_G[index])), now
