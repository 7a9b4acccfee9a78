"""The groups of a run that no step has trained on yet: those with open samples, and the complete ones. Pure.

A response is sampled in phases of at most `rollout.phase_tokens` new tokens. A phase continues every open sample; after
it a step takes the complete groups of the lowest numbers, and the rest of the buffer waits. Every prompt that a run
draws has a number, which is in the buffer, trained on or dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from megarl.config import Recipe
from megarl.types import GroupSummary, Hyperparameters, Prompt, Sample
from megarl.types.reward_result import Failure, RewardResult

Ref = TypeVar("Ref")  # names a group's samples, which are elsewhere


@dataclass(frozen=True)
class PartialGroup:
    """A prompt's samples between two phases, of which some are open; reward_results: None for those."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    reward_results: tuple[RewardResult | Failure | None, ...]


@dataclass(frozen=True)
class PartialSummary:
    """What the controller keeps of a partial group: how many of its samples are open, and how long these are.

    context_tokens: prompt and response of the longest open sample. Responses are equally long in a group, because each
    phase that left them open gave each `rollout.phase_tokens`; episodes are not.
    """

    num_open: int
    context_tokens: int


Summary = PartialSummary | GroupSummary


@dataclass(frozen=True)
class Entry(Generic[Ref]):
    """A prompt that was drawn, with its group.

    number: of the prompt among all that the run has drawn, from 0. stream: the key of its random numbers (`Sampling`).
    ref: None while no engine has begun the group.
    """

    number: int
    prompt: Prompt
    stream: tuple[int, ...]
    summary: Summary
    ref: Ref | None = None


def _grown(surplus: int, groups_per_step: int) -> int:
    """The surplus of the step after one with this surplus."""
    return surplus + max(1, (surplus + groups_per_step // 16) // 4)


@dataclass(frozen=True)
class BufferSizes:
    """How many groups a step trains on, and how many are in flight at most: in the buffer, open or complete.

    What waits after a step is longer than what is drawn, because the groups that are complete first are trained on. If
    all prompts were begun at once, the first steps would train on the shortest groups alone, and at the end of the run
    the longest would be left. So the surplus, the groups in flight beyond those that a step trains on, begins with
    none. It grows from step to step by a quarter of itself and a 64th of a step's prompts, and in the last steps of the
    run it shrinks as it grew: the last step has none, and trains on all that wait.
    """

    wanted: int
    in_flight: int

    @property
    def most_surplus(self) -> int:
        return self.in_flight - self.wanted

    def surplus(self, grown: int, steps_left: int | None) -> int:
        """The surplus of a step after which the run has `steps_left` steps (None: a run without end).

        grown: the surplus if the run did not end.
        """
        if steps_left is None:
            return min(grown, self.most_surplus)
        least = 0
        most = min(grown, self.most_surplus)
        for _ in range(steps_left):
            if least >= most:
                break
            least = _grown(least, self.wanted)
        return min(least, most)

    def num_missing(self, buffer: RolloutBuffer[Any], steps_left: int | None) -> int:
        """How many groups fewer than may be in flight the buffer has in a step that `steps_left` others follow."""
        return max(0, self.wanted + self.surplus(buffer.surplus, steps_left) - len(buffer.entries))


@dataclass(frozen=True)
class RolloutBuffer(Generic[Ref]):
    """All groups that wait, by ascending number. trained, dropped: bit n is set if prompt n was.

    next_number: of the next prompt that is drawn. loaded_bound: by how many versions the tokens of groups that a
    checkpoint had may be older than the policy that is trained on them. surplus: how many prompts more than a step
    trains on the next step may have in flight, see `BufferSizes`.
    """

    entries: tuple[Entry[Ref], ...] = ()
    next_number: int = 0
    trained: int = 0
    dropped: int = 0
    loaded_bound: int = 0
    surplus: int = 0

    @property
    def open(self) -> tuple[Entry[Ref], ...]:
        """The groups that the next phase continues."""
        return tuple(entry for entry in self.entries if isinstance(entry.summary, PartialSummary))

    @property
    def finished(self) -> tuple[Entry[Ref], ...]:
        """The complete groups."""
        return tuple(entry for entry in self.entries if isinstance(entry.summary, GroupSummary))

    def ready(self, count: int) -> tuple[Entry[Ref], ...]:
        """The complete groups of the lowest numbers, `count` of them or as many as there are."""
        return self.finished[:count]

    def admitted(
        self, prompts: Sequence[Prompt], stream: tuple[int, ...], samples: int
    ) -> RolloutBuffer[Ref]:
        """With an entry for each prompt; stream: that of the prompts, to which the place among them is added."""
        fresh = [
            Entry[Ref](
                number=self.next_number + place,
                prompt=prompt,
                stream=(*stream, place),
                summary=PartialSummary(samples, len(prompt.token_ids)),
            )
            for place, prompt in enumerate(prompts)
        ]
        return replace(
            self, entries=(*self.entries, *fresh), next_number=self.next_number + len(prompts)
        )

    def updated(self, entries: Iterable[Entry[Ref]]) -> RolloutBuffer[Ref]:
        """With these entries, as a phase returned them, in place of those of the same numbers."""
        new = {entry.number: entry for entry in entries}
        return replace(self, entries=tuple(new.get(entry.number, entry) for entry in self.entries))

    def without_trained(self, entries: Collection[Entry[Ref]]) -> RolloutBuffer[Ref]:
        """Without these entries, which a step trains on."""
        return replace(self._without(entries), trained=self.trained | _bits(entries))

    def without_dropped(self, entries: Collection[Entry[Ref]]) -> RolloutBuffer[Ref]:
        """Without these entries, which no step trains on."""
        return replace(self._without(entries), dropped=self.dropped | _bits(entries))

    def _without(self, entries: Collection[Entry[Ref]]) -> RolloutBuffer[Ref]:
        gone = {entry.number for entry in entries}
        return replace(
            self, entries=tuple(entry for entry in self.entries if entry.number not in gone)
        )

    def after_step(self, sizes: BufferSizes, steps_left: int | None) -> RolloutBuffer[Ref]:
        """With the surplus of the step after one that `steps_left` others follow."""
        surplus = min(
            sizes.most_surplus, _grown(sizes.surplus(self.surplus, steps_left), sizes.wanted)
        )
        return replace(self, surplus=surplus)

    def after_loading(self, version: int, groups_per_step: int) -> RolloutBuffer[Ref]:
        """With the bound of its complete groups, where steps train on so many groups, the next one with this version.

        A complete group waits in steps that train on so many others of lower numbers, which the buffer has, too.
        """
        versions = [
            part.version
            for entry in self.entries
            if isinstance(entry.summary, GroupSummary)
            for parts in entry.summary.parts_G
            for part in parts
        ]
        if not versions:
            return self
        return replace(
            self, loaded_bound=version - min(versions) + (len(self.entries) - 1) // groups_per_step
        )

    def check(self) -> None:
        """Raises RuntimeError unless every drawn prompt is exactly one of trained on, dropped and in the buffer."""
        numbers = [entry.number for entry in self.entries]
        trained = self.trained.bit_count()
        dropped = self.dropped.bit_count()
        every = self.trained | self.dropped | _bits(self.entries)
        is_once = trained + dropped + len(numbers) == self.next_number
        if every != (1 << self.next_number) - 1 or not is_once or numbers != sorted(numbers):
            counts = f"{trained} trained on, {dropped} dropped, {len(numbers)} in the buffer"
            raise RuntimeError(
                f"the {self.next_number} prompts that were drawn are not each of {counts} exactly once"
            )


def _bits(entries: Iterable[Entry[Ref]]) -> int:
    bits = 0
    for entry in entries:
        bits |= 1 << entry.number
    return bits


def phases_of(longest: int, phase_tokens: int | None) -> int:
    """The phases of a sample of so many tokens; an episode has no more, for whatever it waits."""
    return -(-longest // (phase_tokens or longest))


def num_phases(recipe: Recipe) -> int:
    """The phases that the longest sample takes."""
    return phases_of(recipe.longest_sample, recipe.rollout.phase_tokens)


def staleness_bound(recipe: Recipe, hyperparameters: Hyperparameters) -> int:
    """By how many versions a token may be older than the policy that is trained on it.

    Let a sample take P phases, a step train on S groups, and F be in flight at most; near the start and the end of a
    run fewer are, which makes no token older. A step with open groups has a phase, which continues them all: a group is
    complete at most P - 1 steps after its first phase. A complete group waits in steps that train on S others of lower
    numbers, of which there are at most F - 1; and at most F - 1 - S, once a step has trained on S others while the
    group was open. So it waits W = ceil(F / S) - 1 steps, or, where it took several steps to complete, one step less. A
    step that is short of groups trains on all that there are. An episode that has not ended in P phases, because it
    waited for tools or began anew, ends in the last as `timeout`.

    With ahead the first phase of a step is sampled in the step before: its tokens are a version older, and all else
    is the same.
    """
    phases = num_phases(recipe)
    groups_per_step = recipe.rollout.prompts_per_step
    waits = -(-hyperparameters.num_drawn(recipe.rollout.in_flight) // groups_per_step) - 1
    return (waits + max(0, phases - 2) if waits else 0) + recipe.rollout.ahead
