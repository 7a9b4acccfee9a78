"""Several files in one stream: the shares, the order, and going on in the middle."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.streams import MixedStream
from megarl.types import Prompt

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=2, max_size=5)


def files(*sizes: int) -> list[list[Prompt]]:
    return [
        [Prompt(f"{name}:{number}", "", (1,), "") for number in range(size)]
        for name, size in enumerate(sizes)
    ]


def mixed(weights: list[float], seed: int = 1, size: int = 7) -> MixedStream:
    return MixedStream(files(*(size + number for number in range(len(weights)))), weights, seed)


def file_of(prompt: Prompt) -> int:
    return int(prompt.id.partition(":")[0])


@settings(deadline=None)
@given(weights=WEIGHTS, first=st.integers(0, 5000), n=st.integers(1, 600), seed=st.integers(0, 99))
def test_every_stretch_of_the_stream_has_each_files_share(
    weights: list[float], first: int, n: int, seed: int
) -> None:
    """To within about log(n) prompts, wherever it begins."""
    stream = mixed(weights, seed)
    stream.skip_to(first)
    counts = Counter(map(file_of, stream.take(n)))
    for number, weight in enumerate(weights):
        assert abs(counts[number] - n * weight / sum(weights)) <= 2 + 2 * math.log2(n + 1)


@settings(deadline=None)
@given(
    weights=WEIGHTS,
    takes=st.lists(st.integers(0, 40), max_size=8),
    skip=st.integers(0, 300),
    seed=st.integers(0, 99),
)
def test_a_stream_goes_on_from_the_number_of_prompts_taken(
    weights: list[float], takes: list[int], skip: int, seed: int
) -> None:
    """Whatever the batches were: `taken` is all that a checkpoint has of it."""
    first, second = mixed(weights, seed), mixed(weights, seed)
    for count in takes:
        first.take(count)
    second.skip_to(first.taken)
    assert second.taken == first.taken
    assert second.take(50) == first.take(50)
    second.skip_to(second.taken + skip)
    first.take(skip)
    assert second.take(9) == first.take(9)
    second.rewind()
    assert (second.taken, second.take(99)) == (0, mixed(weights, seed).take(99))


def test_each_file_has_epochs_of_its_own() -> None:
    stream = mixed([3.0, 1.0], size=5)
    drawn = [prompt.id for prompt in stream.take(200)]
    for number, size in ((0, 5), (1, 6)):
        names = [name for name in drawn if name.startswith(f"{number}:")]
        epochs = [names[start : start + size] for start in range(0, len(names) - size + 1, size)]
        assert len(epochs) > 5 and all(len(set(epoch)) == size for epoch in epochs)
        assert any(epoch != other for epoch, other in pairwise(epochs))


def test_equal_files_do_not_alternate_with_the_engines() -> None:
    """Of two engines that take turns each must get both files, or one would wait for the other's longer answers."""
    drawn = [file_of(prompt) for prompt in mixed([1.0, 1.0]).take(400)]
    for engines in (2, 4, 8):
        for engine in range(engines):
            share = sum(drawn[engine::engines]) / len(drawn[engine::engines])
            assert 0.35 < share < 0.65, (engines, engine)


def test_seed_weights_and_rows_decide_the_fingerprint() -> None:
    same = mixed([1.0, 2.0]).fingerprint
    assert mixed([2.0, 4.0]).fingerprint == same, "weights are relative to each other"
    assert len({same, mixed([1.0, 2.5]).fingerprint, mixed([1.0, 2.0], size=8).fingerprint}) == 3
    assert mixed([1.0, 1.0], seed=1).take(20) != mixed([1.0, 1.0], seed=2).take(20)


def test_a_vanishing_weight_is_no_error() -> None:
    stream = mixed([1e-300, 1.0])
    assert {file_of(prompt) for prompt in stream.take(1000)} == {1}


@pytest.mark.timeout(60)
def test_a_run_of_millions_of_prompts_is_skipped_to_by_counting() -> None:
    stream, other = mixed([1.0, 3.0], size=1000), mixed([1.0, 3.0], size=1000)
    stream.skip_to(3_000_001)
    other.skip_to(1_500_000)
    other.skip_to(3_000_001)
    assert stream.take(5) == other.take(5)
