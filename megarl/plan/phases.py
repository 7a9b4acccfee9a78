"""Steps of a run whose responses are sampled in phases, on planted lengths: what each phase runs, and how old it is.

The stock is that of a run (`rollout/stock.py`). All complete groups are trained on, as without dynamic sampling. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from megarl.rollout.stock import Entry, PartialSummary, Stock, Summary
from megarl.types import GroupSummary, IntArray, Prompt

Result = TypeVar("Result")
LengthsOf = Callable[[int], IntArray]  # ticket -> [samples], tokens of its responses

_PROMPT = Prompt("", "", (), "")
_NONE = np.zeros(0, np.bool_)
_COMPLETE = GroupSummary("", "", (), 0, np.zeros(0, np.int64), _NONE, np.zeros(0, np.float32), _NONE, ())


@dataclass(frozen=True)
class PhaseSizes:
    """Groups that a step trains on, groups in flight, samples of each, and the most new tokens of a sample in a phase.

    in_flight is no less than wanted. Responses are whole if they have no more than phase_tokens.
    """

    wanted: int
    in_flight: int
    samples: int
    phase_tokens: int


@dataclass(frozen=True)
class OpenGroup:
    """The open samples of a ticket. done: tokens that each has; new: [open samples], tokens that a phase adds."""

    ticket: int
    done: int
    new: IntArray


@dataclass(frozen=True)
class PhasedStep(Generic[Result]):
    """A step. trained: its tickets. results: of each phase. tokens_by_age: of trained tokens, by versions of age."""

    trained: tuple[int, ...]
    results: tuple[Result, ...]
    tokens_by_age: IntArray

    @property
    def oldest(self) -> int:
        """Versions by which the policy is newer than the weights that sampled the oldest token."""
        return len(self.tokens_by_age) - 1


def phased_steps(
    sizes: PhaseSizes, lengths_of: LengthsOf, run_phase: Callable[[Sequence[OpenGroup]], Result]
) -> Iterator[PhasedStep[Result]]:
    """The steps of a run from its first on; run_phase is given all open groups, those with the most tokens first.

    The order of events is that of `controller.samples.collect`.
    """
    stock, version = Stock[None](), 0
    sampled_by: dict[int, list[int]] = {}  # version of each phase of a ticket
    while True:
        results: list[Result] = []
        is_wanted = bool(stock.open) or len(stock.finished) < sizes.wanted
        while is_wanted:
            missing = max(0, sizes.in_flight - len(stock.entries))
            stock = stock.admitted([_PROMPT] * missing, (version,), sizes.samples)
            groups = [_open_group(entry, lengths_of, sizes) for entry in stock.open]
            results.append(run_phase(sorted(groups, key=lambda group: -group.done)))
            for group in groups:
                sampled_by.setdefault(group.ticket, []).append(version)
            stock = stock.updated([_advanced(entry, lengths_of, sizes) for entry in stock.open])
            is_wanted = len(stock.finished) < sizes.wanted
        chosen = stock.ready(sizes.wanted)
        stock = stock.without_trained(chosen)
        tickets = tuple(entry.ticket.number for entry in chosen)
        ages = {ticket: [version - one for one in sampled_by.pop(ticket)] for ticket in tickets}
        yield PhasedStep(tickets, tuple(results), _tokens_by_age(ages, lengths_of, sizes))
        version += 1


def _done(summary: Summary) -> int:
    assert isinstance(summary, PartialSummary)
    return summary.input_tokens  # _PROMPT has no tokens


def _open_group(entry: Entry[None], lengths_of: LengthsOf, sizes: PhaseSizes) -> OpenGroup:
    done, lengths = _done(entry.summary), lengths_of(entry.ticket.number)
    return OpenGroup(entry.ticket.number, done, np.minimum(lengths[lengths > done] - done, sizes.phase_tokens))


def _advanced(entry: Entry[None], lengths_of: LengthsOf, sizes: PhaseSizes) -> Entry[None]:
    """The entry after a phase."""
    done = _done(entry.summary) + sizes.phase_tokens
    num_open = int((lengths_of(entry.ticket.number) > done).sum())
    return Entry(entry.ticket, PartialSummary(num_open, done) if num_open else _COMPLETE)


def _tokens_by_age(ages: dict[int, list[int]], lengths_of: LengthsOf, sizes: PhaseSizes) -> IntArray:
    """Trained tokens by versions of age; ages: of each phase of each ticket."""
    found = np.zeros(1 + max(max(of_phases) for of_phases in ages.values()), np.int64)
    for ticket, of_phases in ages.items():
        for phase, age in enumerate(of_phases):
            found[age] += np.clip(lengths_of(ticket) - phase * sizes.phase_tokens, 0, sizes.phase_tokens).sum()
    return found
