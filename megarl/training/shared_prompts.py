"""The sizes of micro-batches in which samples share their prompt, and which samples go together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class Prompted(Protocol):
    """What is read of a SampleRef."""

    @property
    def group(self) -> int: ...
    @property
    def sample(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def num_shared(self) -> int: ...


Ref = TypeVar("Ref", bound=Prompted)
Piece = tuple[Ref, ...]


def total(
    refs: Sequence[Prompted], size: Callable[[int], float], *, shares_prompts: bool = False
) -> float:
    """The sum of what sequences of these lengths take; where prompts are shared, of each group's prompt once.

    size: by the number of tokens; what follows a shared prompt takes what the whole takes beyond the prompt.
    """
    if not shares_prompts:
        return sum(size(ref.length) for ref in refs)
    num_shared_by_group: dict[int, int] = {}
    for ref in refs:
        longest = max(ref.num_shared, num_shared_by_group.get(ref.group, 0))
        num_shared_by_group[ref.group] = longest
    responses = sum(
        size(ref.length) - (size(ref.num_shared) if ref.num_shared else 0) for ref in refs
    )
    return responses + sum(size(tokens) for tokens in num_shared_by_group.values() if tokens)


def bundlings(
    samples: Sequence[Piece[Ref]], tokens_of: Callable[[Piece[Ref]], float], budget: int
) -> Iterator[list[Piece[Ref]]]:
    """The samples of an update as pieces: alone, in pairs of a group, in fours, and so on to whole groups.

    Large pieces share most, small ones are balanced best. A piece of several samples fits the budget.
    """
    by_group: dict[int, list[Piece[Ref]]] = {}
    # by number: the order in which they are given changes nothing
    for sample in sorted(samples, key=lambda rows: (rows[0].group, rows[0].sample)):
        by_group.setdefault(sample[0].group, []).append(sample)
    most = max(map(len, by_group.values()))
    for power in range((most - 1).bit_length() + 1):
        yield [
            piece
            for group in by_group.values()
            for piece in _bundles(group, 2**power, tokens_of, budget)
        ]


def _bundles(
    group: Sequence[Piece[Ref]],
    size: int,
    tokens_of: Callable[[Piece[Ref]], float],
    budget: int,
) -> list[Piece[Ref]]:
    """Samples of a group, at most `size` together, in their order."""
    pieces: list[Piece[Ref]] = []
    num_together = 0
    for sample in group:
        joined = (*pieces[-1], *sample) if pieces else sample
        if pieces and num_together < size and tokens_of(joined) <= budget:
            pieces[-1] = joined
            num_together += 1
        else:
            pieces.append(sample)
            num_together = 1
    return pieces
