"""Shared attention calls on CPU give what SGLang's own loop over sequences gives, and keep sequences apart."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.cpu import sglang_attention, sglang_patches
from megarl.rollout.sglang import deterministic, scheduler

with_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="sglang is not installed"
)

# heads, KV heads, head sizes of keys and of values
MHA, GQA, MLA = (4, 4, 16, 16), (4, 2, 32, 32), (4, 1, 40, 32)
PATCHED = ("_run_sdpa_forward_decode", "_run_sdpa_forward_extend")
LENGTHS = {
    "ragged": [7, 1, 30, 199, 64, 2, 1, 65, 100, 31, 200],
    "one": [23],
    "two": [1, 2],
    "alike": [40] * 9,
    "outlier": [3000, *range(1, 40)],
    "many calls": [150 + index % 51 for index in range(130)],
}


class Cache(NamedTuple):
    """Random keys and values; the tokens of requests lie in them in random order, between unused slots."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor
    num_keys: torch.Tensor


def random_cache(shape: tuple[int, int, int, int], lengths: Sequence[int]) -> Cache:
    """Unused slots hold NaN: nobody may read them. In latent attention (one KV head), a value is a part of its key."""
    _, kv_heads, key_size, value_size = shape
    num_slots = sum(lengths) + 10
    keys, values = (
        torch.randn(num_slots, kv_heads, key_size),
        torch.randn(num_slots, kv_heads, value_size),
    )
    order = torch.randperm(num_slots)
    requests = torch.randperm(len(lengths) + 3)[: len(lengths)]
    slots = torch.full((len(lengths) + 3, max(lengths) + 5), int(order[-1]), dtype=torch.int32)
    for request, indices in zip(requests, order.split([*lengths, 10]), strict=False):
        slots[request, : len(indices)] = indices.to(torch.int32)
    keys[order[-10:]] = values[order[-10:]] = torch.nan
    return Cache(
        keys,
        keys[..., :value_size] if kv_heads == 1 else values,
        slots,
        requests,
        torch.tensor(lengths),
    )


Attend = Callable[..., torch.Tensor]
Pair = tuple[Attend, Attend]  # a function of SGLang's backend before and after the patch


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, whose functions are its own again after the test."""
    torch.manual_seed(0)
    sglang_patches.prepare()
    with sglang_patches.quiet_import():
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    for name in PATCHED:
        monkeypatch.setattr(TorchNativeAttnBackend, name, getattr(TorchNativeAttnBackend, name))
    return object.__new__(TorchNativeAttnBackend)


@pytest.fixture
def pairs(backend: Any) -> list[Pair]:
    """Those of decoding, and of extending."""
    originals = [getattr(backend, name) for name in PATCHED]
    sglang_attention.batch_attention()
    return [(each, getattr(backend, name)) for each, name in zip(originals, PATCHED, strict=True)]


def run_both(pair: Pair, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(what SGLang's own function gives, what the batched one gives)"""
    original, batched = pair
    return run(original, *args, **options), run(batched, *args, **options)


def run(
    function: Attend,
    shape: tuple[int, int, int, int],
    query: torch.Tensor,
    *where: torch.Tensor | None,
    window: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    heads, kv_heads, key_size, value_size = shape
    output = torch.full((len(query), heads, value_size), 7.0, dtype=query.dtype)
    options = {
        "scaling": key_size**-0.5,
        "enable_gqa": heads != kv_heads,
        "sliding_window_size": window,
    }
    done = function(query, output, *where, causal=causal, is_cross_attn=False, **options)
    assert done is output
    return output


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@with_sglang
@pytest.mark.parametrize("window", [None, -1, 0, 5, 1000])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shape", [MHA, GQA, MLA], ids=["MHA", "GQA", "MLA"])
def test_decoding_together_gives_what_one_after_the_other_gives(
    pairs: list[Pair], shape: tuple[int, int, int, int], lengths: list[int], window: int | None
) -> None:
    cache = random_cache(shape, lengths)
    query = torch.randn(len(lengths), shape[0], shape[2])
    expected, actual = run_both(pairs[0], shape, query, *cache, None, window=window)
    assert expected.isfinite().all()
    assert_same(actual, expected)
    if len(lengths) == 1:
        assert torch.equal(actual, expected)


@with_sglang
def test_keys_of_another_type_are_those_of_the_query(pairs: list[Pair]) -> None:
    cache = random_cache(GQA, LENGTHS["ragged"])
    cache = cache._replace(k_cache=cache.k_cache.bfloat16(), v_cache=cache.v_cache.bfloat16())
    query = torch.randn(len(cache.num_keys), GQA[0], GQA[2])
    assert_same(*run_both(pairs[0], GQA, query, *cache, None))


@with_sglang
def test_what_is_broken_in_one_sequence_stays_there(pairs: list[Pair]) -> None:
    cache = random_cache(GQA, LENGTHS["ragged"])
    query = torch.randn(len(cache.num_keys), GQA[0], GQA[2])
    _, decode = pairs[0]
    before = run(decode, GQA, query, *cache, None)
    longest = int(cache.num_keys.argmax())
    broken = cache.slots[cache.requests[longest], : cache.num_keys[longest]]
    cache.k_cache[broken] = cache.v_cache[broken] = torch.nan
    after = run(decode, GQA, query, *cache, None)
    assert after[longest].isnan().all()
    after[longest] = before[longest]
    assert torch.equal(after, before)


@with_sglang
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shape", [MHA, GQA, MLA], ids=["MHA", "GQA", "MLA"])
@pytest.mark.parametrize(
    "num_queries",
    [[1] * 6, [1, 7, 1, 30, 2, 1], [4, 7, 30, 1, 9, 5], [7, 7, 30, 8, 64, 5]],
    ids=str,
)
def test_extending_cached_prompts_together_gives_what_one_after_the_other_gives(
    pairs: list[Pair], shape: tuple[int, int, int, int], num_queries: list[int], window: int | None
) -> None:
    cache = random_cache(shape, [7, 9, 30, 30, 64, 5])
    news = torch.tensor(num_queries)
    # filled up by two rows that are no sequence's
    query = torch.randn(sum(num_queries) + 2, shape[0], shape[2])
    where = (*cache, cache.num_keys - news, news, None)
    expected, actual = run_both(pairs[1], shape, query, *where, window=window, causal=True)
    assert (actual[-2:] == 7).all()
    assert_same(actual, expected)


@with_sglang
def test_attention_to_an_encoder_and_in_both_directions_is_sglangs_own(pairs: list[Pair]) -> None:
    cache = random_cache(GQA, [7, 9, 30])
    query = torch.randn(3, GQA[0], GQA[2])
    encoder_lens, ones = torch.tensor([2, 1, 3]), torch.ones(3, dtype=torch.int64)
    inner = cache._replace(num_keys=cache.num_keys - encoder_lens)
    for num_keys, encoder in ((cache.num_keys, None), (inner.num_keys, encoder_lens)):
        where = (*cache[:4], num_keys, num_keys - 1, ones, encoder)
        assert torch.equal(*run_both(pairs[1], GQA, query, *where))
    assert torch.equal(*run_both(pairs[0], GQA, query, *inner, encoder_lens))


@given(
    st.lists(st.integers(1, 20_000) | st.integers(1, 300), max_size=300).map(sorted),
    st.integers(0, 10_000),
)
def test_calls_hold_every_sequence_once_and_padding_at_most_doubles_them(
    num_keys: list[int], most_keys: int
) -> None:
    calls = list(sglang_attention.shared_calls(num_keys, most_keys))
    assert [index for start, end in calls for index in range(start, end)] == list(
        range(len(num_keys))
    )
    for start, end in calls:
        padded = (end - start) * num_keys[end - 1]
        assert padded <= 2 * sum(num_keys[start:end]) + 1024
        assert padded <= most_keys or end - start == 1


def test_little_work_is_not_worth_another_call() -> None:
    assert list(sglang_attention.shared_calls([1, 20, 60, 200], 8192)) == [(0, 4)]


@with_sglang
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("repeatable", [False, True])
def test_only_engines_on_cpu_whose_samples_need_not_repeat_attend_together(
    backend: Any, monkeypatch: pytest.MonkeyPatch, device: str, repeatable: bool
) -> None:
    monkeypatch.setattr(scheduler, "DEVICE", device)
    for module in (sglang_patches, deterministic):
        monkeypatch.setattr(module, "patch_sglang", lambda: None)  # they would outlive the test
    scheduler.patch_sglang(repeatable)
    owner = "megarl" if device == "cpu" and not repeatable else "sglang"
    assert [getattr(backend, name).__module__.split(".")[0] for name in PATCHED] == [owner, owner]
