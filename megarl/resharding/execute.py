"""Executes a plan: local copies, and rounds of point-to-point messages. No decisions are made here.

A large copy is a message of its own, sent and received without staging where it is contiguous in the parameter; small
or strided copies are packed. While the messages of a round are on the wire, the next round is packed and posted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from megarl.device import BACKEND, DEVICE
from megarl.fp8 import ScaleRule
from megarl.model.quantisation import FP8_TILE
from megarl.model.tensors import Size
from megarl.resharding import fp8
from megarl.resharding.fp8 import SCALE_SUFFIX
from megarl.resharding.lora_merge import Merge, MergedBox
from megarl.resharding.lora_scaling import ScaledBox, Scaling
from megarl.resharding.reshard_plan import Copy, MemberPlan
from megarl.resharding.routes import item_bytes
from megarl.resharding.shards import FP8, Cell, shape_as_stack, views
from megarl.resharding.transport import PeerCheck, PostedWork, batch, settle, wait
from megarl.timeline.recorder import span, spanned
from megarl.types.tensors import NamedTensors

Params = NamedTensors
Computed = MergedBox | ScaledBox
# at the sender: elements, or what they are computed from
Source = Sequence[Tensor] | Sequence[Computed]
Transform = Merge | Scaling  # of the parameters of a training rank with adapters, to what is sent

# From this size on a message of its own costs less than packing: measured over gloo on loopback; with NCCL a launch
# costs the host as much time as megabytes need on the wire, and a GPU packs at the speed of its memory.
DIRECT_BYTES = 128 << 10 if BACKEND == "gloo" else 4 << 20
ALIGN_BYTES = 16  # of a message's start in a buffer
# for each element of a strip of 128 rows that is quantised: two float32, and the result
SCRATCH_BYTES = 10


class Piece(NamedTuple):
    """Items [first, first + number) of a copy."""

    copy: Copy
    first: int
    number: int

    @property
    def size(self) -> Size:
        return (self.number, *self.copy.size[1:])

    @property
    def num_bytes(self) -> int:
        items, rows, cols = self.size
        return items * rows * cols * item_bytes(self.copy.dtype)

    def at(self, cell: Cell) -> Cell:
        """The cell of the piece, given the cell of the copy."""
        return cell[0] + self.first, cell[1], cell[2]


def messages(copies: Sequence[Copy]) -> list[list[Piece]]:
    """The messages from one member to another in a round, each as a list of pieces.

    Depends on the sizes alone, so that sender and receiver agree without communication.
    """
    message_pieces: list[list[Piece]] = []
    small: list[Piece] = []
    for copy in copies:
        num_items = copy.size[0]
        num_bytes = copy.num_bytes
        if num_bytes >= DIRECT_BYTES * num_items:
            message_pieces += [[Piece(copy, item, 1)] for item in range(num_items)]
        elif num_bytes >= DIRECT_BYTES:
            message_pieces.append([Piece(copy, 0, num_items)])
        else:
            small.append(Piece(copy, 0, num_items))
    if small:  # the widest elements first, so that each piece is aligned to its element size
        message_pieces.append(sorted(small, key=lambda piece: -item_bytes(piece.copy.dtype)))
    return message_pieces


class SendBuffer(NamedTuple):
    """A message at one end: `direct`, contiguous bytes of a parameter, or `pieces` that are staged in a buffer.

    A piece's tensors are [items, rows, cols] each; at the source of scales they are the elements of the tiles.
    """

    peer: int
    num_bytes: int
    direct: Tensor | None
    pieces: tuple[tuple[Piece, Source], ...]

    @property
    def staged_bytes(self) -> int:
        if self.direct is not None:
            return 0
        return -(-self.num_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def stage(self, buffer: Tensor) -> Iterator[tuple[Piece, Sequence[Any], Tensor]]:
        """Each piece with its tensors and its [items, rows, cols] place in the message."""
        start = 0
        for piece, elements in self.pieces:
            place = (
                buffer[start : start + piece.num_bytes]
                .view(getattr(torch, piece.copy.dtype))
                .view(piece.size)
            )
            yield piece, elements, place
            start += piece.num_bytes


class MemberRound(NamedTuple):
    """A round of this member. drain: unpack the previous round before packing, because this round may forward it."""

    sends: list[SendBuffer]
    receives: list[SendBuffer]
    drain: bool

    @property
    def sent_bytes(self) -> int:
        return sum(send_buffer.num_bytes for send_buffer in self.sends)


class OnTheWay(NamedTuple):
    """A posted round: works to wait for, and the messages to unpack then."""

    works: list[PostedWork]
    unpack: list[tuple[SendBuffer, Tensor]]


class Executor:
    """Executes one plan on one set of parameters; its views are valid as long as no parameter moves.

    transform: computes what is sent from the sources; None: they are sent as they are. scales: of fp8 tiles.
    """

    def __init__(
        self,
        plan: MemberPlan,
        sources: Params,
        targets: Params,
        transform: Transform | None = None,
        scales: ScaleRule = "exact",
    ) -> None:
        self.plan = plan
        self._scales: ScaleRule = scales
        self._addresses = _addresses(sources), _addresses(targets)
        whole = [Piece(copy, 0, copy.size[0]) for copy in plan.local]
        self._local = [
            (p.copy, target_views(p, targets), source_views(p, sources, targets, transform))
            for p in whole
        ]
        self._steps = [
            MemberRound(
                [
                    _send_buffer(
                        peer,
                        [
                            (piece, source_views(piece, sources, targets, transform))
                            for piece in message
                        ],
                    )
                    for peer, copies in groupby(step.sends, key=lambda copy: copy.target)
                    for message in messages(list(copies))
                ],
                [
                    _send_buffer(peer, [(piece, target_views(piece, targets)) for piece in message])
                    for peer, copies in groupby(step.receives, key=lambda copy: copy.source)
                    for message in messages(list(copies))
                ],
                index in plan.send_stage_starts,
            )
            for index, step in enumerate(plan.rounds)
        ]
        outgoing = [(copy, out_of) for copy, _, out_of in self._local]
        outgoing += [
            (piece.copy, out_of)
            for s in self._steps
            for send_buffer in s.sends
            for piece, out_of in send_buffer.pieces
        ]
        self._scratch_bytes = max(
            (_scratch_bytes(copy, out_of) for copy, out_of in outgoing), default=0
        )

    def fits(self, sources: Params, targets: Params) -> bool:
        """Whether these are the parameters that the executor was made for."""
        return self._addresses == (_addresses(sources), _addresses(targets))

    @spanned("exchange")
    @torch.no_grad()
    def run(self, group: Any, timeout_s: float, ask: PeerCheck = lambda: None) -> int:
        """Write every target box of this member; returns the peak of extra memory in bytes when all are written.

        Raises RuntimeError when a peer ends, or is silent for timeout_s. ask: raises the message of a failed peer; with
        NCCL it is the only sign that a peer will never send, because an aborted communicator closes no connection.
        """
        out, into = (
            [self._buffer(side, parity) for parity in (0, 1)] for side in ("sends", "receives")
        )
        pending: OnTheWay | None = None
        for index, step in enumerate(self._steps):
            with span(f"round {index + 1}", sent_bytes=step.sent_bytes):
                if step.drain:
                    pending = _finish(pending, timeout_s, ask)
                posted = _post(group, step, out[index % 2], into[index % 2], self._scales)
                if index == 0:
                    self._copy_local()
                _finish(pending, timeout_s, ask)
                pending = posted
        _finish(pending, timeout_s, ask)
        if not self._steps:
            self._copy_local()
        settle(timeout_s)
        return sum(buffer.nbytes for buffer in out + into) + self._scratch_bytes

    def _buffer(self, side: Literal["sends", "receives"], parity: int) -> Tensor:
        """The staging buffer of the rounds of one parity (double buffering), sized for the largest of them."""
        sizes = (
            sum(send_buffer.staged_bytes for send_buffer in getattr(step, side))
            for step in self._steps[parity::2]
        )
        return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=DEVICE)

    def _copy_local(self) -> None:
        for copy, into, out_of in self._local:
            fill(copy, into, out_of, self._scales)


def source_views(
    piece: Piece, sources: Params, targets: Params, transform: Transform | None = None
) -> Source:
    """A piece's elements at its sender; for scales the elements of their tiles, up to the parameter's end."""
    copy = piece.copy
    at = piece.at(piece.copy.source_at)
    size = piece.size
    if transform and not copy.forwarded:
        computed = transform.boxes(copy.name, sources, copy.source_param, at, size)
        if computed is not None:
            return computed
    if copy.forwarded or not copy.name.endswith(SCALE_SUFFIX):
        return views(targets if copy.forwarded else sources, copy.source_param, at, size)
    source = copy.source_param.format(at[0])
    whole = shape_as_stack(source, sources[source].shape)
    row = at[1] * FP8_TILE
    col = at[2] * FP8_TILE
    block = (
        piece.number,
        min(size[1] * FP8_TILE, whole[1] - row),
        min(size[2] * FP8_TILE, whole[2] - col),
    )
    return views(sources, copy.source_param, (at[0], row, col), block)


def target_views(piece: Piece, targets: Params) -> list[Tensor]:
    """A piece's elements at its receiver."""
    return views(targets, piece.copy.target_param, piece.at(piece.copy.target_at), piece.size)


def fill(copy: Copy, into: Sequence[Tensor], elements: Source, scales: ScaleRule) -> None:
    """Copy items from one list of [items, rows, cols] to another, converted to the wire's data type.

    scales: of fp8 tiles.
    """
    if boxes := _computed(elements):
        for target, box in zip(into if len(into) > 1 else into[0].split(1), boxes, strict=True):
            box.write(target)
        return
    out_of = cast(Sequence[Tensor], elements)
    if len(into) != len(out_of):  # one side has a parameter for each item, the other one a stack
        into, out_of = (items if len(items) > 1 else items[0].split(1) for items in (into, out_of))
    convert = _converter(copy, out_of, scales)
    if convert is None:
        torch._foreach_copy_(list(into), list(out_of))  # pyright: ignore[reportPrivateImportUsage]
        return
    # rows of the source for a row of the target
    tile = FP8_TILE if copy.name.endswith(SCALE_SUFFIX) else 1
    for target, source in zip(into, out_of, strict=True):
        for item in range(len(target)):
            for start in range(0, source.shape[1], FP8_TILE):
                block = convert(source[item : item + 1, start : start + FP8_TILE])
                target[item : item + 1, start // tile : (start + FP8_TILE) // tile].copy_(block)


def _computed(source: Source) -> list[Computed]:
    """The boxes of a source that is computed; none of another."""
    return [box for box in source if isinstance(box, MergedBox | ScaledBox)]


def _scratch_bytes(copy: Copy, source: Source) -> int:
    """The temporary memory of converting a copy to the wire's data type, or of computing it."""
    if boxes := _computed(source):
        return boxes[0].scratch_bytes
    elements = cast(Sequence[Tensor], source)
    if _converter(copy, elements, "exact"):
        return SCRATCH_BYTES * FP8_TILE * elements[0].shape[2]
    return 0


def _converter(
    copy: Copy, source: Sequence[Tensor], scales: ScaleRule
) -> Callable[[Tensor], Tensor] | None:
    """The function that converts a block of source elements for the wire; None where a plain copy suffices."""
    if copy.forwarded:
        return None
    if copy.name.endswith(SCALE_SUFFIX):
        return partial(fp8.tile_scales, rule=scales)
    quantised = copy.dtype == FP8 and source[0].dtype != torch.float8_e4m3fn
    return partial(fp8.quantise, rule=scales) if quantised else None


def _send_buffer(peer: int, pieces: Sequence[tuple[Piece, Source]]) -> SendBuffer:
    num_bytes = sum(piece.num_bytes for piece, _ in pieces)
    (piece, elements), *others = pieces
    if _computed(elements):
        return SendBuffer(peer, num_bytes, None, tuple(pieces))
    tensors = cast(Sequence[Tensor], elements)
    in_one_run = (
        not others
        and len(tensors) == 1
        and tensors[0].is_contiguous()
        and tensors[0].shape == piece.size
    )
    if (
        in_one_run
        and tensors[0].dtype == getattr(torch, piece.copy.dtype)
        and not _converter(piece.copy, tensors, "exact")
    ):
        return SendBuffer(peer, num_bytes, tensors[0].flatten().view(torch.uint8), ())
    return SendBuffer(peer, num_bytes, None, tuple(pieces))


def _post(group: Any, step: MemberRound, out: Tensor, into: Tensor, scales: ScaleRule) -> OnTheWay:
    """Post a round: first the receives, for peers that are ahead, then each send as soon as it is packed."""
    unpack: list[tuple[SendBuffer, Tensor]] = []
    if not (step.receives or step.sends):
        return OnTheWay([], [])
    with batch(group) as works:
        for send_buffer, buffer in _places(step.receives, into):
            works.append((send_buffer.peer, group.recv([buffer], send_buffer.peer, 0)))
            if send_buffer.direct is None:
                unpack.append((send_buffer, buffer))
        for send_buffer, buffer in _places(step.sends, out):
            for piece, elements, place in send_buffer.stage(buffer):
                fill(piece.copy, [place], elements, scales)
            works.append((send_buffer.peer, group.send([buffer], send_buffer.peer, 0)))
    return OnTheWay(works, unpack)


def _places(
    send_buffers: Sequence[SendBuffer], buffer: Tensor
) -> Iterator[tuple[SendBuffer, Tensor]]:
    """Each message with the bytes that it is sent from or received in."""
    start = 0
    for send_buffer in send_buffers:
        yield (
            send_buffer,
            buffer[start : start + send_buffer.num_bytes]
            if send_buffer.direct is None
            else send_buffer.direct,
        )
        start += send_buffer.staged_bytes


def _finish(pending: OnTheWay | None, timeout_s: float, ask: PeerCheck) -> None:
    """Wait for a round, if there is one, and unpack it."""
    if pending is None:
        return
    wait(pending.works, timeout_s, ask)
    for send_buffer, buffer in pending.unpack:
        for _, elements, place in send_buffer.stage(buffer):
            torch._foreach_copy_(elements, [place] if len(elements) == 1 else list(place.split(1)))  # pyright: ignore


def _addresses(params: Params) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in params.items()}
