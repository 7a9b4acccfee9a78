"""Copies of the weights from engines that go on sampling into an engine of the same layout, TP rank to TP rank.

The members of a copy are the same rank of each engine: member 0 is the target's, the others are those of its sources.
Each source sends a share of the bytes, out of its parameters straight into the target's, in rounds of bounded size. A
source stands still from when all members have come until the target has compared its bytes; nobody waits for a source
that has failed, because all members hear of it. No tensor that is derived from weights is sent: see engine_model.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.device import DEVICE, Address, join_store
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding.agreement import Agreement, Vote
from megarl.resharding.shards import LayoutError, first_of
from megarl.resharding.transport import PostedWork, batch, close_group, make_group, settle, wait
from megarl.resharding.verify import (
    STRIP_BYTES,
    WORD_BYTES,
    VerifyError,
    VerifyMode,
    checksum,
    word_weights,
)
from megarl.types.json_objects import JsonObject
from megarl.types.tensors import NamedTensors

TARGET = 0  # the target's member number
ALIGN_BYTES = 16  # of the start of a message in a parameter
_ROUNDS_IN_FLIGHT = 2
# keys of the store: the target's rank has come; stages of the agreement
_ARRIVED = "arrived"
_READY = "ready"
_DONE = "done"


@dataclass(frozen=True)
class PeerCopy:
    """One copy, the same for all of its members. target, sources: indices of engines, all of this layout.

    meet: the rendezvous store. attempt: unique in a run. round_bytes: of a source's messages that are posted together,
    of which two rounds may be under way. timeout_s: of each wait.
    """

    meet: Address
    run_id: str
    attempt: int
    version: int
    target: int
    sources: tuple[int, ...]
    layout: EngineLayout
    verify: VerifyMode
    round_bytes: int
    timeout_s: float

    @property
    def engines(self) -> tuple[int, ...]:
        """By member number."""
        return (self.target, *self.sources)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> PeerCopy:
        """The copy that a message of `copy_messages` describes, also after JSON has made lists of its tuples."""
        from pydantic import TypeAdapter  # absent where the exchange alone is tested

        return TypeAdapter(PeerCopy).validate_python(content)


def copy_messages(copy: PeerCopy) -> tuple[dict[int, JsonObject], JsonObject]:
    """What each source gets for `send_copy`, by engine index, and the target for `receive_copy`, as JSON objects."""
    content = asdict(copy)
    sources = {
        engine: {"copy": content, "member": member}
        for member, engine in enumerate(copy.engines)
        if member != TARGET
    }
    target = {
        "copy": content,
        # what the weight loader collects the calls of one update by
        "run_id": f"copy/{copy.run_id}",
        "attempt": copy.attempt,
        "models": 2 if copy.layout.draft else 1,
    }
    return sources, target


class ByteRange(NamedTuple):
    """Bytes [start, stop) of a parameter."""

    param: str
    start: int
    stop: int


def shares(sizes: Mapping[str, int], num_sources: int) -> list[list[ByteRange]]:
    """What each source sends, given the bytes of each parameter: every byte once, and equal sums up to ALIGN_BYTES."""
    total = sum(sizes.values())
    cuts = [total * source // num_sources for source in range(num_sources + 1)]
    ranges_by_source: list[list[ByteRange]] = [[] for _source in range(num_sources)]
    begin = 0
    for param, num_bytes in sizes.items():
        inside = [_cut(cut - begin, num_bytes) for cut in cuts]
        for ranges, (start, stop) in zip(ranges_by_source, pairwise(inside), strict=True):
            if start < stop:
                ranges.append(ByteRange(param, start, stop))
        begin += num_bytes
    return ranges_by_source


def _cut(position: int, num_bytes: int) -> int:
    """The aligned place in a parameter for a cut at a position counted from its start, which may lie outside."""
    if position >= num_bytes:
        return num_bytes
    return max(0, position) // ALIGN_BYTES * ALIGN_BYTES


def rounds(ranges: Sequence[ByteRange], round_bytes: int) -> list[list[ByteRange]]:
    """The ranges in order, cut into rounds of at most round_bytes, or of ALIGN_BYTES if that is more."""
    limit = max(1, round_bytes // ALIGN_BYTES) * ALIGN_BYTES
    filled: list[list[ByteRange]] = []
    room = 0
    for param, start, stop in ranges:
        while start < stop:
            # what an unaligned end leaves is too small to be worth another message
            if room < ALIGN_BYTES:
                filled.append([])
                room = limit
            end = min(stop, start + room // ALIGN_BYTES * ALIGN_BYTES)
            filled[-1].append(ByteRange(param, start, end))
            room -= end - start
            start = end
    return filled


class CopyMember:
    """One rank of an engine in one copy; it is made for that copy and runs once."""

    def __init__(self, copy: PeerCopy, member: int, tp_rank: int) -> None:
        self._copy = copy
        self._member = member
        store = join_store(copy.meet, copy.timeout_s)
        self._store = _rank_store(copy, tp_rank, store)
        self._agreement = _agreement(copy, member, tp_rank, store)
        self._names = _names(copy, tp_rank)
        self._ask = partial(self._agreement.ask, _DONE)

    @torch.no_grad()
    def run(self, params: NamedTensors, version: int, error: Exception | None = None) -> None:
        """Send the parameters, or write them as the target; collective.

        version: that the source has, or the target is to get. error: the reason why the caller cannot take part, which
        is raised here after the other members have received it. Raises this member's own error (LayoutError,
        VerifyError), or RuntimeError with the message of another member.
        """
        if self._member == TARGET:
            self._store.set(_ARRIVED, "")
        contents = self._agree(params, version, error)
        outdated = self._agreement.forget()
        group: Any = None
        try:
            group = make_group(
                PrefixStore("group", self._store),
                self._member,
                len(self._names),
                self._copy.timeout_s,
                self._ask,
            )
            self._move(group, contents)
        except Exception as raised:
            other_error = self._agreement.refuse(_DONE, f"failed in the copy: {raised}")
            if other_error:
                raise RuntimeError(other_error) from raised
            raise
        else:
            # before the group is closed: a closed connection may lose what the peer has not read yet
            self._agreement.reach(_DONE, {}, lambda votes: {})
            # nobody reads them any more, and a large model has thousands of parameters
            self._agreement.delete(outdated)
        finally:
            if group is not None:
                close_group(group)

    def _agree(
        self, params: NamedTensors, version: int, error: Exception | None
    ) -> dict[str, Tensor]:
        """The bytes of each parameter, when all members are ready and have the same ones."""
        try:
            if error:
                raise error
            contents = {name: _content(name, param) for name, param in params.items()}
        except Exception as raised:
            self._agreement.refuse(_READY, f"cannot take part: {raised}")
            raise
        described = {name: f"{param.dtype} {list(param.shape)}" for name, param in params.items()}
        vote = {"version": version, "params": described}
        self._agreement.reach(_READY, vote, partial(conclude, self._names))
        return contents

    def _move(self, group: Any, contents: NamedTensors) -> None:
        """Send or write this member's ranges, and compare what was written."""
        sizes = {name: len(content) for name, content in contents.items()}
        by_source = shares(sizes, len(self._copy.sources))
        if self._member == TARGET:
            ranges_by_peer = dict(enumerate(by_source, start=TARGET + 1))
        else:
            ranges_by_peer = {TARGET: by_source[self._member - 1]}
        rounds_by_peer = {
            peer: rounds(ranges, self._copy.round_bytes) for peer, ranges in ranges_by_peer.items()
        }
        self._exchange(group, rounds_by_peer, contents)
        if self._copy.verify == "off":
            return
        if self._copy.verify == "checksum":
            wrong = self._compare_sums(group, ranges_by_peer, contents)
        elif self._member == TARGET:
            wrong = self._compare_bytes(group, rounds_by_peer, contents)
        else:
            self._exchange(group, rounds_by_peer, contents)
            wrong = []
        if wrong:
            raise VerifyError(first_of(wrong))

    def _exchange(
        self,
        group: Any,
        rounds_by_peer: Mapping[int, Sequence[Sequence[ByteRange]]],
        contents: NamedTensors,
    ) -> None:
        """Send all rounds, or receive them in place as the target."""
        in_flight: deque[list[PostedWork]] = deque()
        for ranges_by_peer in _upcoming(rounds_by_peer):
            in_flight.append(self._post(group, _parts(contents, ranges_by_peer)))
            if len(in_flight) == _ROUNDS_IN_FLIGHT:
                wait(in_flight.popleft(), self._copy.timeout_s, self._ask)
        for works in in_flight:
            wait(works, self._copy.timeout_s, self._ask)
        settle(self._copy.timeout_s)

    def _post(
        self, group: Any, tensors_by_peer: Mapping[int, Sequence[Tensor]]
    ) -> list[PostedWork]:
        post = group.recv if self._member == TARGET else group.send
        with batch(group) as works:
            for peer, tensors in tensors_by_peer.items():
                works += [(peer, post([tensor], peer, 0)) for tensor in tensors]
        return works

    def _compare_sums(
        self,
        group: Any,
        ranges_by_peer: Mapping[int, Sequence[ByteRange]],
        contents: NamedTensors,
    ) -> list[str]:
        """Compare checksums of all ranges at the target; descriptions of the wrong ones, none at a source."""
        weights = word_weights(STRIP_BYTES // WORD_BYTES)
        sums_by_peer = {}
        for peer, parts in _parts(contents, ranges_by_peer).items():
            sums = torch.zeros(len(parts), dtype=torch.int64, device=DEVICE)
            for index, part in enumerate(parts):
                sums[index] = checksum(part.split(STRIP_BYTES), weights)
            sums_by_peer[peer] = sums
        if self._member == TARGET:
            exchanged = {peer: torch.empty_like(sums) for peer, sums in sums_by_peer.items()}
        else:
            exchanged = sums_by_peer
        works = self._post(group, {peer: [sums] for peer, sums in exchanged.items() if len(sums)})
        wait(works, self._copy.timeout_s, self._ask)
        return [
            self._describe(peer, at)
            for peer, ranges in ranges_by_peer.items()
            for at, same in zip(
                ranges, (exchanged[peer] == sums_by_peer[peer]).tolist(), strict=True
            )
            if not same
        ]

    def _compare_bytes(
        self,
        group: Any,
        rounds_by_peer: Mapping[int, Sequence[Sequence[ByteRange]]],
        contents: NamedTensors,
    ) -> list[str]:
        """Receive all bytes once more and compare them; the target's part."""
        wrong = []
        for ranges_by_peer in _upcoming(rounds_by_peer):
            written = _parts(contents, ranges_by_peer)
            again = {
                peer: [torch.empty_like(part) for part in parts] for peer, parts in written.items()
            }
            wait(self._post(group, again), self._copy.timeout_s, self._ask)
            wrong += [
                self._describe(peer, at)
                for peer, ranges in ranges_by_peer.items()
                for at, part, sent in zip(ranges, written[peer], again[peer], strict=True)
                if not torch.equal(part, sent)
            ]
        return wrong

    def _describe(self, source: int, at: ByteRange) -> str:
        return (
            f"{at.param}: bytes {at.start} to {at.stop} of {self._names[TARGET]} "
            f"are not what {self._names[source]} has"
        )


def conclude(names: Sequence[str], votes: Sequence[Vote]) -> Vote:
    """Raises RuntimeError where a member has another version or other parameters than the target; names: of members."""
    target = votes[TARGET]
    for name, vote in zip(names, votes, strict=True):
        if vote["version"] != target["version"]:
            raise RuntimeError(
                f"copy: {name} has version {vote['version']} of the weights, not {target['version']}"
            )
        for param in sorted(vote["params"].keys() | target["params"].keys()):
            sent = vote["params"].get(param, "missing")
            wanted = target["params"].get(param, "missing")
            if sent != wanted:
                raise RuntimeError(
                    f"copy: {param} is {sent} in {name} and {wanted} in {names[TARGET]}"
                )
    return {}


def await_target(copy: PeerCopy) -> None:
    """Return when all ranks of the target have come, so that a source need not stand still until then.

    Raises RuntimeError with the message of an engine that has given up, or after copy.timeout_s.
    """
    store = join_store(copy.meet, copy.timeout_s)
    for tp_rank in range(copy.layout.tp):
        try:
            _rank_store(copy, tp_rank, store).wait([_ARRIVED], timedelta(seconds=copy.timeout_s))
        except RuntimeError as error:
            raise RuntimeError(
                f"copy: {_names(copy, tp_rank)[TARGET]} did not come within {copy.timeout_s} s"
            ) from error
        _agreement(copy, TARGET, tp_rank, store).ask(_READY)


def abandon(copy: PeerCopy, engine: int, error: str) -> None:
    """End a copy for all of its members that are not done, in the name of an engine whose processes may be dead."""
    store = join_store(copy.meet, copy.timeout_s)
    for tp_rank in range(copy.layout.tp):
        agreement = _agreement(copy, copy.engines.index(engine), tp_rank, store)
        for stage in (_READY, _DONE):
            agreement.refuse(stage, f"has left: {error}")
        _rank_store(copy, tp_rank, store).set(_ARRIVED, "")


def _rank_store(copy: PeerCopy, tp_rank: int, store: Store) -> PrefixStore:
    return PrefixStore(f"copy/{copy.run_id}/{copy.attempt}/{tp_rank}", store)


def _names(copy: PeerCopy, tp_rank: int) -> list[str]:
    return [f"engine {engine}, TP rank {tp_rank}" for engine in copy.engines]


def _agreement(copy: PeerCopy, member: int, tp_rank: int, store: Store) -> Agreement:
    names = _names(copy, tp_rank)
    ranked = _rank_store(copy, tp_rank, store)
    return Agreement(ranked, member, len(names), copy.timeout_s, "copy", names)


def _content(name: str, param: Tensor) -> Tensor:
    """The memory of a parameter, as bytes [n]."""
    if not param.is_contiguous():
        raise LayoutError(f"{name}: the parameter is not contiguous in memory")
    return param.detach().flatten().view(torch.uint8)


def _parts(
    contents: NamedTensors, ranges_by_peer: Mapping[int, Sequence[ByteRange]]
) -> dict[int, list[Tensor]]:
    """The memory of ranges."""
    return {
        peer: [contents[param][start:stop] for param, start, stop in ranges]
        for peer, ranges in ranges_by_peer.items()
    }


def _upcoming(
    rounds_by_peer: Mapping[int, Sequence[Sequence[ByteRange]]],
) -> Iterator[dict[int, Sequence[ByteRange]]]:
    """The next round of every peer, until all are exhausted."""
    for ranges in zip_longest(*rounds_by_peer.values(), fillvalue=()):
        yield dict(zip(rounds_by_peer, ranges, strict=True))
