"""Hold what arrived against what was sent, independently of how the exchange was cut into rounds.

Every flow is looked at whole, from the replica that sent it; what was forwarded is held against the forwarder's own
engine parameter, which is itself held against its source. `checksum` compares 64-bit sums of both ends, in which each
8-byte word is weighted by its place; `full` sends the bytes once more and compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

import torch

from megarl.device import DEVICE
from megarl.parallel.layout import FP8_TILE, EngineLayout
from megarl.resharding.execute import Params, Piece, fill, source_views, target_views
from megarl.resharding.plan import Copy, Streams
from megarl.resharding.shards import FAULTS_SHOWN, FP8, Box
from megarl.resharding.transport import Ask, batch, settle, wait

VerifyMode = Literal["off", "checksum", "full"]
MODES: tuple[VerifyMode, ...] = ("off", "checksum", "full")
STRIP_BYTES = 4 << 20  # looked at at a time, or less where rounds are small
WORD_BYTES = 8


class VerifyError(RuntimeError):
    """Weights that are not what was sent; the message names tensor, engine rank and rectangle."""


@dataclass(frozen=True)
class Verifier:
    """One member's view of a finished exchange; all members must ask the same at the same time."""

    streams: Streams
    engine: EngineLayout
    group: Any
    sources: Params
    targets: Params
    round_bytes: int
    timeout_s: float
    ask: Ask = lambda: None  # raises the words of a peer that has failed

    @torch.no_grad()
    def check(self, mode: Literal["checksum", "full"]) -> None:
        """Raises VerifyError for what this member holds wrong; others learn it from the member."""
        wrong = [*self._compare_local(), *(self._compare_sums() if mode == "checksum" else self._compare_bytes())]
        settle(self.timeout_s)
        if wrong:
            more = f"; and {len(wrong) - FAULTS_SHOWN} more" if len(wrong) > FAULTS_SHOWN else ""
            raise VerifyError("; ".join(wrong[:FAULTS_SHOWN]) + more)

    def _flows(self, sent: bool) -> dict[int, list[Copy]]:
        """Everything that this member sent to (or received from) each peer, uncut, in the same order at both ends."""
        found: dict[int, list[Copy]] = {}
        for chapter in self.streams.chapters:
            for (source, target), copies in sorted(chapter.items()):
                if (source if sent else target) == self.streams.member:
                    found.setdefault(target if sent else source, []).extend(copies)
        return found

    def _compare_local(self) -> Iterator[str]:
        for copy in self.streams.local:
            for strip in _strips(copy, min(STRIP_BYTES, self.round_bytes)):
                wanted, found = self._bytes(strip, "source"), self._bytes(strip, "target")
                if not torch.equal(wanted, found):
                    yield self._words(strip, _differing(strip, wanted, found))

    def _compare_sums(self) -> list[str]:
        sent, received = self._flows(sent=True), self._flows(sent=False)
        weights = _weights(min(STRIP_BYTES, self.round_bytes) // WORD_BYTES + 1)
        theirs = {peer: torch.empty(len(copies), dtype=torch.int64, device=DEVICE) for peer, copies in received.items()}
        with batch(self.group) as works:
            works += [self.group.recv([sums], peer, 0) for peer, sums in theirs.items()]
            for peer, copies in sent.items():
                works.append(self.group.send([self._sums(copies, "source", weights)], peer, 0))
        ours = {peer: self._sums(copies, "target", weights) for peer, copies in received.items()}
        wait(works, self.timeout_s, self.ask)
        return [
            self._words(copy, copy.box)
            for peer, copies in received.items()
            for copy, same in zip(copies, (ours[peer] == theirs[peer]).tolist(), strict=True)
            if not same
        ]

    def _sums(self, copies: Sequence[Copy], side: Literal["source", "target"], weights: torch.Tensor) -> torch.Tensor:
        """One weighted sum, modulo 2**64, for each copy."""
        sums = torch.zeros(len(copies), dtype=torch.int64, device=DEVICE)
        for index, copy in enumerate(copies):
            for number, strip in enumerate(_strips(copy, min(STRIP_BYTES, self.round_bytes))):
                content = self._bytes(strip, side)
                padding = content.new_zeros(-len(content) % WORD_BYTES)
                words = (torch.cat([content, padding]) if len(padding) else content).view(torch.int64)
                if len(words) > len(weights):  # a single row that is longer than a strip
                    weights = _weights(len(words))
                sums[index] += (words * weights[: len(words)]).sum() * (2 * number + 1)
        return sums

    def _compare_bytes(self) -> list[str]:
        wrong: list[str] = []
        strip_bytes = min(STRIP_BYTES, self.round_bytes // (4 * self.streams.num_members))
        sent, received = (
            {peer: chain.from_iterable(_strips(copy, strip_bytes) for copy in copies) for peer, copies in flows.items()}
            for flows in (self._flows(sent=True), self._flows(sent=False))
        )
        for out, into in zip_longest(_together(sent), _together(received), fillvalue={}):
            theirs = {peer: torch.empty(s.num_bytes, dtype=torch.uint8, device=DEVICE) for peer, s in into.items()}
            ours = {peer: self._bytes(strip, "source") for peer, strip in out.items()}
            with batch(self.group) as works:
                works += [self.group.recv([content], peer, 0) for peer, content in theirs.items()]
                works += [self.group.send([content], peer, 0) for peer, content in ours.items()]
            wait(works, self.timeout_s, self.ask)
            for peer, strip in into.items():
                found = self._bytes(strip, "target")
                if not torch.equal(theirs[peer], found):
                    wrong.append(self._words(strip, _differing(strip, theirs[peer], found)))
        return wrong

    def _bytes(self, copy: Copy, side: Literal["source", "target"]) -> torch.Tensor:
        """What a copy brings, or what it left at its target, in the wire's type, as one run of bytes."""
        piece = Piece(copy, 0, copy.size[0])
        staged = torch.empty(copy.size, dtype=getattr(torch, copy.dtype), device=DEVICE)
        if side == "source":
            fill(copy, [staged], source_views(piece, self.sources, self.targets))
        else:
            found = target_views(piece, self.targets)
            for place, part in zip([staged] if len(found) == 1 else staged.split(1), found, strict=True):
                place.copy_(part)
        return staged.flatten().view(torch.uint8)

    def _words(self, copy: Copy, box: Box) -> str:
        """A fault for the user."""
        items, rows, cols = box
        at = self.engine.member(copy.target)
        where = f"engine {at[0]}, TP rank {at[1]}" if at else f"member {copy.target}"
        of_items = f"items {items}, " if items[1] - items[0] < copy.size[0] or "{}" in copy.name else ""
        return (
            f"{copy.name}: {of_items}rows {rows}, columns {cols} in {copy.target_param} of {where} "
            f"are not what member {copy.source} has"
        )


def _strips(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    """The copy in order, in parts of at most max_bytes, or one row (of tiles) if that is more."""
    (first_item, last_item), (first_row, last_row), cols = copy.box
    step, num_rows = FP8_TILE if copy.dtype == FP8 else 1, last_row - first_row
    row_bytes = copy.num_bytes // ((last_item - first_item) * num_rows)
    num_items = max(1, max_bytes // (num_rows * row_bytes))
    step = max(1, max_bytes // (row_bytes * step)) * step if num_items == 1 else num_rows
    for item in range(first_item, last_item, num_items):
        for row in range(first_row, last_row, step):
            yield copy.piece(((item, min(last_item, item + num_items)), (row, min(last_row, row + step)), cols))


def _together(strips: Mapping[int, Iterator[Copy]]) -> Iterator[dict[int, Copy]]:
    """The next strip of every peer that has one left, until none has."""
    while found := {peer: strip for peer, rest in strips.items() if (strip := next(rest, None))}:
        yield found


def _weights(number: int) -> torch.Tensor:
    """`number` odd 64-bit integers that look random (the finaliser of splitmix64, Steele et al. 2014)."""
    mixed = torch.arange(1, number + 1, dtype=torch.int64, device=DEVICE) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed | 1


def _differing(copy: Copy, wanted: torch.Tensor, found: torch.Tensor) -> Box:
    """The smallest box around what differs between two runs of bytes, in the logical tensor's numbers."""
    elements = (wanted != found).view(*copy.size, -1).any(dim=-1)
    box = []
    for (start, _), indices in zip(copy.box, elements.nonzero().unbind(dim=1), strict=True):
        box.append((start + int(indices.min()), start + int(indices.max()) + 1))
    return box[0], box[1], box[2]
