"""Which boxes of a checkpoint's tensors a rank writes and reads: of its weights, and of the optimizer's state.

Names, shapes and offsets are those of Megatron's sharded state dicts. A weight is written by the ranks among which its
optimizer is sharded, by each the elements that it steps on, and their state with them: nothing is sent to another rank,
and no rank needs memory for more than a box. Nor does reading: torch intersects a rank's boxes with those of the file,
whatever the layout in which it was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megarl.device import DEVICE
from megarl.parallel.boxes import CHUNK_BYTES, Box, boxes
from megarl.parallel.fused_adam import joined, keeps_remainders, remainders
from megarl.parallel.muon import MOMENTUM_STATE, Muon
from megarl.parallel.optimizer import stepping
from megarl.parallel.shard_ranges import shard_ranges, stepped

# The state of a weight, by the names that the tensors have in a checkpoint; all float32.
STATES = ("param", "exp_avg", "exp_avg_sq")  # AdamW's
MUON_STATES = ("param", MOMENTUM_STATE)


@dataclass(frozen=True)
class Elements:
    """Values of a parameter's elements from `start` to `end`. flat: the tensor with them, as it is at the call."""

    start: int
    end: int
    dtype: torch.dtype
    flat: Callable[[], Tensor]

    def inside(self, box: Box) -> Tensor:
        """A view of the elements of a box, whose numbers are those of the parameter."""
        part = self.flat()[box.start - self.start : box.end - self.start]
        return part.view(box.sizes)


@dataclass(frozen=True)
class Weight:
    """A block of a parameter, or of a buffer: its elements from `start` on are, in `shard`'s shape, a box of a tensor.

    The fused projection of a gated MLP is two blocks.
    """

    param: Tensor
    start: int
    shard: ShardedTensor

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shard.local_shape)

    @property
    def is_main(self) -> bool:
        """Whether no other rank writes a weight that is not trained."""
        return is_main_replica(self.shard.replica_id)

    def values(self, start: int, end: int) -> Elements:
        """Elements of the parameter itself."""
        values = self.param.detach().view(-1)[start:end]
        return Elements(start, end, values.dtype, lambda: values)

    def boxes(self, held: Elements, most: int) -> Iterator[Box]:
        """Boxes of at most `most` elements that hold those of the block among `held`, by the parameter's numbers."""
        first = max(held.start, self.start) - self.start
        last = min(held.end, self.end) - self.start
        for box in boxes(self.shard.local_shape, first, last, most):
            yield box._replace(start=self.start + box.start)

    def stored(self, name: str, box: Box, values: Tensor) -> ShardedTensor:
        """A box of the tensor `name` with its values, as Megatron's dist_checkpointing saves and loads it."""
        shard = self.shard
        axes = shard.prepend_axis_num
        sizes = (1,) * axes + box.sizes
        offsets = zip(shard.global_offset, (0,) * axes + box.offsets, strict=True)
        return ShardedTensor(
            key=name,
            data=values.view(sizes),
            dtype=values.dtype,
            local_shape=sizes,
            global_shape=shard.global_shape,
            global_offset=tuple(outer + inner for outer, inner in offsets),
            axis_fragmentations=None,  # boxes are no regular grid
            allow_shape_mismatch=shard.allow_shape_mismatch,
        )


def weights_in(state: Mapping[str, Any]) -> list[Weight]:
    """The blocks of all tensors of a sharded state dict, whose data are a module's own parameters and buffers."""
    weights = []
    for base in nested_values(dict(state)):
        if isinstance(base, ShardedTensor) and base.data is not None:
            weights.append(Weight(base.data, 0, base))
        if isinstance(base, ShardedTensorFactory):
            weights += [
                Weight(base.data, _first_element(shard, base.data), shard)
                for shard in nested_values(base.build())
            ]
    return weights


def _first_element(shard: ShardedTensor, param: Tensor) -> int:
    """The number of a shard's first element among those of the parameter that it is a view of."""
    assert shard.data is not None and shard.data.is_contiguous(), f"{shard.key} is no block"
    return (shard.data.data_ptr() - param.data_ptr()) // param.element_size()


@dataclass(frozen=True)
class OwnPart:
    """The elements of a trained parameter, from `start` to `end` (maybe none), whose state this rank has.

    is_written: whether the ranks that share the optimizer write the parameter. Others may hold it as well.
    """

    optimizer: Any
    param: Tensor
    start: int
    end: int
    is_written: bool

    @property
    def states(self) -> tuple[str, ...]:
        """The names of its state: STATES, or MUON_STATES of a matrix; none where this rank has no element."""
        if self.start == self.end:
            return ()
        if isinstance(self._inner, Muon) and self._inner.is_matrix(self._stepped):
            return MUON_STATES
        return STATES

    def state(self, name: str) -> Tensor:
        """One of `states`, flat: the optimizer's own tensor, or a copy of a compressed one."""
        if self._is_compressed:
            held = self._inner.get_unscaled_state(self._stepped, _held_name(name))
            if self._is_remainder(name):
                return joined(self._stepped, held)
            return held.float()
        if isinstance(self._inner, HybridDeviceOptimizer):
            return self._inner.state[self._stepped][_held_name(name)].detach()
        if name == "param":
            return self._stepped.detach()
        return self._inner.state[self._stepped][name]

    def room(self, name: str) -> Tensor:
        """A flat tensor to read one of `states` into: the optimizer's own, or a new one, which `take` then reads."""
        if self._is_compressed:
            return torch.empty(self.end - self.start)
        return self.state(name)

    def take(self, name: str, room: Tensor) -> None:
        """Go on from what was read into `room`; the weights have been read."""
        if self._is_compressed:
            values = room.to(self._stepped.device)
            if self._is_remainder(name):
                values = remainders(values, self._stepped)
            self._inner.set_scaled_state(self._stepped, _held_name(name), values)

    def _is_remainder(self, name: str) -> bool:
        """Whether a compressed optimizer has of this state only what the weights lack."""
        return name == "param" and keeps_remainders(self._inner, self._stepped)

    @property
    def _inner(self) -> Any:
        """The optimizer that Megatron's DistributedOptimizer steps."""
        return self.optimizer.optimizer

    @property
    def _stepped(self) -> Tensor:
        """What it steps on in the parameter's place."""
        return stepped(self.optimizer, self.param)

    @property
    def _is_compressed(self) -> bool:
        """TransformerEngine's FusedAdam keeps its state in types and scales of its own."""
        is_precise = self.optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        return is_precise and not isinstance(self._inner, HybridDeviceOptimizer)


def _held_name(name: str) -> str:
    """The name of one of STATES in optimizers that keep master weights among their state."""
    if name == "param":
        return "master_param"
    return name


def own_parts(optimizer: ChainedOptimizer, weights: Sequence[Weight]) -> dict[Tensor, OwnPart]:
    """By parameter, this rank's part of everything that is trained; collective."""
    mains = {weight.param for weight in weights if weight.is_main}
    parts: dict[Tensor, OwnPart] = {}
    for chained in stepping(optimizer):
        params = [param for buffer in chained.buffers for param in buffer.param_index_map]
        # the ranks that share an optimizer hold all of its parameters' state: where one has the main replica, all write
        is_written = torch.tensor([param in mains for param in params], device=DEVICE).int()
        dist.all_reduce(is_written, dist.ReduceOp.MAX, group=chained.data_parallel_group)
        ranges = shard_ranges(chained)
        for param, writes in zip(params, is_written.tolist(), strict=True):
            start, end = ranges.get(param, (0, 0))
            parts[param] = OwnPart(chained, param, start, end, bool(writes))
    unknown = len(parts.keys() - {weight.param for weight in weights})
    assert not unknown, f"{unknown} trained parameters are in no sharded state dict"
    return parts


@dataclass(frozen=True)
class SavedBox:
    """A box that this rank writes. stored: its place, without memory; values: its tensor, on whatever device."""

    stored: ShardedTensor
    values: Callable[[], Tensor]

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """(tensor, offsets)."""
        return self.stored.key, self.stored.global_offset


def saved_boxes(weights: Sequence[Weight], parts: Mapping[Tensor, OwnPart]) -> Iterator[SavedBox]:
    """Everything that this rank writes. parts: as of `own_parts`."""
    for weight in weights:
        for name, held in _written(weight, parts.get(weight.param)):
            for box in weight.boxes(held, CHUNK_BYTES // held.dtype.itemsize):
                no_memory = torch.empty(box.sizes, dtype=held.dtype, device="meta")
                stored = weight.stored(name, box, no_memory)
                yield SavedBox(stored, partial(held.inside, box))


def _written(weight: Weight, part: OwnPart | None) -> Iterator[tuple[str, Elements]]:
    """The stored tensors of a weight with the elements that this rank writes."""
    name = weight.shard.key
    if part is None and weight.is_main:
        yield name, weight.values(weight.start, weight.end)
    if part is None or not part.is_written:
        return
    yield name, weight.values(part.start, part.end)
    for state in part.states:
        values = partial(part.state, state)
        yield _state_name(state, name), Elements(part.start, part.end, torch.float32, values)


def _state_name(state: str, name: str) -> str:
    return f"optimizer.state.{state}.{name}"


def loaded_weights(weights: Sequence[Weight]) -> Iterator[ShardedTensor]:
    """The blocks in which the weights are read, straight into the parameters."""
    for weight in weights:
        yield from _read(weight, weight.shard.key, weight.values(weight.start, weight.end))


def loaded_states(
    weights: Sequence[Weight], parts: Mapping[Tensor, OwnPart]
) -> tuple[list[ShardedTensor], Callable[[], None]]:
    """The boxes in which the state of this rank's parts is read; and what is to be called once they are."""
    rooms = {
        (param, state): part.room(state) for param, part in parts.items() for state in part.states
    }
    stored: list[ShardedTensor] = []
    for weight in weights:
        part = parts.get(weight.param)
        if part is None:
            continue
        for state in part.states:
            room = rooms[weight.param, state]
            held = Elements(part.start, part.end, room.dtype, partial(Tensor.view, room, -1))
            stored += _read(weight, _state_name(state, weight.shard.key), held)

    def take() -> None:
        for (param, state), room in rooms.items():
            parts[param].take(state, room)

    return stored, take


def _read(weight: Weight, name: str, held: Elements) -> Iterator[ShardedTensor]:
    for box in weight.boxes(held, most=held.end - held.start):
        yield weight.stored(name, box, held.inside(box))
