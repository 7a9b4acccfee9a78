"""Seeded samples repeat to the last bit in any company; and each says which experts its tokens went to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.rollout.sglang import deterministic
from megarl.rollout.sglang.engine import Engine
from megarl.types import Sample
from megarl.types.sampling import Sampling, sample_seed
from tests.parallel import checkpoints
from tests.rollout.draws import check_draws
from tests.rollout.sglang.test_engine import TOLERANCE, worst_diff
from tests.tiny_engines import Reference, write_tokenizer

PROMPTS = [[3, 7, 15, 8, 18, 4], [9, 9, 9], [3, *range(20, 44), 4], [5, 6, 7, *([8, 9] * 40)]]
KINDS = [(1.0, 1.0), (0.0, 1.0), (0.7, 1.0), (0.7, 0.9)]  # temperature, top-p
CASES = {
    "qwen3-moe tp1": ("qwen3-moe", {"tp": 1, "ep": 1}),
    "qwen3-moe tp2": ("qwen3-moe", {"tp": 2, "ep": 1}),
    "deepseek-v3 tp2 ep2 dp2": ("deepseek-v3", {"tp": 2, "ep": 2, "dp": 2}),
}
# and the seeded samples of Qwen3-MoE in tests/end_to_end/test_resume.py
BY_DAY = "deepseek-v3 tp2 ep2 dp2", KINDS[::3]


def test_every_sample_has_a_seed_of_its_own_for_ever() -> None:
    streams = [(run, step, prompt) for run in (0, 1) for step in range(20) for prompt in range(20)]
    seeds = {sample_seed(stream, index) for stream in streams for index in range(8)}
    assert len(seeds) == len(streams) * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    drawn_first = 7211725819173872633
    assert sample_seed((7, 1, 0), 2) == drawn_first, (
        "a resumed run must draw what the first one drew"
    )


def test_the_hash_is_murmur3() -> None:
    """MurmurHash3_x86_32 of struct.pack("<QII", seed, position, column), by another implementation."""
    seeds = torch.tensor([0, 1, 2**63 - 1, 0x89ABCDEF01234567], dtype=torch.uint64)
    positions = torch.tensor([0, 5, 31, 4095])
    hashed = deterministic.murmur_hash(seeds, positions, torch.tensor([0, 3, 128_000]))
    assert hashed.tolist() == [
        [0x8134CDF8, 0x518A6E8E, 0x16058200],
        [0x388A8291, 0xF547E71D, 0x1D8A2246],
        [0x4D1EE376, 0x8660132E, 0x24A2E9E3],
        [0xDDFB6A75, 0x64FB0E81, 0x9C23B8CE],
    ]


def test_truncation_keeps_each_rows_likeliest_tokens() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).repeat(4, 1)
    every = 1 << 30
    kept = deterministic.truncated(
        probs, torch.tensor([every, 1, every, 2]), torch.tensor([1.0, 1.0, 0.6, 0.9])
    )
    assert (kept > 0).tolist() == [
        [True, True, True, True],
        [False, True, False, False],
        [False, True, False, True],
        [False, True, False, True],
    ]
    assert torch.equal(kept[0], probs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "width"), [(16, 8), (33, 47), (64, 192), (128, 47), (512, 64)])
def test_a_rows_product_is_the_same_in_any_company(
    inner: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(inner)
    row, right = torch.randn(1, inner).to(dtype), torch.randn(width, inner).to(dtype).t()
    alone = deterministic.product(row, right)
    torch.testing.assert_close(
        alone, row @ right, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2
    )
    for rows in (1, 2, 3, 7, 16, 17, 33, 100):
        for place in {0, rows // 2, rows - 1}:
            left = torch.randn(rows, inner).to(dtype)
            left[place] = row
            assert torch.equal(deterministic.product(left, right)[place], alone[0])
            batched = deterministic.batched_product(left[None], right[None])
            assert torch.equal(batched[0, place], alone[0])


def test_products_of_nothing_and_with_an_addend() -> None:
    left, right, bias = torch.randn(5, 32), torch.randn(32, 6), torch.randn(6)
    expected = torch.addmm(bias, left, right, beta=2, alpha=3)
    torch.testing.assert_close(
        deterministic.sum_with_product(bias, left, right, beta=2, alpha=3), expected
    )
    assert deterministic.product(left[:0], right).shape == (0, 6)
    assert deterministic.batched_product(left[None, :0], right[None]).shape == (1, 0, 6)
    assert deterministic.batched_product(left[None][:0], right[None][:0]).shape == (0, 5, 6)


def bits(samples: Sequence[Sample]) -> list[tuple[bytes, bytes]]:
    return [
        (sample.only_row.response_ids_T.tobytes(), sample.only_row.engine_logp_T.tobytes())
        for sample in samples
    ]


def sampling(kind: tuple[float, float], prompt: int) -> Sampling:
    temperature, top_p = kind
    return Sampling(3, 24, temperature, top_p, stream=(7, 1, prompt))


async def alone(engine: Engine, kind: tuple[float, float]) -> list[list[Sample]]:
    """One prompt after the other."""
    return [
        await engine.generate(prompt, sampling(kind, index)) for index, prompt in enumerate(PROMPTS)
    ]


async def in_company(engine: Engine, kind: tuple[float, float]) -> list[list[Sample]]:
    """All at once, the last first, between requests of every kind that start and end at other times."""
    strangers = [
        engine.generate(
            [5 + number] * (number + 1), Sampling(2, 3 * number + 1, *other, stream=(8, number))
        )
        for number, other in enumerate(KINDS * 3)
    ]
    requests = [
        engine.generate(prompt, sampling(kind, index)) for index, prompt in enumerate(PROMPTS)
    ]
    done = await asyncio.gather(*strangers, *reversed(requests))
    return list(reversed(done[len(strangers) :]))


async def in_phases(
    engine: Engine,
    kind: tuple[float, float],
    phase_tokens: int,
    change: Callable[[], Awaitable[None]] | None = None,
) -> list[list[Sample]]:
    """All prompts, each response in parts of so many tokens; change: what happens between two phases."""
    hows = [
        replace(sampling(kind, place), phase_tokens=phase_tokens) for place in range(len(PROMPTS))
    ]
    groups = await asyncio.gather(*map(engine.generate, PROMPTS, hows))
    while going := [
        place for place, group in enumerate(groups) if any(sample.is_open for sample in group)
    ]:
        if change:
            await change()
        calls = [engine.generate(PROMPTS[place], hows[place], groups[place]) for place in going]
        for place, group in zip(going, await asyncio.gather(*calls), strict=True):
            groups[place] = group
    return groups


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, int]]:
    """A checkpoint and its engine's layout."""
    family, layout = CASES[request.param]
    folder = tmp_path_factory.mktemp("seeded")
    write_tokenizer(folder)
    return checkpoints.write(folder, family), layout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "kinds"),
    [BY_DAY, *(pytest.param(name, KINDS, marks=pytest.mark.nightly) for name in CASES)],
    indirect=["served"],
)
def test_samples_repeat_in_another_engine_and_in_any_company(
    served: tuple[Path, dict[str, int]],
    kinds: Sequence[tuple[float, float]],
    build_engine: Callable[..., Engine],
) -> None:
    """Unverified on a GPU.

    rollout/sglang/deterministic.py: SGLang's deterministic inference with our sampler; with fp8, radix cache,
    chunked prefill, NCCL at TP > 1. To check first: the digests of two fresh engines.
    """
    folder, layout = served
    options = {"model_path": str(folder), "seeded": True, "routed_experts": True, **layout}
    groups = []
    for seed, ask in ((3, alone), (4, in_company)):
        engine = build_engine(**options, seed=seed)
        groups.append([asyncio.run(ask(engine, kind)) for kind in kinds])
        if ask is in_company:  # on another engine, too
            parts = [
                asyncio.run(in_phases(engine, kinds[0], phase_tokens)) for phase_tokens in (5, 8)
            ]
        engine.shutdown()
    for kind, first, second in zip(kinds, *groups, strict=True):
        assert [bits(group) for group in first] == [bits(group) for group in second], kind
        if kind[0] in (0.0, 1.0):
            distinct = {len(set(bits(group))) for group in first}
            assert distinct == {3 if kind[0] else 1}, "only greedy samples are equal"
    plain = groups[0][0]
    for in_parts in parts:
        check_continued(in_parts, plain)
    reference = Reference(folder)
    for groups_of_kind in (plain, groups[1][0], *parts):
        check_experts(reference, groups_of_kind)
    for (temperature, _), sampled in zip(kinds, groups[0], strict=True):
        if temperature:
            assert worst_diff(sampled, reference, temperature, PROMPTS) < TOLERANCE


def check_continued(groups: Sequence[Sequence[Sample]], whole: Sequence[Sequence[Sample]]) -> None:
    """Samples of several parts are those of one, in their tokens to the last."""
    lengths = set()
    for sample, other in zip(chain(*groups), chain(*whole), strict=True):
        row = sample.only_row
        whole_row = other.only_row
        assert row.response_ids_T.tolist() == whole_row.response_ids_T.tolist()
        assert (sample.text, sample.finished, row.parts) == (
            other.text,
            other.finished,
            whole_row.parts,
        )
        np.testing.assert_allclose(row.engine_logp_T, whole_row.engine_logp_T, atol=TOLERANCE)
        lengths.add(row.num_trained)
    assert max(lengths) == 24 and len(lengths) > 3, "some end by themselves, in several phases"


@pytest.mark.slow
def test_seeded_samples_are_independent_draws(
    build_engine: Callable[..., Engine], reference: Reference
) -> None:
    engines = [build_engine(1, 1, seeded=True, context_tokens=32) for _ in range(2)]
    check_draws(engines, reference, temperature=0.7)
    for engine in engines:
        engine.shutdown()


@pytest.mark.slow
def test_experts_of_cached_tokens_are_told_too(
    checkpoint: Path, build_engine: Callable[..., Engine]
) -> None:
    """Where samples need not repeat, the second time all prompts are in the prefix cache.

    Unverified on a GPU.

    rollout/sglang/engine.py routed experts: captured under CUDA graphs, overlap scheduling, DP attention. To check
    first: equality with transformers' routers.
    """
    engine = build_engine(2, 2, routed_experts=True)
    reference = Reference(checkpoint)
    for _ in range(2):
        check_experts(reference, asyncio.run(alone(engine, KINDS[0])))
    # with what was sampled in the cache
    check_experts(reference, asyncio.run(in_phases(engine, KINDS[0], 7)))
    check_versions(reference, engine)
    engine.shutdown()


def check_versions(reference: Reference, engine: Engine) -> None:
    """Each part has the version of its weights, with their logprobs and experts: phases of 7 tokens of 24."""
    first, scale = engine.version, 1.15

    async def change() -> None:
        await engine.reshard({"scale": scale}, engine.version + 1)

    samples = [
        (prompt, sample)
        for prompt, group in zip(
            PROMPTS, asyncio.run(in_phases(engine, KINDS[0], 7, change)), strict=True
        )
        for sample in group
    ]
    asyncio.run(engine.reshard({"scale": scale ** (first - engine.version)}, first))
    changed = []
    for version in range(first, first + 4):
        for prompt, sample in samples:
            changed.append(check_part(reference, prompt, sample, version))
        reference.scale(scale)
    assert max(len(sample.only_row.parts) for _, sample in samples) == 4
    assert sum(changed) > 20, "the versions choose other experts"


def check_part(reference: Reference, prompt: list[int], sample: Sample, version: int) -> int:
    """The part of this version is the reference's; in how many of the other rows it chooses other experts."""
    row = sample.only_row
    versions = [part.version for part in row.parts]
    if version not in versions:
        return 0
    part = row.parts[versions.index(version)]
    end = sum(before.num_tokens for before in row.parts[: versions.index(version) + 1])
    start = end - part.num_tokens
    logp_T = reference.logprobs(prompt, row.response_ids_T.tolist()).numpy()
    np.testing.assert_allclose(row.engine_logp_T[start:end], logp_T[start:end], atol=TOLERANCE)
    engine_experts, expected = sorted_experts(reference, prompt, sample)
    assert len(engine_experts) == row.num_tokens - 1
    rows = range(len(prompt) + start - 1 if start else 0, len(prompt) + end - 1)
    assert engine_experts[rows].tolist() == expected[rows].tolist()
    return int((engine_experts != expected).any((1, 2)).sum())


def sorted_experts(
    reference: Reference, prompt: list[int], sample: Sample
) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each token, as the sample has them, and as transformers' routers choose them."""
    row = sample.only_row
    assert row.routed_experts is not None and row.routed_experts.dtype == np.uint8
    expected = experts_of(reference, [*prompt, *row.response_ids_T.tolist()])
    return np.sort(row.routed_experts, -1), np.sort(expected, -1)


def experts_of(reference: Reference, ids: list[int]) -> np.ndarray:
    """To which transformers' routers send all tokens but the last: [tokens - 1, layers, experts a token]."""
    chosen: list[torch.Tensor] = []
    experts = [
        module for name, module in reference.model.named_modules() if name.endswith("mlp.experts")
    ]
    hooks = [
        module.register_forward_hook(lambda _, inputs, __: chosen.append(inputs[1]))
        for module in experts
    ]
    reference.logits(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)[:-1].numpy()


def check_experts(reference: Reference, groups: Sequence[Sequence[Sample]]) -> None:
    """They are those to which transformers' routers send the same tokens."""
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for sample in group:
            engine_experts, expected = sorted_experts(reference, prompt, sample)
            assert engine_experts.tolist() == expected.tolist()
