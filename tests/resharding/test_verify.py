"""Verification after real exchanges: it passes what is right, and names what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from megarl.model.precision import FP8_TILES
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.execute import Params
from megarl.resharding.transport import PeerCheck
from megarl.resharding.verify import VerifyMode, _strips, word_weights
from tests.resharding.worlds import FP8_MOE, MOE, Opened, Pair, Pool, Slot

pytestmark = pytest.mark.slow

PAIR = Pair(MOE, TrainLayout(4, 2, 2, 2), EngineLayout(2, 2, 2), gpus_per_node=2)
FP8 = Pair(
    FP8_MOE,
    TrainLayout(4, 1, 2, 2),
    EngineLayout(2, 2, 1, precision=FP8_TILES),
    "bfloat16",
    1 << 20,
)
W13, DOWN = "model.layers.1.mlp.experts.w13_weight", "model.layers.3.mlp.experts.w2_weight"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(4)
    yield processes
    processes.end()


@pytest.fixture(params=["checksum", "full"])
def opened(pool: Pool, request: pytest.FixtureRequest) -> Opened:
    """Four slots after a good exchange."""
    return start(pool, replace(PAIR, verify=request.param))


def start(pool: Pool, pair: Pair) -> Opened:
    opened_pair = pool.open(pair)
    opened_pair.fill(1)
    opened_pair.run(1)
    return opened_pair


def errors(opened: Opened, slot: int, how: Callable[[Slot], None]) -> str:
    """What slot `slot` says after a change of its parameters; the others must find nothing."""
    opened.ask(slot, "change", how)
    answers = opened.tell("verify")
    assert [answer for other, answer in enumerate(answers) if other != slot] == [None] * 3
    assert isinstance(answers[slot], RuntimeError) and "VerifyError" in str(answers[slot])
    return str(answers[slot])


def flip_bit(slot: Slot) -> None:
    slot.targets[W13].view(torch.int32)[1, 65, 3] ^= 1 << 17  # the last bit of one byte


def swap_rows(slot: Slot) -> None:
    rows = slot.targets["model.layers.2.self_attn.o_proj.weight"]
    rows[[4, 9]] = rows[[9, 4]]


def swap_experts(slot: Slot) -> None:
    experts = slot.targets[DOWN]
    experts[[0, 2]] = experts[[2, 0]]


def swap_neighbours(slot: Slot) -> None:
    """Two float32 of one 8-byte word."""
    experts = slot.targets[DOWN]
    experts[1, 7, 4:6] = experts[1, 7, 4:6].flip(0)


@pytest.mark.parametrize(
    ("slot", "how", "words"),
    [
        # slot 3 is engine 1's TP rank 1, which holds experts 4 to 7; row 65 is its up projection's second
        (3, flip_bit, ["layers.1.mlp.experts.{}.up_proj.weight", "engine 1, TP rank 1", W13]),
        (2, swap_rows, ["layers.2.self_attn.o_proj.weight", "engine 1, TP rank 0"]),
        (1, swap_experts, ["layers.3.mlp.experts.{}.down_proj.weight", "items (4, "]),
        (0, swap_neighbours, ["down_proj.weight"]),
    ],
)
def test_what_is_wrong_is_named(
    opened: Opened, slot: int, how: Callable[[Slot], None], words: list[str]
) -> None:
    """The message has the tensor, the engine and the rank.

    Unverified on a GPU.

    resharding/verify.py: 64-bit sums that wrap, inside a coalescing block. To check first: a flipped bit is found.
    """
    message = errors(opened, slot, how)
    assert [word for word in words if word not in message] == []
    if how is flip_bit and opened.pair.verify == "full":
        assert "items (5, 6), rows (1, 2), columns (3, 4)" in message


def stale(slot: Slot) -> None:
    """The training side has moved on."""
    slot.fill(2)


def test_a_stale_version(opened: Opened) -> None:
    opened.tell("change", stale)
    answers = opened.tell("verify")
    assert all("and" in str(answer) and "VerifyError" in str(answer) for answer in answers)


@pytest.mark.parametrize("verify", ["checksum", "full"])
def test_quantised_weights_and_their_scales(pool: Pool, verify: VerifyMode) -> None:
    opened = start(pool, replace(FP8, verify=verify))
    assert opened.tell("verify") == [None] * 4
    assert "gate_proj.weight_scale_inv" in errors(opened, 2, halve_a_scale)


def halve_a_scale(slot: Slot) -> None:
    slot.targets["model.layers.0.mlp.experts.w13_weight_scale_inv"][3, 0, 1] *= 0.5


def test_an_exchange_that_does_not_verify_fails_for_all(pool: Pool) -> None:
    """The check is part of the exchange: a target that changes behind it is everyone's failure, and can be repaired."""
    opened = start(pool, replace(PAIR, verify="checksum"))
    opened.ask(1, "change", change_behind)
    opened.fill(2)
    answers = opened.try_run(2)
    assert "VerifyError" in str(answers[1]) and "engine 0, TP rank 1" in str(answers[1])
    assert all("member 1 failed in the exchange" in str(answers[slot]) for slot in (0, 2, 3))
    opened.ask(1, "change", leave_alone)
    opened.run(2)


def change_behind(slot: Slot) -> None:
    """Every verification of this slot finds a bit flipped just before."""
    check = slot.member.verify

    def flip_first(targets: Params, ask: PeerCheck = lambda: None) -> None:
        flip_bit(slot)
        check(targets, ask)

    slot.member.verify = flip_first


def leave_alone(slot: Slot) -> None:
    del slot.member.verify


def test_weights_are_odd_and_differ() -> None:
    weights = word_weights(100_000)
    assert bool((weights & 1 == 1).all()) and len(weights.unique()) == 100_000


def test_strips_are_the_copy_in_order(pool: Pool) -> None:
    opened = start(pool, PAIR)
    for copy in opened.ask(0, "streams"):
        for max_bytes in (1, 100, 1_000, 1 << 30):
            strips = list(_strips(copy, max_bytes))
            assert sum(strip.num_bytes for strip in strips) == copy.num_bytes
            assert strips == sorted(strips, key=lambda strip: strip.box)
            assert all(
                s.num_bytes <= max(max_bytes, 4 * (s.box[2][1] - s.box[2][0])) for s in strips
            )
