"""What the controller keeps of a group of samples in place of its arrays."""

from __future__ import annotations

import numpy as np

from megarl.samples import accounting
from megarl.samples.buffer import PartialGroup, PartialSummary
from megarl.types import GroupSummary, SampleGroup
from megarl.types.json_objects import Columns

_LONGEST_SOURCE = 100  # characters


def summary(group: SampleGroup, source_column: str = "") -> GroupSummary:
    """The summary of a group, which the controller keeps in place of its arrays.

    source_column: of the data rows, as reward.source; "": no source is kept. Raises RuntimeError where the tokens of a
    sample do not add up.
    """
    samples = group.samples
    accounting.check(group.prompt, samples)
    drawn = [sample for sample in samples if not sample.is_baseline]
    return GroupSummary(
        prompt_text=group.prompt.text,
        answer=group.prompt.answer,
        responses=tuple(sample.text for sample in samples),
        rows=tuple(accounting.row_summaries(sample, group.prompt) for sample in samples),
        finished_G=np.asarray([sample.finished for sample in samples], dtype=np.bool_),
        rewards_G=group.rewards_G,
        correct_G=group.correct_G,
        baseline=next((index for index, sample in enumerate(samples) if sample.is_baseline), None),
        given_answers=group.given_answers,
        source=source_of(group.prompt.row, source_column),
        verifications=sum(sample.verifications for sample in drawn),
        prefills=sum(sample.prefills for sample in drawn),
        turn_rewards_G=accounting.turn_rewards(samples),
        facts=tuple(sample.facts for sample in samples),
        transcripts=tuple(sample.transcript for sample in samples),
    )


def source_of(row: Columns, source_column: str) -> str:
    """The source of a data row, cut to the length that is recorded; "" where the row has none, or null."""
    source = row.get(source_column)
    return "" if source is None else str(source)[:_LONGEST_SOURCE]


def partial_summary(group: PartialGroup) -> PartialSummary:
    """The summary of a group with open samples. Raises RuntimeError as `summary`."""
    accounting.check(group.prompt, group.samples)
    open_samples = [sample for sample in group.samples if sample.is_open]
    longest = max(accounting.longest_row(sample) for sample in open_samples)
    return PartialSummary(len(open_samples), longest)
