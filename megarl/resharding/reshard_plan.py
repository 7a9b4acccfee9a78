"""The resharding plan: which member sends which box of which tensor to which member, and in which round.

Integers only; every member computes the same plan without communication.
A member is one GPU slot; it may hold source shards (its training rank) and target shards (its engine rank).
- Flows: the shards of a target part, cut along the boxes that the sources hold; each element is in one box.
- Routes (routes.py): the nearest and least loaded replica of a box sends it. A box enters a node once over the fabric;
  the member that receives it forwards it, from its own engine parameter, to the members of its node that want it.
- Send stages: phases of the exchange. A flow's position in its source part decides its send stage, so that all pipeline
  stages send all the time. Boxes that enter a node in one send stage are forwarded in the next.
- Streams: all copies from one member to another in a send stage, in an order that both ends know.
- Rounds: each round of a send stage carries the same share of every stream, which bounds a round on every member.
Routes depend only on a pair (parts that hold a box, part that wants it), so a member plans only the pairs that it is
in: the cost of its plan grows with its own traffic, not with the cluster's. A digest proves that all plans match.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.collector import collector_paused
from megarl.model.quantisation import FP8_TILE
from megarl.model.tensors import Size
from megarl.resharding.routes import Flow, RouteChooser, Transfer, item_bytes
from megarl.resharding.shards import Box, Cell, Part, box_area, box_size
from megarl.types import UserError

_DIGEST_BITS = 128


class Copy(NamedTuple):
    """The copy of one box of a logical tensor from a cell of a parameter to a cell of another."""

    name: str
    box: Box
    dtype: str  # torch's name of the data type of the target and of the wire
    source: int
    source_param: str
    source_at: Cell
    # source_param is an engine parameter of the sender, written in an earlier send stage
    forwarded: bool
    target: int
    target_param: str
    target_at: Cell

    @property
    def size(self) -> Size:
        return box_size(self.box)

    @property
    def area(self) -> int:
        return box_area(self.box)

    @property
    def num_bytes(self) -> int:
        """On the wire."""
        return box_area(self.box) * item_bytes(self.dtype)

    def piece(self, box: Box) -> Copy:
        """The copy of a box inside this box."""
        outer = self.box
        source = self.source_at
        target = self.target_at
        item = box[0][0] - outer[0][0]
        row = box[1][0] - outer[1][0]
        col = box[2][0] - outer[2][0]
        return Copy(
            self.name,
            box,
            self.dtype,
            self.source,
            self.source_param,
            (source[0] + item, source[1] + row, source[2] + col),
            self.forwarded,
            self.target,
            self.target_param,
            (target[0] + item, target[1] + row, target[2] + col),
        )


Stream = list[Copy]
SendStage = Mapping[tuple[int, int], Stream]  # (source, target) -> stream


class Round(NamedTuple):
    """The copies that a member sends, by ascending target, and receives, by ascending source, in an agreed order."""

    sends: tuple[Copy, ...]
    receives: tuple[Copy, ...]


@dataclass(frozen=True)
class MemberPlan:
    """The plan of one member: the local copies, then the rounds, whose number is the same on every member.

    send_stage_starts: the first rounds of send stages, which may forward boxes of the round before.
    """

    member: int
    num_members: int
    local: tuple[Copy, ...]
    rounds: tuple[Round, ...]
    send_stage_starts: frozenset[int]


@dataclass(frozen=True)
class Streams:
    """All copies that one member sends and receives, before they are split into rounds.

    digest: the sum of the hashes of sent streams minus that of received streams. Its sum over all members is 0 modulo
    2 ** 128 when every member sends what the receiver expects, in the same order.
    """

    member: int
    num_members: int
    local: tuple[Copy, ...]
    send_stages: tuple[SendStage, ...]
    digest: int

    @property
    def least_round_bytes(self) -> int:
        """The smallest valid round_bytes: twice the bytes of one granule to and from every peer.

        This keeps the number of rounds below twice that of streams that could be split anywhere.
        """
        return 2 * max(sum(granule for _, granule in send_stage) for send_stage in self._sizes())

    def rounds_needed(self, round_bytes: int) -> tuple[int, ...]:
        """For each send stage the fewest rounds in each of which this member sends and receives at most round_bytes.

        The exchange uses the maximum over all members. Raises UserError below least_round_bytes.
        """
        least = self.least_round_bytes
        if least > round_bytes:
            pieces = f"the smallest pieces to and from all peers of member {self.member} take {least // 2}"
            problem = f"{round_bytes}: {pieces}"
            raise UserError("reshard.round_bytes", problem, f"raise it to at least {least}")
        return tuple(_num_rounds(send_stage, round_bytes) for send_stage in self._sizes())

    def _sizes(self) -> list[list[tuple[int, int]]]:
        """For each send stage, (bytes, bytes of the largest granule) of each stream."""
        return [
            [_sizes(stream) for stream in send_stage.values()] for send_stage in self.send_stages
        ]

    def assign(self, num_rounds: Sequence[int]) -> MemberPlan:
        """The plan with num_rounds[k] rounds in send stage k; the numbers must be the same on every member."""
        rounds: list[Round] = []
        starts: set[int] = set()
        with collector_paused():
            for send_stage, number in zip(self.send_stages, num_rounds, strict=True):
                starts.add(len(rounds))
                rounds += _rounds(send_stage, self.member, number)
        return MemberPlan(
            self.member, self.num_members, self.local, tuple(rounds), frozenset(starts)
        )


def plan_streams(
    sources: Sequence[Part],
    targets: Sequence[Part],
    member: int,
    num_members: int,
    *,
    gpus_per_node: int,
    dtype: str,
) -> Streams:
    """The streams of `member` when every target part is filled from the source parts.

    dtype: torch's name of the model's data type. Raises LayoutError: an element that this member wants has no source,
    or source boxes overlap without being replicas.
    """
    router = RouteChooser(sources, targets, num_members, gpus_per_node=gpus_per_node, dtype=dtype)
    local: Stream = []
    send_stages: list[dict[tuple[int, int], Stream]] = [
        defaultdict(list) for _ in range(router.num_send_stages)
    ]
    with collector_paused():
        for flow, transfers in router.flows(member):
            for transfer in transfers:
                if transfer.source == transfer.target == member:
                    local.append(_copy(flow, transfer))
                elif member in (transfer.source, transfer.target):
                    streams = send_stages[flow.held.send_stage + transfer.forwarded]
                    streams[transfer.source, transfer.target].append(_copy(flow, transfer))
    frozen = tuple(dict(sorted(streams.items())) for streams in send_stages)
    return Streams(member, num_members, tuple(local), frozen, _digest(member, frozen))


def _copy(flow: Flow, transfer: Transfer) -> Copy:
    held = transfer.shard
    wanted = flow.wanted
    box = flow.box
    return Copy(
        wanted.name,
        box,
        flow.dtype,
        transfer.source,
        held.param,
        held.cell(box),
        transfer.forwarded,
        transfer.target,
        wanted.param,
        wanted.cell(box),
    )


def _digest(member: int, send_stages: Sequence[SendStage]) -> int:
    total = 0
    for number, send_stage in enumerate(send_stages):
        for (source, _), stream in send_stage.items():
            state = hashlib.blake2b(digest_size=_DIGEST_BITS // 8)
            for copy in stream:
                state.update(repr((number, *copy)).encode())
            total += int.from_bytes(state.digest(), "big") * (1 if source == member else -1)
    return total % 2**_DIGEST_BITS


def _sizes(stream: Stream) -> tuple[int, int]:
    """(bytes of a stream, bytes of its largest granule)."""
    return sum(copy.num_bytes for copy in stream), max(
        granule_bytes(copy.box, copy.dtype) for copy in stream
    )


def _num_rounds(streams: Sequence[tuple[int, int]], round_bytes: int) -> int:
    """The fewest rounds of at most round_bytes.

    A round's share of a stream has at most ceil(stream / rounds) + granule - 1 bytes, and at most the whole stream.
    """

    def fits(number: int) -> bool:
        return (
            sum(min(size, -(-size // number) + granule - 1) for size, granule in streams)
            <= round_bytes
        )

    most = -(-2 * sum(size for size, _ in streams) // round_bytes)  # this number fits
    if most:
        return bisect_left(range(1, most), True, key=fits) + 1
    return 0


def _rounds(send_stage: SendStage, member: int, num_rounds: int) -> list[Round]:
    """The rounds of one send stage, whose streams are in ascending order."""
    sends: list[Stream] = [[] for _ in range(num_rounds)]
    receives: list[Stream] = [[] for _ in range(num_rounds)]
    for (source, _), stream in send_stage.items():
        side = sends if source == member else receives
        for index, piece in cut(stream, num_rounds):
            side[index].append(piece)
    return [Round(tuple(out), tuple(into)) for out, into in zip(sends, receives, strict=True)]


def _granule_rows(dtype: str) -> int:
    """The rows of a granule, which is not split: one row, or a row of tiles, because a tile has one scale."""
    if dtype.startswith("float8"):
        return FP8_TILE
    return 1


def granule_bytes(box: Box, dtype: str) -> int:
    """The bytes of a granule of a box."""
    _, rows, cols = box_size(box)
    return min(rows, _granule_rows(dtype)) * cols * item_bytes(dtype)


def cut(stream: Stream, num_rounds: int) -> Iterator[tuple[int, Copy]]:
    """Split a stream evenly over the rounds, in order: a granule belongs to the round in whose share it starts."""
    # done: bytes of the stream before `copy`
    total = sum(copy.num_bytes for copy in stream)
    done = 0
    for copy in stream:
        (num_items, num_rows, num_cols) = copy.size
        line = _granule_rows(copy.dtype)
        per_item = -(-num_rows // line)
        row_bytes = num_cols * item_bytes(copy.dtype)
        granule = 0
        num_granules = num_items * per_item
        while granule < num_granules:
            item, in_item = divmod(granule, per_item)
            index = (done + (item * num_rows + in_item * line) * row_bytes) * num_rounds // total
            # of the round's share, from the start of `copy`
            end = -(-(index + 1) * total // num_rounds) - done
            items, rest_bytes = divmod(end, num_rows * row_bytes)
            stop = min(
                num_granules, items * per_item + min(per_item, -(-rest_bytes // (line * row_bytes)))
            )
            if stop - granule == num_granules:
                yield index, copy
            else:
                for box in _granules(copy.box, granule, stop, per_item, line):
                    yield index, copy.piece(box)
            granule = stop
        done += copy.num_bytes


def _granules(box: Box, start: int, stop: int, per_item: int, line: int) -> Iterator[Box]:
    """Boxes of the granules [start, stop): the end of an item, then whole items, then the beginning of an item."""
    (first, _), rows, cols = box
    while start < stop:
        item, granule = divmod(start, per_item)
        if granule == 0 and stop - start >= per_item:
            num_items = (stop - start) // per_item
            yield (first + item, first + item + num_items), rows, cols
            start += num_items * per_item
        else:
            end = min(per_item, granule + stop - start)
            yield (
                (first + item, first + item + 1),
                (rows[0] + granule * line, min(rows[1], rows[0] + end * line)),
                cols,
            )
            start += end - granule


def agreed_rounds(votes: Sequence[Mapping[str, Any]], subject: str) -> list[int]:
    """The rounds that the members need together, of each send stage; votes: the digest and the rounds of each plan.

    Raises RuntimeError where what is sent is not what is received.
    """
    if sum(int(vote["digest"]) for vote in votes) % 2**_DIGEST_BITS:
        raise RuntimeError(f"{subject} plans do not match: sends differ from receives")
    return [max(rounds) for rounds in zip(*(vote["rounds"] for vote in votes), strict=True)]
