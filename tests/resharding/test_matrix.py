"""Every kind of training layout into every kind of engine layout, bit for bit, over real process groups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from megarl.model.lora_pairs import LoraSize
from megarl.model.precision import FP8_TILES, Precision
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.expert_places import numbered
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.execute import DIRECT_BYTES, messages
from megarl.resharding.reshard_plan import Copy
from megarl.resharding.routes import item_bytes
from megarl.resharding.shards import Box
from megarl.resharding.verify import MODES
from tests.resharding.worlds import DENSE, FP8_MLA, MLA, MOE, TIMEOUT_S, Pair, Pool, Slot

TWO_KV_HEADS = replace(MOE, num_kv_heads=2)
FEW_WORDS = replace(MOE, vocab_size=130)  # the last training ranks hold padding alone
LARGE = ModelShape(2, 256, 8, 4, 32, 500, 4, 2, 512)  # pieces that go without being packed
TIED = replace(DENSE, tied=True)


def train(world_size: int, tp: int = 1, pp: int = 1, ep: int = 1, **more: Any) -> TrainLayout:
    return TrainLayout(world_size, tp, pp, ep, **more)


def engine(count: int, tp: int = 1, ep: int = 1, **more: Any) -> EngineLayout:
    return EngineLayout(count, tp, ep, **more)


FP8_MTP = replace(FP8_MLA, num_mtp_layers=1, moe_ffn_size=512, ffn_size=512)
LORA = LoraSize(3, 2, 6.0, ())
IN_SLOTS = replace(LORA, sync="adapters")
MIXED = Precision("fp8", plain_last_layers=1, plain=("kv_b_proj", "shared_experts"))
BF16: dict[str, Any] = {"dtype": "bfloat16"}
# Each kind of wire, message, type and payload, with layouts that make them; test_reshard_plan.py carries out plans of
# all kinds of layouts, and the executor only does what a plan says.
PAIRS = {
    "one rank": Pair(MOE, train(1), engine(1)),
    "TP2 PP2 EP2 DP2 to two TP4 on two nodes": Pair(MOE, train(8, 2, 2, 2), engine(2, 4), gpus_per_node=4),
    "uneven PP3 to three engines": Pair(MOE, train(3, pp=3, stage_layers=(1, 2, 1)), engine(3), **BF16),
    "TP4 EP2 ETP2 to TP4 EP4": Pair(MOE, train(4, tp=4, ep=2, expert_tp=2), engine(1, 4, 4)),
    "TP2 CP2 EP2 to TP8 with copied kv heads": Pair(MOE, train(8, 2, ep=2, cp=2), engine(1, 8), round_bytes=64_000),
    "16 ranks to four TP4 EP4 on four nodes": Pair(
        MOE, train(16, 2, 2, 4), engine(4, 4, 4), gpus_per_node=4, round_bytes=64_000
    ),
    "16 ranks with CP2 VPP2 to two TP8 on two nodes": Pair(
        MOE, train(16, 2, 2, 2, cp=2, vpp=2), engine(2, 8, 8), gpus_per_node=8, round_bytes=64_000, **BF16
    ),
    "nodes that no engine fills": Pair(MOE, train(6, pp=2, ep=1), engine(2, 2), gpus_per_node=3),
    "DP attention with EP4 on two nodes": Pair(
        MOE, train(8, 2, 2, 2), engine(2, 4, 4, dp=4), gpus_per_node=4, round_bytes=64_000
    ),
    "engines on nodes of their own": Pair(MOE, train(8, 2, 2, 2), engine(2, 4, first=8), gpus_per_node=4),
    "an engine over the end of the training ranks": Pair(MOE, train(2, pp=2), engine(1, 4, 2, first=1)),
    "more engine slots than training ranks": Pair(MOE, train(2, tp=2, ep=2), engine(2, 2, 2), gpus_per_node=2),
    "one large round": Pair(MOE, train(4, 2, 2, 2), engine(1, 4), round_bytes=1 << 29, **BF16),
    "large tensors, TransformerEngine's names, to EP4": Pair(
        LARGE, train(4, 2, 2, 2), engine(1, 4, 4), transformer_engine=True, round_bytes=1 << 20, **BF16
    ),
    "padding ranks": Pair(FEW_WORDS, train(4, tp=4, ep=4), engine(1, 4)),
    "tied PP2": Pair(TIED, train(4, tp=2, pp=2), engine(2, 2)),
    "MLA on two nodes, TransformerEngine's names": Pair(
        MLA, train(16, 2, 2, 4), engine(2, 8, 4), transformer_engine=True, gpus_per_node=8, round_bytes=64_000
    ),
    "MLA PP2 VPP2 to DP attention with drafts, two nodes": Pair(
        MLA, train(4, 1, 2, 2, vpp=2), engine(2, 4, 4, dp=4, whole_shared=True, draft=3), gpus_per_node=4, **BF16
    ),
    "fp8 MLA with drafts, and plain weights among them": Pair(
        FP8_MTP, train(4, 2, 2, 2), engine(1, 4, 4, dp=4, precision=MIXED, draft=1), round_bytes=1 << 20, **BF16
    ),
    "fp8 MLA beside the training ranks": Pair(
        FP8_MLA, train(2, pp=2), engine(1, 2, 1, precision=FP8_TILES, first=2), round_bytes=1 << 20, gpus_per_node=2,
        **BF16
    ),
    "adapters of TP4 over two kv heads to TP2": Pair(
        TWO_KV_HEADS, train(4, tp=4, ep=2, expert_tp=2), engine(1, 2), lora=LORA, round_bytes=32_000
    ),
    "adapters of MLA, TP2 PP2 EP2 to TP2 EP2": Pair(MLA, train(4, 2, 2, 2), engine(2, 2, 2), lora=LORA),
    "adapters of some layers, large tensors": Pair(
        LARGE, train(4, 2, 2, 2), engine(1, 4), round_bytes=1 << 20, lora=replace(LORA, targets=("k_proj", "up_proj"))
    ),
    "frozen weights under adapters": Pair(MLA, train(4, 2, 2, 2), engine(2, 2, 2), lora=IN_SLOTS),
    "slots of TP2 PP2 to TP4 over two kv heads": Pair(
        TWO_KV_HEADS, train(4, tp=2, pp=2), engine(1, 4), payload="factors",
        lora=replace(IN_SLOTS, rank=2, expert_rank=3)
    ),
    "slots of MLA to DP attention beside the training ranks": Pair(
        MLA, train(4, pp=2, ep=2, vpp=2), engine(1, 4, 4, dp=4, first=4), lora=IN_SLOTS, payload="factors",
        gpus_per_node=4
    ),
    "slots of some layers, large tensors": Pair(
        LARGE, train(4, 2, 2, 2), engine(1, 4), round_bytes=1 << 20, payload="factors",
        lora=replace(IN_SLOTS, targets=("k_proj", "up_proj"))
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(16)
    yield processes
    processes.end()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "pair"), list(enumerate(PAIRS.values())), ids=PAIRS)
def test_every_bit_arrives(pool: Pool, number: int, pair: Pair) -> None:
    opened = pool.open(replace(pair, verify=MODES[number % len(MODES)]))
    opened.fill(1)
    stats = opened.run(1)
    targets = [shard for slot in opened.slots for shard in pair.target_shards(slot)]
    wanted_bytes = sum(shard.area * item_bytes(shard.dtype or pair.dtype) for shard in targets)
    # each byte once, those of forwards included
    assert stats.wire_bytes + stats.local_bytes == wanted_bytes
    assert stats.extra_bytes < 3 * pair.round_bytes
    num_keys = pool.store.num_keys()
    opened.fill(2)
    again = opened.run(2)
    # A long run does not fill the store; the first exchange alone has a group to make, to which all agree by keys.
    assert pool.store.num_keys() == num_keys - (pair.num_members + 2)
    assert again.kept_share == pytest.approx(stats.kept_share)
    of_run = {"plan_s": 0, "seconds": 0, "kept_share": None}
    assert replace(again, **of_run) == replace(stats, **of_run)
    assert again.plan_s == 0 or pair.engine.fp8  # the plan was kept


@pytest.mark.slow
def test_what_is_rounded_by_chance_is_what_is_verified(pool: Pool) -> None:
    """In each version anew, by an executor that was made for the first."""
    size = replace(LORA, alpha=5.0, rounding="stochastic")
    opened = pool.open(
        Pair(MLA, train(4, 2, 2, 2), engine(2, 2, 2), lora=size, verify="full", **BF16)
    )
    for version in (1, 2, 3):
        opened.fill(version)
        assert [answer for answer in opened.try_run(version) if isinstance(answer, Exception)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True], ids=["an error", "a death"])
@pytest.mark.parametrize("sends", [0, 3])
def test_the_attempt_after_a_failure_repairs_all(pool: Pool, sends: int, kill: bool) -> None:
    """Member 1 fails in the middle of an exchange: all hear it long before the timeout, and nobody reports success."""
    opened = pool.open(Pair(MOE, train(4, 2, 2, 2), engine(2, 2), gpus_per_node=2))
    opened.fill(1)
    opened.run(1)
    opened.fill(2)
    opened.ask(1, "sabotage", sends, kill)
    started = time.perf_counter()
    answers = opened.try_run(2)
    assert time.perf_counter() - started < TIMEOUT_S / 4
    assert isinstance(answers[1], EOFError if kill else RuntimeError)
    assert all(isinstance(answers[slot], RuntimeError) for slot in (0, 2, 3))
    if kill:
        pool.revive(1)
        opened.open_slot(1)
        pool.slots[1].answer()
        opened.fill(2)
    else:
        message = "member 1 failed in the exchange: the cable is broken"
        assert "the cable is broken" in str(answers[1]) and all(
            message in str(answers[slot]) for slot in (0, 2, 3)
        )
    opened.run(2)
    opened.fill(3)
    opened.run(3)


def move(slot: Slot) -> None:
    """As an engine that binds its parameters anew."""
    slot.targets = {name: param.clone() for name, param in slot.targets.items()}


@pytest.mark.slow
def test_parameters_may_move_between_exchanges(pool: Pool) -> None:
    opened = pool.open(Pair(MOE, train(2, pp=2), engine(1, 2)))
    opened.fill(1)
    opened.run(1)
    opened.tell("change", move)
    opened.fill(2)
    opened.run(2)


def test_large_pieces_go_alone_and_small_ones_together() -> None:
    """DIRECT_BYTES decides, of an item first, then of the copy; in a packed message wide elements come first."""
    large = copy("a", ((2, 5), (0, 64), (0, DIRECT_BYTES // 256)), "float32")
    flat = copy("b", ((0, 4), (0, 8), (0, DIRECT_BYTES // 128)), "float32")
    small = [
        copy("c", ((0, 1), (0, 3), (0, 1)), "float8_e4m3fn"),
        copy("d", ((0, 1), (0, 3), (0, 1)), "float32"),
    ]
    contents = [
        [(piece.copy.name, piece.first, piece.number) for piece in message]
        for message in messages([*small, large, flat])
    ]
    assert contents == [
        [("a", 0, 1)],
        [("a", 1, 1)],
        [("a", 2, 1)],
        [("b", 0, 4)],
        [("d", 0, 1), ("c", 0, 1)],
    ]


def copy(name: str, box: Box, dtype: str) -> Copy:
    return Copy(name, box, dtype, 0, "source", (0, 0, 0), False, 1, "target", (0, 0, 0))


PLACED = {
    "TP2 PP2 EP2 to two TP4 EP2 on two nodes": Pair(
        MOE, train(8, 2, 2, 2), engine(2, 4, 2), gpus_per_node=4, round_bytes=64_000, verify="full"
    ),
    "MLA with a dense layer and drafts": Pair(
        MLA, train(4, 1, 2, 2), engine(1, 4, 4, dp=4, draft=1), verify="checksum", **BF16
    ),
    "fp8": Pair(
        FP8_MLA, train(2, pp=2), engine(1, 2, 2, precision=FP8_TILES), round_bytes=1 << 20, verify="full", **BF16
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pair", PLACED.values(), ids=PLACED)
def test_experts_get_new_places_from_exchange_to_exchange(pool: Pool, pair: Pair) -> None:
    """Every slot has the expert of its place, bit for bit; members that disagree about places exchange nothing."""
    opened = pool.open(pair)
    shape, random = pair.shape, Random(0)
    num_layers, num_experts = shape.num_sparse_layers, shape.num_experts
    shuffled = [
        tuple(tuple(random.sample(range(num_experts), num_experts)) for _ in range(num_layers))
        for _ in range(2)
    ]
    in_turn = [numbered(num_layers, num_experts), shuffled[0], shuffled[0], shuffled[1], None]
    for attempt, places in enumerate(in_turn, start=1):
        opened.fill(attempt)
        assert opened.tell("run_placed", attempt, attempt, places) == [[]] * len(opened.slots)
    for slot in opened.slots:
        opened.pool.slots[slot].send(("run_placed", 6, 6, shuffled[0] if slot else shuffled[1]))
    for slot in opened.slots:
        with pytest.raises(RuntimeError, match="places|do not match"):
            opened.pool.slots[slot].answer()
