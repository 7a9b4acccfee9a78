"""A real SGLang engine in this process: what it samples, what it listens on, what it costs, how it takes weights."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.rollout.sglang.engine import Engine, EngineError
from megarl.types import Sample
from megarl.types.sampling import Sampling

pytestmark = pytest.mark.slow

PROMPTS = [[3, 7, 15, 8, 18, 4], [3, 12, 16, 5, 18, 4], [9, 9, 9], [3, *range(20, 44), 4]]
LAYOUTS = [(1, 1), (2, 2)]  # test_families.py has more
TOLERANCE = 1e-4
BFLOAT16 = 0.05  # nats, in the mean: engine and reference round in other places


@pytest.fixture(scope="module", params=LAYOUTS, ids=["tp1", "tp2-ep2"])
def engine(request: pytest.FixtureRequest, build_engine: Callable[..., Engine]) -> Iterator[Engine]:
    built = build_engine(*request.param)
    yield built
    built.shutdown()


async def sample_all(engine: Engine, sampling: Sampling) -> list[list[Sample]]:
    return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))


def versions(sample: Sample) -> tuple[int, ...]:
    return tuple(part.version for part in sample.only_row.parts)


def worst_diff(
    groups: list[list[Sample]],
    reference: Any,
    temperature: float = 1.0,
    prompts: Sequence[list[int]] = PROMPTS,
) -> float:
    """The largest |engine - transformers| over all sampled tokens."""
    return max(
        float(diffs(group, reference, prompt, temperature).max())
        for prompt, group in zip(prompts, groups, strict=True)
    )


def mean_diff(
    samples: Sequence[Sample], reference: Any, prompt: list[int], temperature: float = 1.0
) -> float:
    """The mean |engine - transformers|."""
    return float(diffs(samples, reference, prompt, temperature).mean())


def diffs(
    samples: Sequence[Sample], reference: Any, prompt: list[int], temperature: float
) -> np.ndarray:
    """|engine - transformers| of all sampled tokens."""
    rows = [sample.only_row for sample in samples]
    logps = [reference.logprobs(prompt, row.response_ids_T.tolist(), temperature) for row in rows]
    return np.abs(np.concatenate([row.engine_logp_T for row in rows]) - np.concatenate(logps))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(4, 12), Sampling(4, 12, 0.6, 0.9), Sampling(4, 12, 1.3)],
    ids=["plain", "cooler-truncated", "warmer"],
)
def test_logprobs_are_those_of_the_model(
    engine: Engine, reference: Any, sampling: Sampling
) -> None:
    """At the temperature that was sampled at, beside greedy samples, whose own are of temperature 1."""

    async def sample_both() -> tuple[list[list[Sample]], list[list[Sample]]]:
        return await asyncio.gather(
            sample_all(engine, sampling), sample_all(engine, Sampling(1, 12, 0.0))
        )

    groups, greedy = asyncio.run(sample_both())
    assert [len(group) for group in groups] == [4] * len(PROMPTS)
    assert worst_diff(groups, reference, sampling.temperature) < TOLERANCE
    assert worst_diff(greedy, reference) < TOLERANCE
    assert len({sample.only_row.response_ids_T.tobytes() for sample in groups[0]}) > 1, (
        "samples of a group must differ"
    )


def test_greedy_takes_the_likeliest_token(engine: Engine, reference: Any) -> None:
    for prompt, (sample,) in zip(
        PROMPTS, asyncio.run(sample_all(engine, Sampling(1, 6, 0.0))), strict=True
    ):
        response = sample.only_row.response_ids_T.tolist()
        likeliest = reference.logits([*prompt, *response])[len(prompt) - 1 : -1].argmax(-1)
        assert response == likeliest.tolist()


def test_a_response_ends_with_the_token_that_completes_a_stop_text(
    engine: Engine, reference: Any, tokenizer: Any
) -> None:
    """A token is a character here, or a special token; the stop texts have two characters each, or a special token."""
    stop = *(f"a{character}" for character in "abcdefghijklm"), "<user>"
    group = asyncio.run(engine.generate(PROMPTS[0], Sampling(256, 24, stop=stop)))
    texts = [tokenizer.decode(sample.only_row.response_ids_T.tolist()) for sample in group]
    endings = {
        next((stop_text for stop_text in stop if text.endswith(stop_text)), "") for text in texts
    }
    assert {"<user>", ""} < endings
    for sample, text in zip(group, texts, strict=True):
        response = sample.only_row.response_ids_T.tolist()
        # as <pad> has "ad"
        has_end = response[-1] == tokenizer.eos_token_id or any(
            stop_text in text for stop_text in stop
        )
        assert sample.finished == has_end and (has_end or len(response) == 24)
        assert not any(stop_text in tokenizer.decode(response[:-1]) for stop_text in stop)
        assert tokenizer.eos_token_id not in response[:-1]
        assert sample.text == tokenizer.decode(response, skip_special_tokens=True)
        assert len(sample.only_row.engine_logp_T) == len(response)
    assert worst_diff([group], reference, prompts=PROMPTS[:1]) < TOLERANCE


def test_new_weights_are_sampled_from_and_named(
    engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same prompts before and after: a prompt's old KV cache would show."""
    before, update = engine.version, engine._manager.update_weights_from_tensor
    asked: list[Any] = []
    asyncio.run(sample_all(engine, Sampling(4, 12)))

    def noting(request: Any) -> Any:
        asked.append(request)
        return update(request)

    with monkeypatch.context() as patch:
        patch.setattr(engine._manager, "update_weights_from_tensor", noting)
        asyncio.run(engine.reshard({"scale": 1.1}, before + 1))
    assert [request.torch_empty_cache for request in asked] == [True], (
        "or torch keeps the staging, on a GPU"
    )
    groups = asyncio.run(sample_all(engine, Sampling(4, 12)))
    assert engine.version == before + 1
    assert {versions(sample) for group in groups for sample in group} == {(before + 1,)}
    assert worst_diff(groups, reference) > 100 * TOLERANCE
    reference.scale(1.1)
    assert worst_diff(groups, reference) < TOLERANCE
    asyncio.run(engine.reshard({"scale": 1 / 1.1}, before + 2))


def test_a_failed_reshard_is_named_and_stops_generation_until_one_succeeds(engine: Engine) -> None:
    before, last = engine.version, len(engine.pids()) - 1
    with pytest.raises(
        EngineError,
        match=rf"version {before + 1} failed: .*rank {last}: ValueError: shard of session",
    ):
        asyncio.run(engine.reshard({"fail_on": last}, before + 1))
    assert engine.version == before
    with pytest.raises(EngineError, match=r"half-written .* shard of session is wrong"):
        asyncio.run(engine.generate(PROMPTS[0], Sampling(1, 4)))
    asyncio.run(engine.reshard({}, before + 1))
    (sample,) = asyncio.run(engine.generate(PROMPTS[0], Sampling(1, 4)))
    assert (*versions(sample), engine.version) == (before + 1, before + 1)


def test_a_reshard_waits_for_running_requests(engine: Engine) -> None:
    async def both() -> list[Sample]:
        pending = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(8, 200)))
        await asyncio.sleep(0.1)  # let it start; either order must give one version per sample
        await engine.reshard({}, engine.version + 1)
        return await pending

    assert len({versions(sample) for sample in asyncio.run(both())}) == 1


def test_it_listens_on_loopback_alone(engine: Engine) -> None:
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        for socket in process.net_connections(kind="inet"):
            assert (
                socket.status != psutil.CONN_LISTEN
                or ipaddress.ip_address(socket.laddr[0]).is_loopback
            ), socket


def test_memory_that_training_had_in_between(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, by SGLang's own bookkeeping: it fails where a part is given back that was not taken.

    Unverified on a GPU.

    fleet/memory.py, rollout/sglang/engine.py: `release_memory_occupation` and `resume_memory_occupation` by tag
    through SGLang's memory saver. To check first: device memory before and after each phase; engine logprobs equal
    the trainer's after a resume.
    """
    monkeypatch.setattr("megarl.rollout.sglang.engine.DEVICE", "cuda")

    async def onload_for(*taken: list[str]) -> None:
        await engine.release_memory()
        for tags in taken:
            await engine.resume_memory(tags)

    before = asyncio.run(sample_all(engine, Sampling(1, 8, 0.0)))
    asyncio.run(onload_for(["weights"], ["kv_cache"]))
    asyncio.run(onload_for(["weights", "kv_cache"]))
    after = asyncio.run(sample_all(engine, Sampling(1, 8, 0.0)))
    for (sample,), (other,) in zip(before, after, strict=True):
        assert sample.only_row.response_ids_T.tolist() == other.only_row.response_ids_T.tolist()


def test_a_release_of_memory_waits_for_running_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.rollout.sglang.engine.DEVICE", "cuda")

    async def both() -> list[Sample]:
        pending = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(1, 200)))
        while not engine._manager.rid_to_state:  # SGLang's requests that have not ended
            await asyncio.sleep(0)
        await engine.release_memory()
        assert not engine._manager.rid_to_state
        await engine.resume_memory()
        return await pending

    (sample,) = asyncio.run(both())
    assert sample.prefills == 1 and len(sample.only_row.response_ids_T)
    assert len(asyncio.run(engine.generate(PROMPTS[0], Sampling(1, 4)))) == 1, "the schedulers live"


def test_a_full_prompt_and_a_full_response_fit_into_the_context(
    build_engine: Callable[..., Engine],
) -> None:
    """SGLang's tables are of the context that the recipe needs, and not of the model's."""
    engine = build_engine(1, 1, context_tokens=40, model_context=512)
    assert engine._manager.context_len < 50
    for prompt_tokens, num_samples, response_tokens in ((39, 1, 1), (8, 64, 32)):
        sampling = Sampling(num_samples, response_tokens)
        samples = asyncio.run(engine.generate([9] * prompt_tokens, sampling))
        assert max(sample.num_trained for sample in samples) == response_tokens
    engine.shutdown()


@pytest.mark.parametrize("engine", LAYOUTS[1:], ids=["tp2-ep2"], indirect=True)
def test_it_is_idle_when_it_has_nothing_to_do(engine: Engine) -> None:
    asyncio.run(engine.generate(PROMPTS[0], Sampling(1, 4)))
    processes = [psutil.Process(pid) for pid in engine.pids()]
    start, before = time.monotonic(), [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(5)  # what is measured is a length of time
    spent = [
        sum(process.cpu_times()[:2]) - old for process, old in zip(processes, before, strict=True)
    ]
    assert max(spent) / (time.monotonic() - start) < 0.03
