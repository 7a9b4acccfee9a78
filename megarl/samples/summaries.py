"""What the controller keeps of a group of samples in place of its arrays."""

from __future__ import annotations

import numpy as np

from megarl.samples import accounting
from megarl.samples.buffer import PartialGroup, PartialSummary
from megarl.types import GroupSummary, SampleGroup


def summary(group: SampleGroup) -> GroupSummary:
    """The summary of a group, which the controller keeps in place of its arrays.

    Raises RuntimeError where the tokens of an episode do not add up.
    """
    prompt = group.prompt
    samples = group.samples
    accounting.check(prompt, samples)
    if all(one.is_plain for one in samples):
        rows = ()
    else:
        rows = [accounting.row_summaries(prompt, one) for one in samples]
    return GroupSummary(
        prompt_text=group.prompt.text,
        answer=group.prompt.answer,
        responses=tuple(sample.text for sample in samples),
        prompt_length=len(group.prompt.token_ids),
        response_lengths_G=np.asarray([sample.num_trained for sample in samples], dtype=np.int64),
        finished_G=np.asarray([sample.finished for sample in samples], dtype=np.bool_),
        rewards_G=group.rewards_G,
        correct_G=group.correct_G,
        parts_G=tuple(accounting.trained_parts(sample.rows) for sample in samples),
        given_answers=group.given_answers,
        baseline=next((index for index, sample in enumerate(samples) if sample.is_baseline), None),
        verifications=sum(sample.verifications for sample in samples if not sample.is_baseline),
        prefills=sum(sample.prefills for sample in samples if not sample.is_baseline),
        rows=tuple(rows),
        turn_rewards_G=accounting.turn_rewards(samples),
        facts=tuple(sample.facts for sample in samples)
        if any(sample.facts for sample in samples)
        else (),
        transcripts=tuple(sample.transcript for sample in samples)
        if any(one.transcript for one in samples)
        else (),
    )


def partial_summary(group: PartialGroup) -> PartialSummary:
    """The summary of a group with open samples. Raises RuntimeError as `summary`."""
    accounting.check(group.prompt, group.samples)
    opened = [sample for sample in group.samples if sample.is_open]
    longest = max(accounting.longest_row(group.prompt, sample) for sample in opened)
    return PartialSummary(len(opened), longest)
