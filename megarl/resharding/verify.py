"""Verification of an exchange, independent of its rounds: the targets are compared with the sources.

Every flow is compared as a whole with the replica that sent it; a forwarded flow is compared with the forwarder's
engine parameter, which is compared with its own source. `checksum` compares 64-bit sums, in which each 8-byte word has
a weight by its position; `full` sends the bytes again and compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.device import DEVICE
from megarl.model.quantisation import FP8_TILE
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding.execute import Params, Piece, Transform, fill, source_views, target_views
from megarl.resharding.reshard_plan import Copy, Streams
from megarl.resharding.shards import FP8, Box, first_of
from megarl.resharding.transport import PeerCheck, batch, settle, wait

VerifyMode = Literal["off", "checksum", "full"]
MODES: tuple[VerifyMode, ...] = ("off", "checksum", "full")
STRIP_BYTES = 4 << 20  # compared at a time, or less where rounds are small
WORD_BYTES = 8


class VerifyError(RuntimeError):
    """Weights differ from their source; the message names the tensor, the engine rank and the box."""


@dataclass(frozen=True)
class Verifier:
    """Compares the targets of one member after an exchange; all members must call `check` with the same mode."""

    streams: Streams
    engine: EngineLayout
    group: Any
    sources: Params
    targets: Params
    round_bytes: int
    timeout_s: float
    ask: PeerCheck = lambda: None  # raises the message of a peer that has failed
    transform: Transform | None = None  # as the executor's

    @torch.no_grad()
    def check(self, mode: Literal["checksum", "full"]) -> None:
        """Raises VerifyError for wrong targets of this member; the caller must inform the other members."""
        wrong = [
            *self._compare_local(),
            *(self._compare_sums() if mode == "checksum" else self._compare_bytes()),
        ]
        settle(self.timeout_s)
        if wrong:
            raise VerifyError(first_of(wrong))

    def _flows(self, sent: bool) -> dict[int, list[Copy]]:
        """By peer, all whole copies that this member sent (or received), in the same order at both ends."""
        copies_by_peer: dict[int, list[Copy]] = {}
        for send_stage in self.streams.send_stages:
            for (source, target), copies in sorted(send_stage.items()):
                if (source if sent else target) == self.streams.member:
                    copies_by_peer.setdefault(target if sent else source, []).extend(copies)
        return copies_by_peer

    def _compare_local(self) -> Iterator[str]:
        for copy in self.streams.local:
            for strip in _strips(copy, min(STRIP_BYTES, self.round_bytes)):
                source_content = self._bytes(strip, "source")
                target_content = self._bytes(strip, "target")
                if not torch.equal(source_content, target_content):
                    yield self._describe(strip, _difference(strip, source_content, target_content))

    def _compare_sums(self) -> list[str]:
        sent = self._flows(sent=True)
        received = self._flows(sent=False)
        weights = word_weights(min(STRIP_BYTES, self.round_bytes) // WORD_BYTES + 1)
        theirs = {
            peer: torch.empty(len(copies), dtype=torch.int64, device=DEVICE)
            for peer, copies in received.items()
        }
        with batch(self.group) as works:
            works += [(peer, self.group.recv([sums], peer, 0)) for peer, sums in theirs.items()]
            for peer, copies in sent.items():
                sums = self._sums(copies, "source", weights)
                works.append((peer, self.group.send([sums], peer, 0)))
        ours = {peer: self._sums(copies, "target", weights) for peer, copies in received.items()}
        wait(works, self.timeout_s, self.ask)
        return [
            self._describe(copy, copy.box)
            for peer, copies in received.items()
            for copy, same in zip(copies, (ours[peer] == theirs[peer]).tolist(), strict=True)
            if not same
        ]

    def _sums(
        self, copies: Sequence[Copy], side: Literal["source", "target"], weights: Tensor
    ) -> Tensor:
        """The checksum of each copy."""
        sums = torch.zeros(len(copies), dtype=torch.int64, device=DEVICE)
        for index, copy in enumerate(copies):
            strips = _strips(copy, min(STRIP_BYTES, self.round_bytes))
            sums[index] = checksum((self._bytes(strip, side) for strip in strips), weights)
        return sums

    def _compare_bytes(self) -> list[str]:
        wrong: list[str] = []
        strip_bytes = min(STRIP_BYTES, self.round_bytes // (4 * self.streams.num_members))
        sent, received = (
            {
                peer: chain.from_iterable(_strips(copy, strip_bytes) for copy in copies)
                for peer, copies in flows.items()
            }
            for flows in (self._flows(sent=True), self._flows(sent=False))
        )
        for out, into in zip_longest(_next_strips(sent), _next_strips(received), fillvalue={}):
            theirs = {
                peer: torch.empty(s.num_bytes, dtype=torch.uint8, device=DEVICE)
                for peer, s in into.items()
            }
            ours = {peer: self._bytes(strip, "source") for peer, strip in out.items()}
            with batch(self.group) as works:
                for peer, content in theirs.items():
                    works.append((peer, self.group.recv([content], peer, 0)))
                for peer, content in ours.items():
                    works.append((peer, self.group.send([content], peer, 0)))
            wait(works, self.timeout_s, self.ask)
            for peer, strip in into.items():
                target_content = self._bytes(strip, "target")
                if not torch.equal(theirs[peer], target_content):
                    wrong.append(
                        self._describe(strip, _difference(strip, theirs[peer], target_content))
                    )
        return wrong

    def _bytes(self, copy: Copy, side: Literal["source", "target"]) -> Tensor:
        """The content of a copy at its source or target, in the wire's data type, as bytes."""
        piece = Piece(copy, 0, copy.size[0])
        staged = torch.empty(copy.size, dtype=getattr(torch, copy.dtype), device=DEVICE)
        if side == "source":
            source = source_views(piece, self.sources, self.targets, self.transform)
            fill(copy, [staged], source, self.engine.precision.scales)
        else:
            views = target_views(piece, self.targets)
            for place, part in zip(
                [staged] if len(views) == 1 else staged.split(1), views, strict=True
            ):
                place.copy_(part)
        return staged.flatten().view(torch.uint8)

    def _describe(self, copy: Copy, box: Box) -> str:
        """The error message about a box of a copy."""
        items, rows, cols = box
        at = self.engine.member(copy.target)
        if at:
            where = f"engine {at[0]}, TP rank {at[1]}"
        else:
            where = f"member {copy.target}"
        if items[1] - items[0] < copy.size[0] or "{}" in copy.name:
            of_items = f"items {items}, "
        else:
            of_items = ""
        return (
            f"{copy.name}: {of_items}rows {rows}, columns {cols} in {copy.target_param} of {where} "
            f"are not what member {copy.source} has"
        )


def _strips(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    """The copy in order, in strips of at most max_bytes, or of one row (of tiles) if that is more."""
    (first_item, last_item), (first_row, last_row), cols = copy.box
    step = FP8_TILE if copy.dtype == FP8 else 1
    num_rows = last_row - first_row
    row_bytes = copy.num_bytes // ((last_item - first_item) * num_rows)
    num_items = max(1, max_bytes // (num_rows * row_bytes))
    if num_items == 1:
        step = max(1, max_bytes // (row_bytes * step)) * step
    else:
        step = num_rows
    for item in range(first_item, last_item, num_items):
        for row in range(first_row, last_row, step):
            yield copy.piece(
                ((item, min(last_item, item + num_items)), (row, min(last_row, row + step)), cols)
            )


def _next_strips(strips: Mapping[int, Iterator[Copy]]) -> Iterator[dict[int, Copy]]:
    """The next strip of every peer that has any left, until all are exhausted."""
    while True:
        upcoming = {peer: next(peer_strips, None) for peer, peer_strips in strips.items()}
        present = {peer: strip for peer, strip in upcoming.items() if strip is not None}
        if not present:
            return
        yield present


def checksum(strips: Iterable[Tensor], weights: Tensor) -> Tensor:
    """A sum modulo 2**64 of the 8-byte words of strips of bytes, in which each word has a weight by its position.

    weights: `word_weights` of at least one word; more are made where a strip is longer.
    """
    total = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for number, content in enumerate(strips):
        padding = content.new_zeros(-len(content) % WORD_BYTES)
        is_aligned = content.storage_offset() % WORD_BYTES == 0
        if len(padding) or not is_aligned:
            content = torch.cat([content, padding])
        words = content.view(torch.int64)
        if len(words) > len(weights):
            weights = word_weights(len(words))
        total += (words * weights[: len(words)]).sum() * (2 * number + 1)
    return total


def word_weights(number: int) -> Tensor:
    """`number` odd pseudorandom 64-bit integers (the finaliser of splitmix64, Steele et al. 2014)."""
    mixed = torch.arange(1, number + 1, dtype=torch.int64, device=DEVICE) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed | 1


def _difference(copy: Copy, source_content: Tensor, target_content: Tensor) -> Box:
    """The smallest box of the logical tensor that contains all differences between two contents of a copy."""
    elements = (source_content != target_content).view(*copy.size, -1).any(dim=-1)
    box = []
    for (start, _), indices in zip(copy.box, elements.nonzero().unbind(dim=1), strict=True):
        box.append((start + int(indices.min()), start + int(indices.max()) + 1))
    return box[0], box[1], box[2]
