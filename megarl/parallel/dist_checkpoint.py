"""Saving and loading a training rank's state by Megatron's dist_checkpointing, across layouts."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver  # noqa: F401
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy  # noqa: F401 - else loaded too late
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from megarl.device import DEVICE
from megarl.parallel import lora_checkpoint
from megarl.parallel.fused_adam import keeps_remainders
from megarl.parallel.held_errors import forget_errors, hold_errors, raise_held
from megarl.parallel.model import Chunk
from megarl.parallel.muon import Muon
from megarl.parallel.optimizer import stepping
from megarl.parallel.stored_boxes import (
    loaded_states,
    loaded_weights,
    own_parts,
    saved_boxes,
    weights_in,
)
from megarl.parallel.unpickling import reading

# where a box begins in a checkpoint: (tensor, offsets)
Place = tuple[str, tuple[int, ...]]


@dataclass
class Pending:
    """A save whose files a thread is writing, or has written."""

    files: tuple[str, ...]  # of this rank, relative to the checkpoint's folder
    _writing: Future[Exception | None]
    _finalize: Sequence[Callable[[], None]]

    def is_written(self) -> bool:
        """Whether `finish` would wait for no file of this rank."""
        return self._writing.done()

    def wait(self) -> None:
        """Wait until this rank's state may change: the writer reads what was not copied."""
        self._writing.exception()

    def finish(self) -> None:
        """Wait for the files of this rank, then for those of all ranks; collective.

        An error of a file is raised when no other rank waits for this one: all may go on.
        """
        unwritten = self._writing.result()
        try:
            for step in self._finalize:
                step()
        except CheckpointException as error:
            # it is no Exception, and does not have the system's error
            raise RuntimeError(
                f"a rank could not write its part of the checkpoint: {error}"
            ) from unwritten
        raise_held()


def save(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    *,
    asynchronous: bool,
) -> Pending:
    """Write weights, optimizer and random states into an empty folder; collective.

    This rank needs memory for two boxes (`boxes.CHUNK_BYTES`), and asynchronous for copies: of its part of the
    weights and, where the optimizer is on the GPU, of its state. An optimizer's state on the host is read in place, so
    that `Pending.wait` comes before the next step.
    """
    _write_in_threads()
    hold_errors()
    forget_errors()
    start_states(optimizer)
    state = _weights(chunks)
    weights = weights_in(state)
    saved = {box.place: box for box in saved_boxes(weights, own_parts(optimizer, weights))}
    stored = [box.stored for box in saved.values()]
    # torch compares the boxes of all ranks itself
    request = dist_checkpointing.save(
        _sharded(state, stored) | {"step": _step(optimizer)},
        str(folder),
        validate_access_integrity=False,
        async_sharded_save=True,
    )
    assert request is not None
    rank_file = folder / f"rank-{dist.get_rank():05d}.pt"
    torch.save(random_state(), rank_file)
    # A rank whose peers write all of its tensors has no files and no async_fn.
    _, buckets, results = request.async_fn_args if request.async_fn else (None, [], None)
    sources = {place: box.values for place, box in saved.items()}
    if asynchronous:
        live = _storages(chunks)
        sources = {place: _frozen(values, live) for place, values in sources.items()}

    def write() -> Exception | None:
        """Returns the error of a file."""
        if not request.async_fn or results is None:
            return None
        filled = [
            (file, key, (values, _filled(tensors, sources)))
            for file, key, (values, tensors) in buckets
        ]
        request.async_fn(dist.get_rank(), filled, results)
        outcome = results.get()
        results.put(outcome)  # Megatron reads the queue later
        return outcome if isinstance(outcome, Exception) else None

    files = [os.path.relpath(file, folder) for file, _, _ in buckets]
    return Pending((rank_file.name, *files), _begin(write, asynchronous), request.finalize_fns)


def _begin(write: Callable[[], Exception | None], asynchronous: bool) -> Future[Exception | None]:
    """Write in a thread, or at once."""
    if asynchronous:
        writer = ThreadPoolExecutor(1, "checkpoint")
        writing = writer.submit(write)
        writer.shutdown(wait=False)
        return writing
    written: Future[Exception | None] = Future()
    written.set_result(write())
    return written


def load(
    folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer
) -> None:
    """Read what `save` wrote, in this layout or another, straight into weights and optimizer; collective.

    So does a checkpoint of before 26 November 2026, whose tensors are the same and are cut in other ways. The state of
    weights that were frozen cannot be created. The optimizer's settings stay those of the recipe. Random states are
    read if equally many ranks wrote them; otherwise they stay as seeded. Raises UserError for a file that is not what
    `save` writes.
    """
    start_states(optimizer)
    state = _weights(chunks)
    weights = weights_in(state)
    stored, take = loaded_states(weights, own_parts(optimizer, weights))
    random_states = None
    with reading(folder):
        step = _read(folder, chunks, state, [*loaded_weights(weights), *stored])
        if len(list(folder.glob("rank-*.pt"))) == dist.get_world_size():
            rank_file = folder / f"rank-{dist.get_rank():05d}.pt"
            random_states = torch.load(rank_file, weights_only=True)
    take()
    _set_steps(optimizer, step)
    if random_states is not None:
        set_random_state(random_states)


def load_weights(folder: Path, chunks: Sequence[DistributedDataParallel]) -> None:
    """Read only the weights of what `save` wrote, in any layout; collective. Raises UserError as `load` does."""
    state = _weights(chunks)
    with reading(folder):
        _read(folder, chunks, state, [*loaded_weights(weights_in(state))])


def _read(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    state: Mapping[str, Any],
    stored: Sequence[ShardedTensor],
) -> int:
    """Fill the tensors, and give modules their other state; the number of the optimizer's steps. state: `_weights`."""
    loaded: Any = dist_checkpointing.load(
        _sharded(state, stored), str(folder), validate_access_integrity=False
    )
    for index, chunk in enumerate(chunks):
        objects = loaded.get("objects", {}).get(_chunk_key(chunks, index))
        if objects:
            chunk.module.load_state_dict(objects, strict=False)
    return loaded["step"]


def _sharded(state: Mapping[str, Any], stored: Sequence[ShardedTensor]) -> dict[str, Any]:
    """What Megatron's dist_checkpointing saves or loads.

    The tensors, and by chunk what its modules save besides them, as TransformerEngine's do.
    """
    objects = {
        key: {name: value for name, value in of_chunk.items() if isinstance(value, ShardedObject)}
        for key, of_chunk in state.items()
    }
    return {
        "tensors": {str(number): tensor for number, tensor in enumerate(stored)},
        "objects": objects,
    }


def read_factors(folder: Path) -> dict[str, Tensor]:
    """The whole factors of adapters in what `save` wrote, by their names; in any process, without ranks.

    Raises UserError as `load` does.
    """
    reader = filesystem.FileSystemReader(folder)
    factors: dict[str, Tensor] = {}
    with reading(folder):
        for name, about in reader.read_metadata().state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata) and lora_checkpoint.is_stored_factor(name):
                factors[name] = torch.empty(about.size, dtype=about.properties.dtype)
        load_tensors(factors, storage_reader=reader, no_dist=True)
    return factors


def _chunk_key(chunks: Sequence[object], index: int) -> str:
    """The name that Megatron's optimizers give a model chunk."""
    if len(chunks) == 1:
        return "model"
    return f"model{index}"


def _step(optimizer: ChainedOptimizer) -> int:
    """How many steps were taken, which a rank without trained weights does not count; collective."""
    inner = [chained.optimizer for chained in stepping(optimizer)]
    counts = [
        state["step"]
        for inner_optimizer in inner
        for state in inner_optimizer.state.values()
        if "step" in state
    ]
    # a fused optimizer's
    counts += [
        group["step"]
        for inner_optimizer in inner
        for group in inner_optimizer.param_groups
        if "step" in group
    ]
    most = torch.tensor(max(map(int, counts), default=0), device=DEVICE)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _weights(chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """The weights that are trained: adapters and a head where a chunk has adapters, and else all."""
    by_chunk: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        module = cast(Chunk, chunk.module)
        if lora_checkpoint.has_adapters(module):
            weights = lora_checkpoint.sharded_weights(module)
        else:
            # Megatron fills the metadata, and reads it for multi-token prediction
            weights = module.sharded_state_dict(metadata={})
        by_chunk[_chunk_key(chunks, index)] = weights
    return by_chunk


def start_states(optimizer: ChainedOptimizer) -> None:
    """Create the optimizer's state, which it makes only in its first step and Megatron needs now."""
    for chained in stepping(optimizer):
        inner = chained.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            for on_host in inner.cpu_optimizers:
                _start_adamw(on_host)
            inner._sync_sub_optimizers_state_to_hdo()
        elif isinstance(inner, Muon):
            inner.start_state()
        elif isinstance(inner, torch.optim.AdamW):
            _start_adamw(inner)
        elif inner.state:
            continue
        elif chained.config.use_precision_aware_optimizer:
            # init_state_fn calls it without the second argument that TransformerEngine 2.14 wants
            for param in (param for group in inner.param_groups for param in group["params"]):
                inner.initialize_state(param, keeps_remainders(inner, param))
        elif chained.init_state_fn is not None:  # a fused optimizer before its first step
            chained.init_state_fn(inner, chained.config)


def _start_adamw(inner: torch.optim.AdamW) -> None:
    for param in (param for group in inner.param_groups for param in group["params"]):
        if not inner.state[param]:
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[param] = {"step": torch.zeros((), dtype=torch.float32), **moments}


def _set_steps(optimizer: ChainedOptimizer, step: int) -> None:
    """Set the number of steps taken: torch keeps it for each parameter, a fused optimizer for each group."""
    for chained in stepping(optimizer):
        inner = chained.optimizer
        for state in inner.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(step))
        if not isinstance(inner, (torch.optim.AdamW, HybridDeviceOptimizer)):
            for group in inner.param_groups:
                group["step"] = step


def _storages(chunks: Sequence[DistributedDataParallel]) -> set[int]:
    """Addresses of the storages that training will write."""
    held = (
        tensor
        for chunk in chunks
        for tensor in (*chunk.module.parameters(), *chunk.module.buffers())
    )
    return {tensor.untyped_storage().data_ptr() for tensor in held}


def _frozen(values: Callable[[], Tensor], live: set[int]) -> Callable[[], Tensor]:
    """A tensor as it is now: a copy on the host, unless it is an optimizer's own there, which only steps change."""
    tensor = values()
    address = tensor.untyped_storage().data_ptr()
    # a tensor that is made at each call, such as a master of weight and remainder, changes with the weights
    is_own = tensor.is_cpu and address == values().untyped_storage().data_ptr()
    if is_own and address not in live:
        return values
    copy = tensor.clone() if tensor.is_cpu else tensor.cpu()
    return lambda: copy


def _filled(
    tensors: Sequence[tuple[WriteItem, Tensor]],
    sources: dict[Place, Callable[[], Tensor]],
) -> Iterator[tuple[WriteItem, Tensor]]:
    """The boxes of a file with their values, each made when the one before it is written; empties `sources`."""
    for item, no_memory in tensors:
        assert item.index.offset is not None
        values = sources.pop((item.index.fqn, tuple(item.index.offset)))
        yield item, _alone(values()).view(no_memory.shape)


def _alone(tensor: Tensor) -> Tensor:
    """On the host, in memory of which a file has no more than the tensor itself."""
    on_host = tensor.cpu()
    if on_host.untyped_storage().nbytes() != on_host.nbytes:
        return on_host.clone()
    return on_host


class _NoCount:
    """A queue for a bucket's writer to report to; nobody waits, because the caller is the same thread."""

    def get(self) -> None: ...
    def task_done(self) -> None: ...


@cache
def _write_in_threads() -> None:
    """Write files in the calling thread: Megatron would fork processes, although torch, gRPC and CUDA have threads."""
    writer: Any = filesystem_async.FileSystemWriterAsync

    def write(
        transforms: list[Any], _: bool, rank: int, buckets: Sequence[Any], results: Any
    ) -> None:
        results_by_bucket: dict[int, Any] = {}
        for index, bucket in enumerate(buckets):
            outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
            writer.write_preloaded_data(
                transforms, index, bucket, outcome, _NoCount(), use_fsync=True
            )
            _, results_by_bucket[index] = outcome.get()
        failed = next(
            (result for result in results_by_bucket.values() if isinstance(result, Exception)), None
        )
        results.put(failed or results_by_bucket)

    writer.write_preloaded_data_multiproc = staticmethod(write)
    filesystem_async._get_write_results_queue = queue.SimpleQueue


def random_state() -> dict[str, Any]:
    """The state of every generator of this process, in types that torch loads with weights_only."""
    # Megatron's, one for each kind of parallel region
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "python": random.getstate(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            gauss,
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": tracker.get_states(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(state["megatron"])
