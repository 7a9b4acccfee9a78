"""The planner alone, on random layouts: no process group, no tensors."""

from __future__ import annotations

import itertools
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.plan import choose_sources, plan_copies
from megarl.resharding.shards import LayoutError, Shard
from megarl.resharding.tensors import model_tensors
from megarl.types import ModelShape, UserFault

SIZES = [1, 2, 4]
POWERS = st.sampled_from(SIZES)
SENDS, RECEIVES = attrgetter("sends"), attrgetter("receives")
LAYOUTS = list(itertools.product(SIZES, [1, 2], [1, 2, 3], SIZES, [1, 2, 3], SIZES, SIZES))


def tables(shape: ModelShape, train: TrainLayout, engine: EngineLayout) -> tuple[list[list[Shard]], list[list[Shard]]]:
    sources = [megatron_map.shards(shape, train, rank) for rank in range(train.world_size)]
    members = [engine.member(slot) for slot in range(train.world_size)]
    return sources, [sglang_map.shards(shape, engine, at[1]) if at else [] for at in members]


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[ModelShape, TrainLayout, EngineLayout]:
    kv_heads = draw(POWERS)
    shape = ModelShape(
        num_layers=2,
        hidden_size=draw(st.sampled_from([4, 6])),
        num_heads=kv_heads * draw(POWERS),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        vocab_size=draw(st.integers(5, 300)),
        num_experts=4,
        experts_per_token=2,
        moe_ffn_size=draw(st.sampled_from([32, 64])),
    )
    valid = [
        (train, engine)
        for tp, pp, dp, ep, count, engine_tp, engine_ep in LAYOUTS
        if not (train := TrainLayout(tp * pp * dp, tp, pp, ep)).faults(shape)
        and not (engine := EngineLayout(count, engine_tp, engine_ep)).faults(shape, train.world_size)
    ]
    return shape, *draw(st.sampled_from(valid))


@settings(max_examples=60, deadline=None)
@given(exchanges())
def test_every_target_element_is_written_once_from_the_right_element(exchange) -> None:
    """Unfold the copies cell by cell; the expectation comes from the shards, not from the planner."""
    shape, train, engine = exchange
    sources, targets = tables(shape, train, engine)
    held = [contents(shards) for shards in sources]
    written: list[dict[tuple[str, int, int], tuple[str, int, int]]] = [{} for _ in targets]
    over_the_wire = 0
    for choice in choose_sources(sources, targets):
        copy = choice.copy()
        over_the_wire += copy.area if copy.source != copy.target else 0
        for row, col in itertools.product(range(copy.num_rows), range(copy.num_cols)):
            cell = (copy.target_param, copy.target_at[0] + row, copy.target_at[1] + col)
            assert cell not in written[copy.target]
            value = held[copy.source][copy.source_param, copy.source_at[0] + row, copy.source_at[1] + col]
            written[copy.target][cell] = value
    expected = [contents(shards) for shards in targets]
    assert written == expected
    at_home = [set(cells.values()) for cells in held]  # only what the own slot lacks may cross the wire
    assert over_the_wire == sum(v not in at_home[m] for m, cells in enumerate(expected) for v in cells.values())


def contents(shards: list[Shard]) -> dict[tuple[str, int, int], tuple[str, int, int]]:
    """(param, row, col) -> (logical tensor, row, col) of every cell that the shards fill."""
    found = {}
    for shard in shards:
        for row, col in itertools.product(range(shard.num_rows), range(shard.num_cols)):
            key = (shard.param, shard.at[0] + row, shard.at[1] + col)
            assert key not in found
            found[key] = (shard.name, shard.rows[0] + row, shard.cols[0] + col)
    return found


@settings(max_examples=60, deadline=None)
@given(exchanges(), st.integers(1_600, 20_000))
def test_members_agree_and_rounds_are_bounded(exchange, round_elements: int) -> None:
    """1,600 elements have room for a row (of 64 at most) to each of 24 members."""
    shape, train, engine = exchange
    sources, targets = tables(shape, train, engine)
    plans = [plan_copies(sources, targets, member, round_elements) for member in range(train.world_size)]
    assert len({plan.digest for plan in plans}) == 1
    assert len({len(plan.rounds) for plan in plans}) == 1
    for parts in zip(*(plan.rounds for plan in plans), strict=True):
        for member, part in enumerate(parts):
            assert sum(c.area for c in part.sends) <= round_elements
            assert sum(c.area for c in part.receives) <= round_elements
            assert [c.target for c in part.sends] == sorted(c.target for c in part.sends)
            for peer, other in enumerate(parts):
                sent = [c for c in part.sends if c.target == peer]
                assert sent == [c for c in other.receives if c.source == member]
    moved = sum(c.area for plan in plans for c in plan.local)
    moved += sum(c.area for plan in plans for r in plan.rounds for c in r.receives)
    assert moved == sum(shard.area for shards in targets for shard in shards)
    loads = [sum(c.area for r in plan.rounds for c in part(r)) for plan in plans for part in (SENDS, RECEIVES)]
    assert len(plans[0].rounds) <= -(-max(loads) // (round_elements - 24 * 64)) if any(loads) else not plans[0].rounds


TINY = ModelShape(4, 64, 8, 4, 16, 1000, 8, 2, 64)


def test_every_round_carries_every_stage() -> None:
    sources, targets = tables(TINY, TrainLayout(4, 1, 4, 1), EngineLayout(1, 1, 1))
    plan = plan_copies(sources, targets, 0, 30_000)
    assert len(plan.rounds) > 5
    sizes = [sum(copy.area for copy in part.receives) for part in plan.rounds]
    assert max(sizes) - min(sizes) <= 2 * 3 * 128  # up to a row more or less from each of three sources
    for part in plan.rounds:
        assert {copy.source for copy in part.receives} == {1, 2, 3}


def test_rows_that_are_not_cut_leave_the_round_in_bounds() -> None:
    """189 elements fit into two rounds of 95, but not in whole rows of 7 from each of three sources."""
    whole = [[Shard(f"t{member}", (0, 9), (0, 7), "p", (0, 0))] for member in range(3)]
    wanted = [Shard(f"t{member}", (0, 9), (0, 7), f"p{member}", (0, 0)) for member in range(3)]
    plan = plan_copies([*whole, []], [[], [], [], wanted], 3, 95)
    assert len(plan.rounds) == 3
    assert max(sum(copy.area for copy in part.receives) for part in plan.rounds) <= 95


def test_replicas_share_the_sending() -> None:
    """Two data-parallel ranks hold everything; engines on slots 2 and 3 (of four) must not both ask the same one."""
    whole = [Shard(f"t{i}", (0, 10), (0, 10), f"t{i}", (0, 0)) for i in range(8)]
    sent = [choice.source for choice in choose_sources([whole, whole, [], []], [[], [], whole, whole])]
    assert sent.count(0) == sent.count(1) == 8


def test_own_slot_first() -> None:
    sources, targets = tables(TINY, TrainLayout(2, 1, 1, 1), EngineLayout(2, 1, 1))
    plan = plan_copies(sources, targets, 1, 10_000)
    assert not plan.rounds
    assert {c.name for c in plan.local} == set(model_tensors(TINY))


def test_missing_source_is_named() -> None:
    sources, targets = tables(TINY, TrainLayout(2, 2, 1, 1), EngineLayout(1, 2, 1))
    broken = [[s for s in shards if s.name != "model.layers.1.mlp.experts.3.up_proj.weight"] for shards in sources]
    with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.experts\.3\.up_proj\.weight: 0 of"):
        plan_copies(broken, targets, 0, 10**6)


def test_overlapping_sources_are_refused() -> None:
    a, b = Shard("t", (0, 6), (0, 4), "p", (0, 0)), Shard("t", (5, 9), (0, 4), "p", (0, 0))
    with pytest.raises(LayoutError, match="t: source shards overlap"):
        list(choose_sources([[a], [b]], [[], []]))


def test_round_smaller_than_a_row_is_the_users_fault() -> None:
    sources, targets = tables(TINY, TrainLayout(2, 2, 1, 1), EngineLayout(1, 1, 1))
    with pytest.raises(UserFault, match=r"reshard\.round_bytes"):
        plan_copies(sources, targets, 0, 64)
