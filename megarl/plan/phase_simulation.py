"""Steps of a run whose responses are sampled in phases, on planted lengths: what each phase runs, and how old it is.

The buffer is that of a run (`samples/buffer.py`). All complete groups are trained on, as without dynamic sampling.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Generic, TypeVar

import numpy as np

from megarl.samples.buffer import BufferSizes, Entry, PartialSummary, RolloutBuffer, Summary
from megarl.types import GroupSummary, IntArray, Prompt

Result = TypeVar("Result")
LengthsOf = Callable[[int], IntArray]  # drawn prompt -> [samples], tokens of its responses

_PROMPT = Prompt("", "", (), "")
_NONE = np.zeros(0, np.bool_)
_COMPLETE = GroupSummary("", "", (), (), _NONE, np.zeros(0, np.float32), _NONE)


@dataclass(frozen=True)
class PhaseSizes:
    """Groups that a step trains on, groups in flight, samples of each, and the most new tokens of a sample in a phase.

    in_flight is no less than wanted, and no more groups are in flight (`BufferSizes`). Responses are whole if they have
    no more than phase_tokens. ahead: the phase that a step would begin with is sampled while the ranks learn in the
    step before, as `rollout.ahead` says.
    """

    wanted: int
    in_flight: int
    samples: int
    phase_tokens: int
    ahead: int = 0

    @property
    def buffer_sizes(self) -> BufferSizes:
        return BufferSizes(self.wanted, self.in_flight)


@dataclass(frozen=True)
class OpenGroup:
    """The open samples of a drawn prompt. done: tokens that each has; new: [open samples], tokens that a phase adds."""

    prompt_index: int
    done: int
    new: IntArray


# (all open groups, those with the most tokens first; whether the ranks learn meanwhile) -> what the phase took
RunPhase = Callable[[Sequence[OpenGroup], bool], Result]


@dataclass(frozen=True)
class PhasedStep(Generic[Result]):
    """A step. trained: its drawn prompts. tokens_by_age: of trained tokens, by versions of age.

    results: of each phase that its training waits for. beside: of the phase that is sampled while the ranks learn.
    """

    trained: tuple[int, ...]
    results: tuple[Result, ...]
    tokens_by_age: IntArray
    beside: Result | None = None

    @property
    def all_results(self) -> tuple[Result, ...]:
        if self.beside is None:
            return self.results
        return (*self.results, self.beside)

    @property
    def oldest(self) -> int:
        """Versions by which the policy is newer than the weights that sampled the oldest token."""
        return len(self.tokens_by_age) - 1


def phased_steps(
    sizes: PhaseSizes,
    lengths_of: LengthsOf,
    run_phase: RunPhase[Result],
    *,
    steps: int | None = None,
) -> Iterator[PhasedStep[Result]]:
    """The steps of a run from its first on; steps: of the whole run.

    None: a run without end, for its steady state: the first step begins with `in_flight` prompts.
    The order of events is that of `controller.samples.collect` and `controller.step_rollout.StepRollout`.
    """
    if steps:
        initial_buffer = RolloutBuffer[None]()
    else:
        initial_buffer = RolloutBuffer[None](surplus=sizes.buffer_sizes.most_surplus)
    run = _Run(sizes, lengths_of, run_phase, steps, initial_buffer)
    for version in range(steps) if steps else count():
        results: list[Result] = []
        if sizes.ahead:
            is_wanted = run.is_short
        else:
            is_wanted = run.begins_with_phase
        while is_wanted:
            results.append(run.phase(version, beside_training=False))
            is_wanted = run.is_short
        trained, tokens_by_age = run.train(version)
        is_last = version + 1 == steps
        samples_ahead = sizes.ahead and run.begins_with_phase and not is_last
        if samples_ahead:
            beside = run.phase(version, beside_training=True)
        else:
            beside = None
        yield PhasedStep(trained, tuple(results), tokens_by_age, beside)


@dataclass
class _Run(Generic[Result]):
    """What is in flight. steps: as of `phased_steps`. sampled_by: the version of each phase of a drawn prompt."""

    sizes: PhaseSizes
    lengths_of: LengthsOf
    run_phase: RunPhase[Result]
    steps: int | None
    buffer: RolloutBuffer[None]
    sampled_by: dict[int, list[int]] = field(default_factory=dict)

    @property
    def is_short(self) -> bool:
        return len(self.buffer.finished) < self.sizes.wanted

    @property
    def begins_with_phase(self) -> bool:
        return bool(self.buffer.open) or self.is_short

    def steps_left(self, version: int) -> int | None:
        """Of the run, after the step that trains this version of the policy."""
        if self.steps is None:
            return None
        return self.steps - 1 - version

    def phase(self, version: int, *, beside_training: bool) -> Result:
        """Draw as many prompts as may be in flight, and continue all open groups."""
        sizes = self.sizes
        lengths_of = self.lengths_of
        missing = sizes.buffer_sizes.num_missing(
            self.buffer, self.steps_left(version + beside_training)
        )
        buffer = self.buffer.admitted([_PROMPT] * missing, (version,), sizes.samples)
        groups = [_open_group(entry, lengths_of, sizes) for entry in buffer.open]
        for group in groups:
            self.sampled_by.setdefault(group.prompt_index, []).append(version)
        self.buffer = buffer.updated([_advanced(entry, lengths_of, sizes) for entry in buffer.open])
        return self.run_phase(sorted(groups, key=lambda group: -group.done), beside_training)

    def train(self, version: int) -> tuple[tuple[int, ...], IntArray]:
        """(the drawn prompts that this version of the policy is trained on, their tokens by age)."""
        chosen = self.buffer.ready(self.sizes.wanted)
        self.buffer = self.buffer.without_trained(chosen).after_step(
            self.sizes.buffer_sizes, self.steps_left(version)
        )
        prompt_indices = tuple(entry.number for entry in chosen)
        ages = {
            prompt_index: [
                version - sampled_version for sampled_version in self.sampled_by.pop(prompt_index)
            ]
            for prompt_index in prompt_indices
        }
        return prompt_indices, _tokens_by_age(ages, self.lengths_of, self.sizes)


def _done(summary: Summary) -> int:
    assert isinstance(summary, PartialSummary)
    return summary.context_tokens  # _PROMPT has no tokens


def _open_group(entry: Entry[None], lengths_of: LengthsOf, sizes: PhaseSizes) -> OpenGroup:
    done = _done(entry.summary)
    lengths = lengths_of(entry.number)
    return OpenGroup(
        entry.number, done, np.minimum(lengths[lengths > done] - done, sizes.phase_tokens)
    )


def _advanced(entry: Entry[None], lengths_of: LengthsOf, sizes: PhaseSizes) -> Entry[None]:
    """The entry after a phase."""
    done = _done(entry.summary) + sizes.phase_tokens
    num_open = int((lengths_of(entry.number) > done).sum())
    return replace(entry, summary=PartialSummary(num_open, done) if num_open else _COMPLETE)


def _tokens_by_age(
    ages: dict[int, list[int]], lengths_of: LengthsOf, sizes: PhaseSizes
) -> IntArray:
    """Trained tokens by versions of age; ages: of each phase of each drawn prompt."""
    tokens_by_age = np.zeros(1 + max(max(of_phases) for of_phases in ages.values()), np.int64)
    for prompt_index, of_phases in ages.items():
        for phase, age in enumerate(of_phases):
            tokens_by_age[age] += np.clip(
                lengths_of(prompt_index) - phase * sizes.phase_tokens, 0, sizes.phase_tokens
            ).sum()
    return tokens_by_age
