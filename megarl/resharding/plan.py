"""Who sends which rectangle to whom, in which round: pure, and the same on every member without talking.

A member is one GPU slot. It may hold source shards (its training rank) and target shards (its engine rank). Each target
element is taken from exactly one source: the same slot if it has it, else the replica that has sent least so far. What
goes from one member to another is a stream of rectangles; every round carries the same part of every stream, so that
all pipeline stages (different sources) send all the time, and a round's size is bounded on every member.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from megarl.resharding.shards import Cell, LayoutError, Range, Shard, intersect, overlapping
from megarl.types import UserFault

Rectangle = tuple[Range, Range]


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle of a logical tensor on its way: [num_rows, num_cols] from a source cell to a target cell."""

    name: str
    num_rows: int
    num_cols: int
    source: int
    source_param: str
    source_at: Cell
    target: int
    target_param: str
    target_at: Cell

    @property
    def area(self) -> int:
        return self.num_rows * self.num_cols

    def part(self, row: int, num_rows: int) -> Copy:
        """Only its rows [row, row + num_rows)."""
        source_at = (self.source_at[0] + row, self.source_at[1])
        target_at = (self.target_at[0] + row, self.target_at[1])
        return Copy(
            self.name, num_rows, self.num_cols, self.source, self.source_param, source_at,
            self.target, self.target_param, target_at,
        )  # fmt: skip


class Choice(NamedTuple):
    """Target member `target` takes rows x cols of what it wants from what member `source` holds."""

    source: int
    held: Shard
    target: int
    wanted: Shard
    rows: Range
    cols: Range

    @property
    def area(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])

    def copy(self) -> Copy:
        start = self.rows[0], self.cols[0]
        num_rows, num_cols = self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]
        return Copy(
            self.wanted.name, num_rows, num_cols, self.source, self.held.param, self.held.cell(*start),
            self.target, self.wanted.param, self.wanted.cell(*start),
        )  # fmt: skip


@dataclass(frozen=True)
class Round:
    """One all-to-all of one member: sends by rising target, receives by rising source."""

    sends: tuple[Copy, ...]
    receives: tuple[Copy, ...]


@dataclass(frozen=True)
class Plan:
    """What one member does. Every member has the same number of rounds and the same digest of the whole exchange."""

    member: int
    num_members: int
    local: tuple[Copy, ...]
    rounds: tuple[Round, ...]
    digest: str


def plan_copies(
    sources: Sequence[Sequence[Shard]], targets: Sequence[Sequence[Shard]], member: int, round_elements: int
) -> Plan:
    """The part of `member` in moving every target shard of every member from the sources.

    sources, targets: one list of shards per member, in member order. round_elements bounds what one member sends, and
    what it receives, in one round. Raises LayoutError (a target element without a source, or sources that overlap
    without being replicas) and UserFault (a round too small for a row to or from every member).
    """
    local: list[Copy] = []
    streams: dict[tuple[int, int], list[Copy]] = defaultdict(list)  # of this member alone, in the order of the choices
    elements: dict[tuple[int, int], int] = defaultdict(int)  # of everyone
    widest, digest = 0, hashlib.blake2b(digest_size=16)
    for choice in choose_sources(sources, targets):
        pair = choice.source, choice.target
        digest.update(f"{pair}{choice.wanted.name}{choice.rows}{choice.cols};".encode())
        if choice.source != choice.target:
            elements[pair] += choice.area
            widest = max(widest, choice.cols[1] - choice.cols[0])
            if member in pair:
                streams[pair].append(choice.copy())
        elif choice.target == member:
            local.append(choice.copy())
    num_rounds = count_rounds(elements, widest, round_elements)
    digest.update(f"{num_rounds}".encode())
    return Plan(member, len(sources), tuple(local), _rounds(streams, member, num_rounds), digest.hexdigest())


def choose_sources(sources: Sequence[Sequence[Shard]], targets: Sequence[Sequence[Shard]]) -> Iterator[Choice]:
    """One choice for each target rectangle and each source rectangle that meets it; replicas share the sending."""
    holders = _holders(sources)
    sent = [0] * len(sources)
    for target, shards in enumerate(targets):
        for wanted in shards:
            covered = 0
            for (rows, cols), replicas in holders.get(wanted.name, {}).items():
                rows, cols = intersect(rows, wanted.rows), intersect(cols, wanted.cols)
                area = (rows[1] - rows[0]) * (cols[1] - cols[0])
                if not area:
                    continue
                source = target if target in replicas else min(replicas, key=lambda member: (sent[member], member))
                if source != target:
                    sent[source] += area
                covered += area
                yield Choice(source, replicas[source], target, wanted, rows, cols)
            if covered != wanted.area:
                raise LayoutError(
                    f"{wanted.name}: {covered} of {wanted.area} elements of member {target} have a source"
                )


def _holders(sources: Sequence[Sequence[Shard]]) -> dict[str, dict[Rectangle, dict[int, Shard]]]:
    """Logical tensor -> rectangle -> the members that hold it; different rectangles must not share elements."""
    found: dict[str, dict[Rectangle, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
    for member, shards in enumerate(sources):
        for shard in shards:
            if shard.area:
                found[shard.name][shard.rows, shard.cols][member] = shard
    for name, rectangles in found.items():
        if overlapping(rectangles):
            raise LayoutError(f"{name}: source shards overlap without being replicas")
    return found


def count_rounds(elements: dict[tuple[int, int], int], widest: int, round_elements: int) -> int:
    """How many rounds keep what any member sends or receives in one within round_elements.

    elements: (source, target) -> size of the stream. Streams are cut between rows, so that a round carries up to one
    row (`widest` elements) more of each than its even part.
    """
    total: dict[tuple[str, int], int] = defaultdict(int)
    num_peers: dict[tuple[str, int], int] = defaultdict(int)
    for (source, target), size in elements.items():
        for side in (("send", source), ("receive", target)):
            total[side] += size
            num_peers[side] += 1
    most_peers = max(num_peers.values(), default=0)
    if most_peers * widest >= round_elements:
        problem = (
            f"a round takes {round_elements} elements, a row for each of {most_peers} members {most_peers * widest}"
        )
        raise UserFault("reshard.round_bytes", problem, "raise it")
    return max((-(-size // (round_elements - num_peers[side] * widest)) for side, size in total.items()), default=0)


def _rounds(streams: dict[tuple[int, int], list[Copy]], member: int, num_rounds: int) -> tuple[Round, ...]:
    sends: list[list[Copy]] = [[] for _ in range(num_rounds)]
    receives: list[list[Copy]] = [[] for _ in range(num_rounds)]
    for (source, _), stream in sorted(streams.items()):  # rising sources in receives, rising targets in sends
        for index, part in cut(stream, num_rounds):
            (sends if source == member else receives)[index].append(part)
    return tuple(Round(tuple(out), tuple(into)) for out, into in zip(sends, receives, strict=True))


def cut(stream: Sequence[Copy], num_rounds: int) -> Iterator[tuple[int, Copy]]:
    """Deal a stream evenly over the rounds: a row goes into the round in whose part it starts."""
    total, done = sum(copy.area for copy in stream), 0
    for copy in stream:
        row = 0
        while row < copy.num_rows:
            index = done * num_rounds // total
            end = -(-(index + 1) * total // num_rounds)
            num_rows = min(copy.num_rows - row, -(-(end - done) // copy.num_cols))
            yield index, copy.part(row, num_rows)
            row += num_rows
            done += num_rows * copy.num_cols


def elements_per_peer(copies: Sequence[Copy], num_members: int, peer: str) -> list[int]:
    """How many elements go to (peer="target") or come from (peer="source") each member."""
    counts = [0] * num_members
    for index, group in groupby(copies, key=lambda copy: getattr(copy, peer)):
        counts[index] = sum(copy.area for copy in group)
    return counts
