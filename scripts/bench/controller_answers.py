"""Answers the controller's calls in the bench: it stands for many ranks or engines, and computes nothing."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.rollout.load_balancing import Capacity, CompletedSample
from megarl.samples.accounting import row_summaries
from megarl.training.batching import SampleRef, Update, key_of, refs_of, values_by_reader
from megarl.training.calls import TokenValuesCall, TokenValuesResult, TrainCall
from megarl.types import (
    FloatArray,
    GroupSummary,
    Metrics,
    Prompt,
    Row,
    Sample,
    SampleGroup,
    SamplePart,
)

PROMPT_TOKENS = 200
# about as many as an update's loss and routing say
_NAMES = [f"statistic_{number}" for number in range(20)]


class Answers:
    """Whatever a step calls. Each sample that it is told to train on is looked at: one that did not come is missed."""

    def __init__(self, lengths: Mapping[str, Sequence[int]]) -> None:
        """lengths: of the responses to each prompt, by its id."""
        self._lengths = lengths
        # by engine, what was not reported yet
        self._completed: dict[str, list[CompletedSample]] = defaultdict(list)
        self._have_finished: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def capacity(self) -> Capacity:
        """More than a step needs: everything is sent at once."""
        return Capacity(sys.maxsize, sys.maxsize)

    async def take_completed(self, engine: str) -> list[CompletedSample]:
        """The samples of one of the engines since the last call."""
        await self._have_finished[engine].wait()
        self._have_finished[engine].clear()
        return self._completed.pop(engine)

    async def sample(
        self, prompt: Prompt, sampling: object, begun: object, engine: str
    ) -> tuple[GroupSummary, SampleGroup]:
        """Responses of the lengths that were drawn for the prompt.

        Their text, four letters for each token, is in the summary alone: a process has the arguments of all its calls
        at once, and one that stands for 64 ranks would have as many copies of it.
        """
        lengths = self._lengths[prompt.id]
        rows = [
            Row.response(
                prompt.token_ids,
                np.zeros(length, np.int64),
                np.zeros(length, np.float32),
                (SamplePart(1, length),),
            )
            for length in lengths
        ]
        samples = tuple(Sample((row,), "", finished=True) for row in rows)
        rewards_G = np.arange(len(samples)) % 2
        given_answers = tuple("42" for _ in samples)
        self._completed[engine] += [
            CompletedSample(0, len(prompt.token_ids), length) for length in lengths
        ]
        self._have_finished[engine].set()
        group = SampleGroup(
            prompt, samples, rewards_G.astype(np.float32), rewards_G.astype(np.bool_), given_answers
        )
        return summary_of(group), group

    def train(self, call: TrainCall[Any]) -> list[Metrics]:
        """The metrics of each update: all ranks say all of them here, in a run those of the last stage."""
        return _metrics(call.updates, call.groups)

    def train_listed(
        self, updates: Sequence[Update], group_ids: Sequence[int], *groups: SampleGroup
    ) -> list[Metrics]:
        """`train` by a rank that is given each group by a reference of its own."""
        return _metrics(updates, dict(zip(group_ids, groups, strict=True)))

    def train_own(self, updates: Sequence[Update], dp: int, *groups: SampleGroup) -> list[Metrics]:
        """`train` by a rank that is given everything and picks what is its own."""
        rank_updates = [
            replace(update, micro_batches=(update.micro_batches[dp],)) for update in updates
        ]
        return _metrics(rank_updates, dict(enumerate(groups)))

    def values(self, call: TokenValuesCall) -> TokenValuesResult[None]:
        """Token values without contents for each reader, and no state."""
        refs = refs_of(call.updates)
        for ref in refs:
            _array(ref, call.groups[ref.group])
        return TokenValuesResult(values_by_reader(refs, None, call.readers, dp_rank=0), None)

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def held_bytes(self) -> int:
        return 1 << 30

    def release_memory(self) -> None: ...

    def resume_weights(self) -> None: ...

    def resume_cache(self) -> None: ...

    def reshard(self, message: object, version: int, attempt: int = 0) -> None:
        self._version = version

    def version(self) -> int:
        return self._version


def _metrics(updates: Sequence[Update], groups: Mapping[int, SampleGroup]) -> list[Metrics]:
    return [dict.fromkeys(_NAMES, _tokens(update, groups)) for update in updates]


def summary_of(group: SampleGroup) -> GroupSummary:
    """As an engine's process tells it the controller."""
    return GroupSummary(
        prompt_text=group.prompt.text,
        answer=group.prompt.answer,
        responses=tuple("word" * sample.num_trained for sample in group.samples),
        rows=tuple(row_summaries(sample, group.prompt) for sample in group.samples),
        finished_G=np.ones(len(group.samples), np.bool_),
        rewards_G=group.rewards_G,
        correct_G=group.correct_G,
        given_answers=group.given_answers,
    )


def _tokens(update: Update, by_id: Mapping[int, SampleGroup]) -> float:
    refs = refs_of([update])
    return float(sum(len(_array(ref, by_id[ref.group])) for ref in refs))


def _array(ref: SampleRef, group: SampleGroup) -> FloatArray:
    found_T = group.samples[ref.sample].rows[ref.row].engine_logp_T
    assert len(found_T) == ref.response_length, f"sample {key_of(ref)} did not come"
    return found_T
