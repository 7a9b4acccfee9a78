"""Copies of weights from engines into another one: what each source sends, and that nobody hangs or is harmed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.device import Address, address_of, host_store
from megarl.model.precision import FP8_TILES
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import peer_copy, sglang_map
from megarl.resharding.peer_copy import (
    ALIGN_BYTES,
    TARGET,
    ByteRange,
    CopyMember,
    PeerCopy,
    abandon,
    await_target,
    conclude,
    copy_messages,
    rounds,
    shares,
)
from tests.resharding.worlds import (
    FP8_MOE,
    MLA,
    MOE,
    TIMEOUT_S,
    FailingGroup,
    Process,
    fill,
    make_params,
    wrong_params,
)

SOON_S = TIMEOUT_S / 4
MANY = 12  # sends before a member fails, far from the last
COPY = PeerCopy(
    meet=Address("127.0.0.1", 1), run_id="run", attempt=1, version=7, target=3, sources=(0, 2),
    layout=EngineLayout(1, 1, 1), verify="checksum", round_bytes=16_000, timeout_s=TIMEOUT_S,
)  # fmt: skip
byte_counts = st.lists(st.integers(0, 5_000), min_size=1, max_size=12)


@given(byte_counts, st.integers(1, 6))
def test_every_byte_is_sent_once_and_sources_send_equally_much(
    counts: list[int], num_sources: int
) -> None:
    sizes = {f"p{index}": count for index, count in enumerate(counts)}
    shared = shares(sizes, num_sources)
    sums = [sum(at.stop - at.start for at in ranges) for ranges in shared]
    assert sum(sums) == sum(counts)
    assert max(sums) - min(sums) <= 2 * ALIGN_BYTES
    together = [at for ranges in shared for at in ranges]
    assert all(at.start < at.stop and at.start % ALIGN_BYTES == 0 for at in together)
    for param, count in sizes.items():
        places = [at for at in together if at.param == param]
        assert [0, *(at.stop for at in places)][: len(places)] == [at.start for at in places]
        assert not count or places[-1].stop == count


@given(byte_counts, st.integers(1, 4_000))
def test_rounds_are_the_ranges_in_order_and_bounded(counts: list[int], round_bytes: int) -> None:
    (ranges,) = shares({f"p{index}": count for index, count in enumerate(counts)}, 1)
    cut = rounds(ranges, round_bytes)
    assert all(
        0 < sum(at.stop - at.start for at in step) <= max(round_bytes, ALIGN_BYTES) for step in cut
    )
    pieces = [at for step in cut for at in step]
    merged: list[ByteRange] = []
    for piece in pieces:
        if merged and merged[-1].param == piece.param:
            assert merged.pop() == ByteRange(piece.param, 0, piece.start)
            piece = ByteRange(piece.param, 0, piece.stop)
        merged.append(piece)
    assert merged == ranges
    assert all(piece.start % ALIGN_BYTES == 0 for piece in pieces)
    # no more messages than the parameters and the bound ask for
    padded = sum(-(-count // ALIGN_BYTES) * ALIGN_BYTES for count in counts)
    assert len(cut) <= 2 + 2 * padded // max(ALIGN_BYTES, round_bytes)


def test_the_messages_are_json_and_name_each_engines_part() -> None:
    sources, target = copy_messages(replace(COPY, layout=EngineLayout(1, 4, 2, draft=1)))
    assert {engine: message["member"] for engine, message in sources.items()} == {0: 1, 2: 2}
    assert target["models"] == 2
    for message in (*sources.values(), target):
        read = PeerCopy.from_json(json.loads(json.dumps(message))["copy"])
        assert read == replace(COPY, layout=EngineLayout(1, 4, 2, draft=1))
        assert read.engines == (3, 0, 2)


def test_members_with_other_weights_are_named() -> None:
    names = ["engine 3", "engine 0"]
    vote: dict[str, Any] = {"version": 7, "params": {"a": "torch.float32 [2]", "b": "x"}}
    assert conclude(names, [vote, vote]) == {}
    with pytest.raises(RuntimeError, match="^copy: engine 0 has version 6 of the weights, not 7$"):
        conclude(names, [vote, {**vote, "version": 6}])
    with pytest.raises(RuntimeError, match="^copy: b is missing in engine 0 and x in engine 3$"):
        conclude(names, [vote, {**vote, "params": {"a": "torch.float32 [2]"}}])


class FailingEnd(FailingGroup):
    """Of a target too, which receives."""

    def recv(self, *arguments: Any) -> Any:
        self.count()
        return self._group.recv(*arguments)


class Rank:
    """A rank of an engine in a process of its own."""

    def __init__(self, shape: ModelShape, layout: EngineLayout, tp_rank: int) -> None:
        self.tp_rank = tp_rank
        self.shards = sglang_map.shards(shape, layout, tp_rank)
        self.params = make_params(self.shards, torch.bfloat16)
        self.patches: list[Any] = []

    def fill(self, version: int) -> None:
        fill(self.params, self.shards, version, torch.bfloat16)

    def wrong(self, version: int) -> list[str]:
        """The parameters that are not those of a version."""
        expected = make_params(self.shards, torch.bfloat16)
        return wrong_params(self.params, expected, self.shards, version, torch.bfloat16)

    def run(self, content: Any, member: int, version: int, error: Exception | None = None) -> None:
        copy = PeerCopy.from_json(json.loads(content))
        CopyMember(copy, member, self.tp_rank).run(self.params, version, error)

    def fail_after(self, sends: int, kill: bool) -> None:
        """In the next copy."""
        original = peer_copy.make_group

        def failing(*arguments: Any) -> Any:
            return FailingEnd(original(*arguments), sends, kill)

        self.patches.append(patch.object(peer_copy, "make_group", failing))
        self.patches[-1].start()

    def damage(self, param: str) -> None:
        """A byte of a parameter, whenever bytes have come."""
        original = CopyMember._exchange

        def damaging(member: CopyMember, *arguments: Any) -> None:
            original(member, *arguments)
            self.params[param].view(torch.uint8).flatten()[5] ^= 1

        self.patches.append(patch.object(CopyMember, "_exchange", damaging))
        self.patches[-1].start()

    def transpose(self, param: str) -> None:
        self.params[param] = self.params[param].t()


def rank_process(pipe: Connection, shape: ModelShape, layout: EngineLayout, tp_rank: int) -> None:
    """Answers (name of a method of Rank, its arguments...) until told None."""
    rank = Rank(shape, layout, tp_rank)
    for order, *arguments in iter(pipe.recv, None):
        try:
            pipe.send(getattr(rank, order)(*arguments))
        except Exception as error:
            pipe.send(error)


class World:
    """The ranks of a target and its sources: ranks[member][tp_rank]. Sources have version 7, the target version 1."""

    def __init__(self, copy: PeerCopy, shape: ModelShape) -> None:
        self.store = host_store(TIMEOUT_S)
        self.copy = replace(copy, meet=address_of(self.store))
        self.ranks = [
            [Process(rank_process, shape, copy.layout, rank) for rank in range(copy.layout.tp)]
            for _ in copy.engines
        ]
        for member, ranks in enumerate(self.ranks):
            for rank in ranks:
                rank.ask(("fill", 1 if member == TARGET else copy.version))

    def begin(self, members: Sequence[int] | None = None, **changes: Any) -> None:
        """Start a new copy on these members, by default on all."""
        self.copy = replace(self.copy, attempt=self.copy.attempt + 1, **changes)
        content = json.dumps(asdict(self.copy))
        for member in range(len(self.ranks)) if members is None else members:
            for rank in self.ranks[member]:
                rank.send(("run", content, member, self.copy.version))

    def end_of(self, member: int) -> str:
        """How a copy has ended for the first rank of a member: its error, or ""."""
        try:
            self.ranks[member][0].answer()
        except RuntimeError as error:
            return str(error)
        return ""

    def settle(self) -> None:
        for ranks in self.ranks:
            for rank in ranks:
                rank.answer()

    def wrong(self, version: int) -> list[str]:
        """The parameters of all ranks that are not those of a version."""
        return [
            name for ranks in self.ranks for rank in ranks for name in rank.ask(("wrong", version))
        ]


@contextmanager
def world(copy: PeerCopy = COPY, shape: ModelShape = MOE) -> Iterator[World]:
    members = World(copy, shape)
    try:
        yield members
    finally:
        for ranks in members.ranks:
            for rank in ranks:
                rank.end()


CASES = {
    "one source, unverified": (replace(COPY, sources=(0,), verify="off"), MOE),
    "two sources of two ranks with a draft model": (
        replace(COPY, layout=EngineLayout(1, 2, 2, draft=1)),
        MLA,
    ),
    "three sources in fp8": (
        replace(
            COPY,
            sources=(0, 1, 2),
            layout=EngineLayout(1, 1, 1, precision=FP8_TILES),
            verify="full",
        ),
        FP8_MOE,
    ),
}


@pytest.mark.parametrize(("copy", "shape"), CASES.values(), ids=CASES)
def test_the_target_has_the_sources_weights(copy: PeerCopy, shape: ModelShape) -> None:
    with world(copy, shape) as members:
        assert members.ranks[TARGET][0].ask(("wrong", copy.version))
        members.begin()
        members.settle()
        assert members.wrong(copy.version) == []
        # the tables of parameters, of which a large model has thousands
        votes = [f"copy/run/{members.copy.attempt}/0/ready/{member}" for member in range(2)]
        assert [members.store.check([vote]) for vote in votes] == [False, False]


@pytest.mark.parametrize("verify", ["checksum", "full"])
def test_a_wrong_byte_is_named_to_all(verify: str) -> None:
    param = "model.layers.1.self_attn.o_proj.weight"
    with world() as members:
        members.ranks[TARGET][0].ask(("damage", param))
        members.begin(verify=verify)
        words = (
            f"{param}: bytes 0 to .* of engine 3, TP rank 0 are not what engine 0, TP rank 0 has"
        )
        with pytest.raises(RuntimeError, match=f"^{words}$"):
            members.ranks[TARGET][0].answer()
        for source in (1, 2):
            with pytest.raises(
                RuntimeError, match=f"^copy: engine 3, TP rank 0 failed in the copy: {words}$"
            ):
                members.ranks[source][0].answer()


def test_a_member_that_cannot_take_part_ends_all_with_its_words() -> None:
    with world() as members:
        param = "model.layers.0.self_attn.o_proj.weight"
        members.ranks[2][0].ask(("transpose", param))
        started = time.perf_counter()
        members.begin()
        words = f"{param}: the parameter is not contiguous in memory"
        assert members.end_of(2) == words
        expected = f"copy: engine 2, TP rank 0 cannot take part: {words}"
        assert [members.end_of(member) for member in (TARGET, 1)] == [expected] * 2
        assert time.perf_counter() - started < SOON_S
        members.ranks[2][0].ask(("transpose", param))
        members.begin()
        members.settle()
        assert members.wrong(7) == []


@pytest.mark.parametrize("member", [TARGET, 1])
@pytest.mark.parametrize("kill", [False, True], ids=["raises", "is killed"])
def test_a_member_that_fails_in_the_middle_ends_the_others(member: int, kill: bool) -> None:
    """And the next copy, with the members that are left, writes everything."""
    with world() as members:
        members.ranks[member][0].ask(("fail_after", MANY, kill))
        started = time.perf_counter()
        members.begin(round_bytes=64)
        if kill:
            members.ranks[member][0].process.join(TIMEOUT_S)
        else:
            assert members.end_of(member) == "the cable is broken"
        others = [other for other in range(3) if other != member]
        if kill and member == TARGET:
            # gloo may have forgotten a send: whoever sees the death tells them
            abandon(members.copy, members.copy.target, "its process was killed")
        ends = [members.end_of(other) for other in others]
        assert all(ends), ends
        assert time.perf_counter() - started < SOON_S
        if not kill:
            assert (
                ends
                == [
                    f"copy: engine {members.copy.engines[member]}, TP rank 0 failed in the copy: "
                    "the cable is broken"
                ]
                * 2
            )
        if member == TARGET:
            return
        assert members.ranks[TARGET][0].ask(("wrong", 7)), "it failed before it was whole"
        if kill:
            members.ranks[member][0].end()
            del members.ranks[member]
            members.copy = replace(members.copy, sources=(2,))
            members.begin(round_bytes=16_000)
            members.settle()
        assert members.ranks[-1][0].ask(("wrong", 7)) == []
        assert not kill or members.wrong(7) == []


def test_whoever_sees_a_death_frees_the_members_that_wait_for_it() -> None:
    with world() as members:
        started = time.perf_counter()
        members.begin(members=[TARGET, 1])
        await_target(members.copy)
        abandon(members.copy, 2, "its node is gone")
        words = "copy: engine 2, TP rank 0 has left: its node is gone"
        assert [members.end_of(member) for member in (TARGET, 1)] == [words] * 2
        with pytest.raises(RuntimeError, match=f"^{words}$"):
            await_target(members.copy)
        assert time.perf_counter() - started < SOON_S


def test_a_target_that_does_not_come_is_named() -> None:
    store = host_store(TIMEOUT_S)
    copy = replace(COPY, meet=address_of(store), timeout_s=0.2)
    with pytest.raises(
        RuntimeError, match=r"^copy: engine 3, TP rank 0 did not come within 0.2 s$"
    ):
        await_target(copy)
    abandon(copy, copy.target, "it did not start")
    with pytest.raises(RuntimeError, match="engine 3, TP rank 0 has left: it did not start"):
        await_target(copy)
