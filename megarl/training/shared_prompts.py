"""The sizes of micro-batches in which samples share their prompt, and which samples go together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


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


def summed_sizes(
    refs: Sequence[Prompted], size: Callable[[int], float], *, shares_prompts: bool = False
) -> float:
    """The sum of what sequences of these lengths take; where prompts are shared, of each group's prompt once.

    size: by the number of tokens, 0 for none; what follows a shared prompt takes what the whole takes beyond it.
    """
    if not shares_prompts:
        return sum(size(ref.length) for ref in refs)
    num_shared_by_group: dict[int, int] = {}
    for ref in refs:
        longest = max(ref.num_shared, num_shared_by_group.get(ref.group, 0))
        num_shared_by_group[ref.group] = longest
    responses = sum(size(ref.length) - size(ref.num_shared) for ref in refs)
    return responses + sum(map(size, num_shared_by_group.values()))


@dataclass(frozen=True)
class BatchPiece(Generic[Ref]):
    """Sequences of a group that are in one micro-batch, with the tokens that they take of it and their work.

    prompt_tokens, prompt_work: the part of both that is the group's prompt, which a micro-batch has once; 0 where
    prompts are not shared.
    """

    refs: tuple[Ref, ...]
    tokens: int
    work: float
    prompt_tokens: int = 0
    prompt_work: float = 0.0


def piece_of(
    refs: tuple[Ref, ...],
    *,
    tokens: Callable[[int], int],
    work: Callable[[int], float],
    shares_prompts: bool,
) -> BatchPiece[Ref]:
    """tokens, work: of a sequence by its length, 0 for none."""
    num_shared = max(ref.num_shared for ref in refs) if shares_prompts else 0
    return BatchPiece(
        refs,
        int(summed_sizes(refs, tokens, shares_prompts=shares_prompts)),
        summed_sizes(refs, work, shares_prompts=shares_prompts),
        tokens(num_shared),
        work(num_shared),
    )


def bundlings(samples: Sequence[BatchPiece[Ref]], budget: int) -> Iterator[list[BatchPiece[Ref]]]:
    """The samples of an update one at a time, in pairs of a group, in fours, and so on up to whole groups.

    Large pieces share most, small ones are balanced best. A piece of several samples fits the budget. Ends before a
    number that would join no more than the one before it.
    """
    by_group: dict[int, list[BatchPiece[Ref]]] = {}
    # by number: the order in which they are given changes nothing
    for sample in sorted(samples, key=lambda sample: (sample.refs[0].group, sample.refs[0].sample)):
        by_group.setdefault(sample.refs[0].group, []).append(sample)
    most = 1
    while True:
        bundles = [
            bundle for group in by_group.values() for bundle in _bundles(group, most, budget)
        ]
        if most > 1 and max(map(len, bundles)) <= most // 2:
            return
        yield [_joined(bundle) for bundle in bundles]
        most *= 2


def _bundles(
    group: Sequence[BatchPiece[Ref]], most: int, budget: int
) -> list[list[BatchPiece[Ref]]]:
    """The samples of a group in their order, at most so many together."""
    bundles: list[list[BatchPiece[Ref]]] = []
    tokens = 0
    prompt_tokens = 0
    for sample in group:
        more = sample.tokens - min(prompt_tokens, sample.prompt_tokens)
        if bundles and len(bundles[-1]) < most and tokens + more <= budget:
            bundles[-1].append(sample)
            tokens += more
            prompt_tokens = max(prompt_tokens, sample.prompt_tokens)
        else:
            bundles.append([sample])
            tokens = sample.tokens
            prompt_tokens = sample.prompt_tokens
    return bundles


def _joined(bundle: Sequence[BatchPiece[Ref]]) -> BatchPiece[Ref]:
    prompt_tokens = max(sample.prompt_tokens for sample in bundle)
    prompt_work = max(sample.prompt_work for sample in bundle)
    return BatchPiece(
        tuple(ref for sample in bundle for ref in sample.refs),
        prompt_tokens + sum(sample.tokens - sample.prompt_tokens for sample in bundle),
        prompt_work + sum(sample.work - sample.prompt_work for sample in bundle),
        prompt_tokens,
        prompt_work,
    )
