"""A real engine that gets its weights from another one, which samples meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from megarl.device import address_of, host_store
from megarl.model.hf_config import model_shape
from megarl.model.lora_pairs import LoraSize
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding.peer_copy import PeerCopy, copy_messages
from megarl.rollout.sglang.adapter_slot import AdapterSlot
from megarl.rollout.sglang.engine import WEIGHT_LOADER, Engine, EngineError
from megarl.types import Sample
from megarl.types.sampling import Sampling
from tests.parallel import checkpoints
from tests.rollout.sglang.test_deterministic import PROMPTS, bits
from tests.tiny_engines import tiny_settings, write_tokenizer

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
SHORT = Sampling(4, 12, stream=(1,))
LONG = Sampling(24, 250, stream=(2,))
ADAPTERS = LoraSize(4, 0, 8.0, ("q_proj", "o_proj"), sync="adapters")


class Pair(NamedTuple):
    """Engine 0 has weights of version 1, engine 1 has none. Both are of one layout."""

    source: Engine
    target: Engine
    layout: EngineLayout
    store: TCPStore

    def copy(self, attempt: int, **changes: Any) -> PeerCopy:
        copy = PeerCopy(
            meet=address_of(self.store), run_id="test", attempt=attempt, version=1, target=1, sources=(0,),
            layout=self.layout, verify="checksum", round_bytes=100_000, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        return replace(copy, **changes)

    async def run(self, copy: PeerCopy) -> list[BaseException | None]:
        """How a copy ends for the source and for the target."""
        messages, target_message = copy_messages(copy)
        sending = self.source.send_copy(messages[0])
        receiving = self.target.receive_copy(target_message, copy.version)
        return [*await asyncio.gather(sending, receiving, return_exceptions=True)]


attempts = count(1)


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return host_store(TIMEOUT_S)


def empty_engine(first_gpu: int, **settings: Any) -> Engine:
    """An engine without weights, with megarl's own weight loader."""
    return Engine(tiny_settings(load_weights=False, first_gpu=first_gpu, **settings), WEIGHT_LOADER)


@pytest.fixture(scope="module")
def pair(
    build_engine: Callable[..., Engine], store: TCPStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Of two attention groups, with latent attention, which SGLang derives tensors of."""
    folder = checkpoints.write(tmp_path_factory.mktemp("copied"), "deepseek-v3")
    write_tokenizer(folder)
    layout = EngineLayout(1, 2, 2, dp=2)
    settings = {"layout": layout, "seeded": True, "model_path": str(folder)}
    source = build_engine(**settings)
    asyncio.run(source.reshard({"scale": 1.05}, 1))
    target = empty_engine(first_gpu=layout.tp, **settings)
    yield Pair(source, target, layout, store)
    source.shutdown()
    target.shutdown()


async def drawn(engine: Engine) -> list[list[tuple[bytes, bytes]]]:
    groups = await asyncio.gather(*(engine.generate(prompt, SHORT) for prompt in PROMPTS))
    return [bits(group) for group in groups]


def test_an_engine_without_whole_weights_does_not_send_and_says_so_to_all(pair: Pair) -> None:
    backwards = pair.copy(next(attempts), target=0, sources=(1,))
    messages, _ = copy_messages(backwards)
    with pytest.raises(EngineError, match="the engine has no weights"):
        asyncio.run(pair.target.send_copy(messages[1]))

    asyncio.run(pair.source.release_memory())
    sending, receiving = asyncio.run(pair.run(pair.copy(next(attempts))))
    assert str(sending) == "the engine has released the memory of its weights"
    assert f"engine 0, TP rank 0 has left: {sending}" in str(receiving)
    asyncio.run(pair.source.resume_memory())

    larger = pair.copy(next(attempts), layout=replace(pair.layout, ep=1))
    sending, receiving = asyncio.run(pair.run(larger))
    for error in (sending, receiving):
        assert isinstance(error, EngineError) and "the copy is of engines of" in str(error)


def test_a_copy_of_another_version_is_refused_and_the_source_samples_on(pair: Pair) -> None:
    before = asyncio.run(drawn(pair.source))
    sending, receiving = asyncio.run(pair.run(pair.copy(next(attempts), version=2)))
    for error in (sending, receiving):
        assert isinstance(error, EngineError)
        assert "engine 0, TP rank 1 has version 1 of the weights, not 2" in str(error)
    assert asyncio.run(drawn(pair.source)) == before
    with pytest.raises(EngineError, match="half-written weights: the copy to version 2 failed"):
        asyncio.run(pair.target.generate(PROMPTS[0], SHORT))


def test_a_new_engine_samples_what_its_source_does_whose_requests_go_on(pair: Pair) -> None:
    """Unverified on a GPU.

    rollout/sglang/scheduler.py, rollout/sglang/weight_loader.py send: NCCL beside a forward pass that is under way.
    To check first: `rollout.seeded` samples of source and target are equal; how long the source stands still.
    """

    async def copy_meanwhile() -> list[Sample]:
        pending = asyncio.ensure_future(pair.source.generate(PROMPTS[0], LONG))
        while not pair.source._manager.rid_to_state:  # SGLang's requests that have not ended
            await asyncio.sleep(0)
        ends = await pair.run(pair.copy(next(attempts)))
        assert ends == [None, None]
        assert not pending.done(), "the copy did not wait for the requests"
        return await pending

    undisturbed = asyncio.run(pair.source.generate(PROMPTS[0], LONG))
    assert bits(asyncio.run(copy_meanwhile())) == bits(undisturbed)
    assert pair.target.version == 1
    assert asyncio.run(drawn(pair.target)) == asyncio.run(drawn(pair.source))


def test_a_source_that_is_killed_in_the_middle_ends_the_copy(pair: Pair) -> None:
    """The last test of this pair."""
    copy = pair.copy(next(attempts), round_bytes=16)
    agreed = PrefixStore(f"copy/test/{copy.attempt}/0", pair.store)
    pids = pair.source.pids()

    async def kill() -> list[BaseException | None]:
        running = asyncio.ensure_future(pair.run(copy))
        while not agreed.check(["ready/outcome"]):
            await asyncio.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        return await asyncio.wait_for(running, timeout=TIMEOUT_S / 2)

    sending, receiving = asyncio.run(kill())
    assert str(sending).endswith(f"engine scheduler 1 (pid {pids[1]}) was killed by SIGKILL")
    assert isinstance(receiving, EngineError) and "copy to version 1 failed" in str(receiving)
    with pytest.raises(EngineError, match="half-written weights"):
        asyncio.run(pair.target.generate(PROMPTS[0], SHORT))
    assert all(psutil.pid_exists(pid) for pid in pair.target.pids())


def test_adapters_in_slots_are_copied(
    build_engine: Callable[..., Engine], store: TCPStore, checkpoint: Path
) -> None:
    slot = AdapterSlot.of(model_shape(checkpoint), ADAPTERS)
    settings = {"adapter": slot, "seeded": True, "model_path": str(checkpoint)}
    source = build_engine(1, 1, **settings)
    target = empty_engine(first_gpu=1, **settings)
    pair = Pair(source, target, EngineLayout(1, 1, 1), store)
    try:
        empty = asyncio.run(drawn(source))
        asyncio.run(source.reshard({"slots": 0.1}, 1))
        adapted = asyncio.run(drawn(pair.source))
        assert adapted != empty
        assert asyncio.run(pair.run(pair.copy(next(attempts), verify="full"))) == [None, None]
        assert asyncio.run(drawn(pair.target)) == adapted
    finally:
        source.shutdown()
        target.shutdown()
