"""Requests of an episode, their retries, and the keys of open episodes."""

from __future__ import annotations

import asyncio

import pytest

from megarl.environments.agents.chat import ChatRequest, EpisodeOver
from megarl.environments.endpoint.registry import MOST_BODY_BYTES, OpenEpisode, OpenEpisodes
from tests.environments.endpoint.scripted import WAIT_S, Scripted, say

HI = ChatRequest([{"role": "user", "content": "Hi"}])


def test_a_retry_keeps_the_request_whose_connection_is_lost() -> None:
    """It is cancelled once nobody waits for it any more, and then the next retry asks anew."""
    handler = Scripted(say("never given"), say("given"), holds=True)
    episode = OpenEpisode(handler)

    async def work() -> None:
        first, second = (
            asyncio.ensure_future(episode.ask(b"x", HI, is_retry=retry)) for retry in (False, True)
        )
        assert await asyncio.to_thread(handler.await_event) == "asked"
        first.cancel()
        await asyncio.wait({first})
        third = asyncio.ensure_future(episode.ask(b"x", HI, is_retry=True))
        second.cancel()
        third.cancel()
        await asyncio.wait({second, third})
        again = asyncio.ensure_future(episode.ask(b"x", HI, is_retry=True))
        assert await asyncio.to_thread(handler.await_event) == "cancelled"
        handler.release()
        assert (await again)[1] == say("given")

    asyncio.run(work())
    assert len(handler.requests) == 2


def test_bodies_wait_for_room() -> None:
    """At most MOST_BODY_BYTES are being read at once, and a body that waits is refused at the end."""

    async def work() -> None:
        episode, entered = OpenEpisode(Scripted()), asyncio.Queue[int]()

        async def body(number: int, num_bytes: int, may_end: asyncio.Event) -> None:
            async with episode.room_for_body(num_bytes):
                entered.put_nowait(number)
                await may_end.wait()

        gates = [asyncio.Event() for _ in range(4)]
        sizes = [MOST_BODY_BYTES - 1, 1, 1, MOST_BODY_BYTES]
        tasks = [
            asyncio.create_task(body(number, size, gates[number]))
            for number, size in enumerate(sizes)
        ]
        assert [await entered.get(), await entered.get()] == [0, 1]
        gates[1].set()
        assert await entered.get() == 2 and entered.empty()
        gates[0].set()
        await tasks[0]
        assert entered.empty(), "one byte is still being read"
        await episode.end()
        gates[2].set()
        await asyncio.wait(tasks)
        assert isinstance(tasks[3].exception(), EpisodeOver) and entered.empty()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_an_ended_episode_answers_nothing() -> None:
    """Not from its record, either."""
    handler = Scripted()
    episode = OpenEpisode(handler)

    async def work() -> None:
        await episode.ask(b"x", HI, is_retry=False)
        await episode.end()
        for retry in (False, True):
            with pytest.raises(EpisodeOver):
                await episode.ask(b"x", HI, is_retry=retry)
        with pytest.raises(EpisodeOver), episode.admitted():
            pass

    asyncio.run(work())
    assert len(handler.requests) == 1


def test_each_key_finds_its_own_episode_until_it_is_removed() -> None:
    opened, episodes = OpenEpisodes(), [OpenEpisode(Scripted()) for _ in range(100)]
    keys = [opened.add(episode) for episode in episodes]
    assert len({*keys}) == 100 and {len(key) for key in keys} == {43}, "256 bits in base64"
    assert [opened.find(key) for key in keys] == episodes
    assert (
        opened.remove(keys[3]) is episodes[3]
        and opened.find(keys[3]) is opened.remove(keys[3]) is None
    )
    assert not any(key in repr(vars(opened)) for key in keys)
    assert len(opened.clear()) == 99 and opened.find(keys[0]) is None
