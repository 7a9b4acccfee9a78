"""A real engine of two attention groups: how its requests are dealt to them, and what it reports as finished."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from megarl.rollout.load_balancing import Capacity, CompletedSample, RequestBalancer
from megarl.rollout.sglang.engine import Engine
from megarl.types import Sample
from megarl.types.sampling import Sampling
from tests.rollout.sglang.test_deterministic import bits

pytestmark = pytest.mark.slow

SHORT, LONG = [3, 7, 15, 8, 18, 4], [9] * 60
MOST = 4  # sequences of a group


@pytest.fixture(scope="module")
def engine(build_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """Seeded, of which requests and reports know nothing."""
    built = build_engine(2, 1, dp=2, seeded=True, sglang={"max_running_requests": 2 * MOST})
    yield built
    built.shutdown()


async def sampled(engine: Engine) -> tuple[list[Sample], list[CompletedSample]]:
    """The samples of five prompts, four of each, and the reports of all of them."""
    groups = await asyncio.gather(
        *(engine.generate(SHORT, Sampling(4, 24, stream=(index,))) for index in range(5))
    )
    completed: list[CompletedSample] = []
    while len(completed) < 20:
        completed += await engine.take_completed()
    return sum(groups, []), completed


def test_it_states_its_room(engine: Engine) -> None:
    assert engine.capacity.sequences == 2 * MOST
    assert engine.capacity.tokens >= 2 * MOST * 512


def test_each_sample_is_reported_once_and_no_group_has_more_than_it_can_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 samples for 8 places."""
    queue = engine._manager.queue
    most, book = Counter[int](), queue._balancer._book

    def noting(group: int, samples: int, tokens: int) -> None:
        book(group, samples, tokens)
        most[group] = max(most[group], queue._balancer._loads[group].sequences)

    monkeypatch.setattr(queue._balancer, "_book", noting)
    samples, completed = asyncio.run(sampled(engine))
    lengths = Counter(sample.num_trained for sample in samples)
    assert Counter(report.response_tokens for report in completed) == lengths
    assert {report.prompt_tokens for report in completed} == {len(SHORT)}
    assert most == {0: MOST, 1: MOST}
    assert [queue._balancer.expected_tokens(group) for group in range(2)] == [0, 0]


def test_a_cancelled_prompt_leaves_its_places(engine: Engine) -> None:
    """Of its 30 samples 8 run and the others wait."""

    async def cancel() -> None:
        pending = asyncio.ensure_future(engine.generate(SHORT, Sampling(30, 400)))
        while not engine._manager.queue._placed:
            await asyncio.sleep(0.01)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        assert len(await engine.generate(LONG, Sampling(12, 4))) == 12
        async with asyncio.timeout(60):
            while queue._placed:  # until SGLang has said of each that it was aborted
                await asyncio.sleep(0.01)

    queue = engine._manager.queue
    asyncio.run(cancel())
    assert not queue._waiting
    assert [queue._balancer.expected_tokens(group) for group in range(2)] == [0, 0]


def test_seeded_samples_are_the_same_in_whatever_group(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def draw() -> list[list[Sample]]:
        asked = [([5 + index] * 4, Sampling(2, 6, stream=(1, index))) for index in range(4)]
        return await asyncio.gather(*(engine.generate(*request) for request in asked))

    def drawn() -> list[tuple[bytes, bytes]]:
        return bits([sample for group in asyncio.run(draw()) for sample in group])

    assigned = drawn()
    assert len(set(assigned)) > 1
    for capacities in ([Capacity(4, 10**6), Capacity(0, 0)], [Capacity(0, 0), Capacity(1, 10**6)]):
        with monkeypatch.context() as patch:
            patch.setattr(engine._manager.queue, "_balancer", RequestBalancer(capacities, 100))
            assert drawn() == assigned, "all in one group"
