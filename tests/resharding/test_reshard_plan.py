"""The planner alone, on random layouts and on random boxes: plans of all members are carried out on integers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.model.shape import MlaShape, ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.reshard_plan import MemberPlan, cut, plan_streams
from megarl.resharding.shards import Box, Part, Range, Shard, box_area
from megarl.resharding.traffic import count_traffic
from megarl.resharding.traffic import least_round_bytes as least_of_all
from megarl.types import UserError
from tests.resharding.simulated import World, all_plans, all_streams, into_nodes, round_bytes_of

MOE = ModelShape(4, 6, 8, 2, 2, 300, 8, 2, 32)
MLA = ModelShape(
    4, 6, 8, 8, 2, 200, num_experts=8, experts_per_token=2, moe_ffn_size=32, num_dense_layers=1, ffn_size=64,
    num_shared_experts=1, router_bias=True, num_mtp_layers=1, mla=MlaShape(8, 4, 4, 2, 4),
)  # fmt: skip
DENSE = ModelShape(4, 6, 8, 1, 2, 130, num_dense_layers=4, ffn_size=64, qkv_bias=True, tied=True)
# of so many virtual stages: even and uneven
LAYERS = {1: [(), ()], 2: [(), (1, 3)], 4: [(), (1, 1, 0, 2)]}
MAX_MEMBERS = 16
Sides = tuple[list[Part], list[Part], int]


Layouts = tuple[ModelShape, TrainLayout, EngineLayout]


@st.composite
def layouts(draw: st.DrawFn) -> Layouts:
    """Colocated, split and mixed; with uneven and virtual stages, expert TP, shared key/value heads, DP attention.

    With that also the weights that SGLang then may hold whole, or in each group; with and without a draft model.
    """
    shape = draw(st.sampled_from([MOE, MLA, DENSE]))
    (pp, vpp), tp = (
        draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1)])),
        draw(st.sampled_from([1, 2, 4])),
    )
    ep, etp = (
        draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]))
        if shape.num_experts
        else (1, 1)
    )
    stage = max(tp, ep * etp) * pp
    world = draw(st.sampled_from([stage * dp for dp in (1, 2, 4) if stage * dp <= MAX_MEMBERS]))
    train = TrainLayout(world, tp, pp, ep, 1, vpp, etp, draw(st.sampled_from(LAYERS[pp * vpp])))
    engines = [
        engine
        for count, engine_tp, ep, dp in itertools.product(
            [1, 2, 3, 8], [1, 2, 4], [1, 2, 4], [1, 2]
        )
        for first in {0, 1, world}
        if (engine := EngineLayout(count, engine_tp, ep, dp, first=first)).end
        <= max(MAX_MEMBERS, world + engine_tp)
        and not engine.errors(shape, engine.end)
    ]
    engine = draw(st.sampled_from(engines))
    whole = (
        draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
        if engine.dp > 1
        else (False, False, False)
    )
    can_draft = shape.num_mtp_layers and shape.hidden_size % tp == 0  # as TrainLayout.faults asks
    draft = draw(st.sampled_from([0, 2])) if can_draft else 0
    return (
        shape,
        train,
        replace(
            engine, whole_dense=whole[0], whole_shared=whole[1], group_head=whole[2], draft=draft
        ),
    )


def sides_of(layout: Layouts, transformer_engine: bool = False) -> Sides:
    """Megatron's parts, SGLang's parts and the number of members."""
    shape, train, engine = layout
    sources = megatron_map.parts(shape, train, transformer_engine)
    return sources, sglang_map.parts(shape, engine), max(train.world_size, engine.end)


@st.composite
def of_random_boxes(draw: st.DrawFn) -> Sides:
    """Tensors that both sides cut along grids of their own, with any members as replicas."""
    num_members = draw(st.integers(1, 10))
    sides: tuple[list[Part], list[Part]] = ([], [])
    for number in range(draw(st.integers(1, 3))):
        name, dtype = f"t{number}", draw(st.sampled_from(["", "float32", "float8_e4m3fn"]))
        size = draw(st.integers(1, 4)), draw(st.integers(1, 300)), draw(st.integers(1, 5))
        for side, parts in enumerate(sides):
            for box in draw(grids(size)):
                at = draw(st.tuples(*[st.integers(0, 2)] * 3))
                param = f"p{len(parts)}." + draw(st.sampled_from(["", "{}"]))
                shard = Shard(name, box[1], box[2], param, at, box[0], dtype if side else "")
                members = draw(st.sets(st.integers(0, num_members - 1), min_size=1))
                parts.append(Part((shard,), tuple(sorted(members))))
                # another part with the same box, perhaps on the same members
                if side == 0 and draw(st.booleans()):
                    again = shard._replace(param=param + "again")
                    parts.append(Part((again,), (draw(st.integers(0, num_members - 1)),)))
    targets = draw(st.lists(st.sampled_from(sides[1]), unique=True))
    return sides[0], targets, num_members


@st.composite
def grids(draw: st.DrawFn, size: tuple[int, int, int]) -> list[Box]:
    sides: list[list[Range]] = []
    for length in size:
        inner = (
            draw(st.lists(st.integers(1, length - 1), max_size=2, unique=True))
            if length > 1
            else []
        )
        edges = [0, *sorted(inner), length]
        sides.append(list(itertools.pairwise(edges)))
    return list(itertools.product(*sides))  # pyright: ignore


def check(sides: Sides, gpus_per_node: int, slack: int) -> None:
    """Everything that must hold for any exchange. slack: bytes of a round beyond the fewest possible."""
    sources, targets, num_members = sides
    streams = all_streams(sources, targets, num_members, gpus_per_node)
    assert sum(of_member.digest for of_member in streams) % 2**128 == 0
    least = max(least_round_bytes(of_member) for of_member in streams)
    assert least_of_all(*sides, gpus_per_node=gpus_per_node, dtype="bfloat16") == (
        least if least > 1 else 0
    )
    round_bytes = least + slack
    plans = all_plans(streams, round_bytes)
    check_pairs(plans)
    assert (
        max((round_bytes_of(step) for plan in plans for step in plan.rounds), default=0)
        <= round_bytes
    )
    world = World(sources, targets, num_members)
    world.run(plans)
    world.check()
    check_account(sides, plans, gpus_per_node)


def least_round_bytes(streams) -> int:
    try:
        streams.rounds_needed(1)
    except UserError as error:
        least = int(error.hint.split()[-1])
        with pytest.raises(UserError, match=rf"^reshard\.round_bytes: {least - 1}: the smallest"):
            streams.rounds_needed(least - 1)
        streams.rounds_needed(least)
        return least
    return 1


def check_pairs(plans: Sequence[MemberPlan]) -> None:
    """What a member sends is, in every round and in the same order, what the other expects."""
    assert len({(len(plan.rounds), plan.send_stage_starts) for plan in plans}) == 1
    for steps in zip(*(plan.rounds for plan in plans), strict=True):
        for member, step in enumerate(steps):
            assert [copy.target for copy in step.sends] == sorted(
                copy.target for copy in step.sends
            )
            assert [copy.source for copy in step.receives] == sorted(
                copy.source for copy in step.receives
            )
            for peer, other in enumerate(steps):
                sent = [copy for copy in step.sends if copy.target == peer]
                assert sent == [copy for copy in other.receives if copy.source == member]


def check_account(sides: Sides, plans: Sequence[MemberPlan], gpus_per_node: int) -> None:
    """The traffic is the sum of the plans, and what moves is what has to move."""
    moved = {wire: (Counter(), Counter()) for wire in ("local", "node", "fabric")}
    for plan in plans:
        for copy in itertools.chain(plan.local, *(step.sends for step in plan.rounds)):
            same_node = copy.source // gpus_per_node == copy.target // gpus_per_node
            wire = "local" if copy.source == copy.target else "node" if same_node else "fabric"
            moved[wire][0][copy.source] += copy.num_bytes
            moved[wire][1][copy.target] += copy.num_bytes
    traffic = count_traffic(*sides, gpus_per_node=gpus_per_node, dtype="bfloat16")
    members = range(sides[2])
    for wire, tables in (
        ("local", (traffic.local, traffic.local)),
        ("node", (traffic.node_out, traffic.node_in)),
        ("fabric", (traffic.fabric_out, traffic.fabric_in)),
    ):
        for counted, table in zip(moved[wire], tables, strict=True):
            assert [counted[member] for member in members] == table.tolist(), wire
    assert traffic.dest.tolist() == (traffic.local + traffic.wire_in).tolist()
    assert traffic.wire_in.tolist() == traffic.minimum_wire.tolist()
    assert into_nodes(traffic, gpus_per_node) == traffic.minimum_fabric.tolist()


@settings(max_examples=25)
@given(
    layouts(), st.booleans(), st.sampled_from([2, 4, 8, 16]), st.sampled_from([0, 1_000, 20_000])
)
def test_real_models(
    layout: Layouts, transformer_engine: bool, gpus_per_node: int, slack: int
) -> None:
    check(sides_of(layout, transformer_engine), gpus_per_node, slack)


@settings(max_examples=100)
@given(of_random_boxes(), st.integers(1, 5), st.sampled_from([0, 100, 3_000]))
def test_random_boxes(sides: Sides, gpus_per_node: int, slack: int) -> None:
    check(sides, gpus_per_node, slack)


PIPELINE = (
    megatron_map.parts(MOE, TrainLayout(8, 1, 4, 2)),
    sglang_map.parts(MOE, EngineLayout(2, 4, 1)),
    8,
)


def test_a_change_on_one_side_shows_in_the_digest() -> None:
    """A member with another map, or the same copies in another order, does not agree with the others."""
    sources, targets, num_members = PIPELINE
    streams = all_streams(*PIPELINE, 4)
    assert sum(of_member.digest for of_member in streams) % 2**128 == 0
    for changed in (
        [
            part._replace(shards=tuple(s._replace(param=s.param + "x") for s in part.shards))
            for part in targets
        ],
        [part._replace(shards=part.shards[::-1]) for part in targets],
    ):
        other = plan_streams(sources, changed, 1, num_members, gpus_per_node=4, dtype="bfloat16")
        assert other.digest != streams[1].digest
        assert sum(of_member.digest for of_member in (streams[0], other, *streams[2:])) % 2**128


def test_every_round_carries_every_stage() -> None:
    """Member 8 has no training rank, so it receives from all four stages, in every round about the same."""
    sources = megatron_map.parts(MOE, TrainLayout(4, 1, 4, 1))
    targets = sglang_map.parts(MOE, EngineLayout(1, 1, 1, first=4))
    *_, plan = all_plans(all_streams(sources, targets, 5, 8), 6_000)
    assert len(plan.rounds) > 5
    for step in plan.rounds:
        assert {copy.source for copy in step.receives} == {0, 1, 2, 3}
    for stage in range(4):
        sizes = [
            sum(c.num_bytes for c in step.receives if c.source == stage) for step in plan.rounds
        ]
        assert max(sizes) - min(sizes) <= 2 * 32 * 2  # a row more or less, of 32 elements at most


def test_send_stages_carry_every_stage_too() -> None:
    """Two nodes: what stage 0 sends in a send stage is about a quarter of what it sends at all."""
    sources = megatron_map.parts(MOE, TrainLayout(4, 1, 4, 1))
    streams = all_streams(sources, sglang_map.parts(MOE, EngineLayout(2, 2, 1, first=4)), 8, 4)[0]
    sizes = [
        sum(c.num_bytes for stream in send_stage.values() for c in stream)
        for send_stage in streams.send_stages
    ]
    assert len(sizes) == 5
    assert sizes[-1] == 0
    assert min(sizes[:-1]) > 0


def test_float8_is_cut_between_tiles_only() -> None:
    target = Shard("t", (0, 300), (0, 4), "w", items=(0, 3), dtype="float8_e4m3fn")
    sources = [Part((target._replace(param="t{}", dtype=""),), (0,))]
    streams = all_streams(sources, [Part((target,), (1,))], 2, 2)[0]
    (stream,) = streams.send_stages[0].values()
    pieces = [copy for _, copy in cut(stream, 7)]
    assert len(pieces) > 3
    assert all(
        row % 128 == 0 and (end % 128 == 0 or end == 300)
        for copy in pieces
        for row, end in [copy.box[1]]
    )
    assert sum(box_area(copy.box) for copy in pieces) == target.area
    # 450 bytes a round, and up to a row of tiles (512) more
    assert streams.rounds_needed(2 * 128 * 4) == (8,)
    with pytest.raises(UserError, match=r"raise it to at least 1024$"):
        streams.rounds_needed(2 * 128 * 4 - 1)


def test_in_and_out_share_the_round() -> None:
    """A member that sends 1,000 bytes and receives 1,000 needs as many rounds as one that receives 2,000."""
    shard = Shard("a", (0, 500), (0, 1), "a")
    other = shard._replace(name="b")
    sources = [Part((shard,), (0,)), Part((other,), (1,))]
    targets = [Part((shard,), (1,)), Part((other,), (0,))]
    streams = all_streams(sources, targets, 2, 2)
    assert streams[0].rounds_needed(100) == (21,)  # a row of 2 bytes more each way
    assert streams[0].rounds_needed(10_000) == (1,)


def test_nothing_to_move_needs_no_round() -> None:
    whole = [Part((Shard("t", (0, 4), (0, 4), "p"),), (0, 1))]
    streams = all_streams(whole, whole, 2, 1)
    plans = all_plans(streams, 1)
    assert [len(plan.local) for plan in plans] == [1, 1]
    assert not any(plan.rounds for plan in plans)
