"""Saving and loading a training rank's state by Megatron's dist_checkpointing, across layouts."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver  # noqa: F401
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy  # noqa: F401 - else loaded too late
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from megarl.device import DEVICE
from megarl.parallel import groups, lora_checkpoint
from megarl.parallel.model import Chunk
from megarl.parallel.optimizer import stepping
from megarl.parallel.unpickling import reading


@dataclass
class Pending:
    """A save whose tensors are copied, and whose files a thread is writing."""

    files: tuple[str, ...]  # of this rank, relative to the checkpoint's folder
    _writing: Future[Exception | None]
    _finalize: Sequence[Callable[[], None]]

    def finish(self) -> None:
        """Wait for the files of this rank, then for those of all ranks; collective."""
        unwritten = self._writing.result()
        try:
            for step in self._finalize:
                step()
        except CheckpointException as error:
            # it is no Exception, and does not have the system's error
            raise RuntimeError(
                f"a rank could not write its part of the checkpoint: {error}"
            ) from unwritten


def save(
    folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer
) -> Pending:
    """Begin to write weights, optimizer and random states into an empty folder; collective.

    All tensors are copied before this returns, so that training can continue.
    """
    _write_in_threads()
    shared_out = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy(), groups.dp_cp_group()
    )
    request = dist_checkpointing.save(
        _state(chunks, optimizer, is_loading=False),
        str(folder),
        shared_out,
        async_sharded_save=True,
    )
    assert request is not None
    rank_file = folder / f"rank-{dist.get_rank():05d}.pt"
    torch.save(_random_state(), rank_file)
    # A rank whose data-parallel peers write all of its tensors has no files and no async_fn.
    _, buckets, results = request.async_fn_args if request.async_fn else (None, [], None)
    live = _storages(chunks)
    copies = [
        (file, key, (values, _copied(tensors, live))) for file, key, (values, tensors) in buckets
    ]

    def write() -> Exception | None:
        """Returns the error of a file."""
        if not request.async_fn or results is None:
            return None
        request.async_fn(dist.get_rank(), copies, results)
        outcome = results.get()
        results.put(outcome)  # Megatron reads the queue later
        return outcome if isinstance(outcome, Exception) else None

    files = [os.path.relpath(file, folder) for file, _, _ in copies]
    writer = ThreadPoolExecutor(1, "checkpoint")
    writing = writer.submit(write)
    writer.shutdown(wait=False)
    return Pending((rank_file.name, *files), writing, request.finalize_fns)


def load(
    folder: Path, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer
) -> None:
    """Read what `save` wrote, in this layout or another; collective.

    The state of weights that were frozen cannot be created. The optimizer's settings stay those of the recipe. Random
    states are read if equally many ranks wrote them; otherwise they stay as seeded. Raises UserError for a file that is
    not what `save` writes.
    """
    _keep_steps()
    random_states = None
    with reading(folder):
        state: Any = dist_checkpointing.load(
            _state(chunks, optimizer, is_loading=True), str(folder)
        )
        if len(list(folder.glob("rank-*.pt"))) == dist.get_world_size():
            rank_file = folder / f"rank-{dist.get_rank():05d}.pt"
            random_states = torch.load(rank_file, weights_only=True)
    _take_weights(chunks, state)
    for index, chained in enumerate(stepping(optimizer)):
        chained.load_parameter_state_from_fully_reshardable(
            state.get("optimizer", {}).get(index, {})
        )
    _set_steps(optimizer, state["step"])
    if random_states is not None:
        _set_random_state(random_states)


def load_weights(folder: Path, chunks: Sequence[DistributedDataParallel]) -> None:
    """Read only the weights of what `save` wrote, in any layout; collective. Raises UserError as `load` does."""
    with reading(folder):
        state: Any = dist_checkpointing.load(_weights(chunks), str(folder))
    _take_weights(chunks, state)


def read_factors(folder: Path) -> dict[str, torch.Tensor]:
    """The whole factors of adapters in what `save` wrote, by their names; in any process, without ranks.

    Raises UserError as `load` does.
    """
    reader = filesystem.FileSystemReader(folder)
    factors: dict[str, torch.Tensor] = {}
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


def _state(
    chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer, is_loading: bool
) -> dict[str, Any]:
    """Weights, master weights and moments by the weights' names, and the number of the optimizer's steps.

    Megatron's own state of an optimizer also has the parameter groups, which differ between EP 1, where experts are
    among the dense weights, and EP > 1; and a rank on which nothing is trained cannot make it.
    """
    _start_states(optimizer)
    state = _weights(chunks)
    optimizers = {
        index: chained.sharded_param_state_fully_reshardable(state, is_loading, metadata={})
        for index, chained in enumerate(stepping(optimizer))
    }
    return state | {"optimizer": optimizers, "step": _step(optimizer)}


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


def _take_weights(chunks: Sequence[DistributedDataParallel], state: Mapping[str, Any]) -> None:
    for index, chunk in enumerate(chunks):
        module = cast(Chunk, chunk.module)
        loaded = state.get(_chunk_key(chunks, index), {})
        if lora_checkpoint.has_adapters(module):
            lora_checkpoint.take_weights(module, loaded)
        else:
            module.load_state_dict(loaded)


def _start_states(optimizer: ChainedOptimizer) -> None:
    """Create AdamW's state, which it makes only in its first step and Megatron needs now."""
    for chained in stepping(optimizer):
        inner = chained.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            for on_host in inner.cpu_optimizers:
                _start_adamw(on_host)
            inner._sync_sub_optimizers_state_to_hdo()
        elif isinstance(inner, torch.optim.AdamW):
            _start_adamw(inner)
        elif (
            not inner.state and chained.init_state_fn is not None
        ):  # a fused optimizer before its first step
            chained.init_state_fn(inner, chained.config)


def _start_adamw(inner: torch.optim.AdamW) -> None:
    for param in (param for group in inner.param_groups for param in group["params"]):
        if not inner.state[param]:
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            inner.state[param] = {"step": torch.zeros((), dtype=torch.float32), **moments}


def _set_steps(optimizer: ChainedOptimizer, step: int) -> None:
    """Set the number of steps taken (torch keeps it for each parameter, a fused optimizer for each group).

    On the host also clone the moments: they are views of the tensors that were read, which hold the state of all
    data-parallel ranks.
    """
    for chained in stepping(optimizer):
        inner = chained.optimizer
        is_on_host = isinstance(inner, HybridDeviceOptimizer)
        for state in inner.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(step))
            if is_on_host:
                state.update({name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")})
        if not isinstance(inner, (torch.optim.AdamW, HybridDeviceOptimizer)):
            for group in inner.param_groups:
                group["step"] = step
        if is_on_host:
            # the master weights, which were copied from the file
            inner._sync_sub_optimizers_state_to_hdo()


@cache
def _keep_steps() -> None:
    """Give Megatron the `step` of torch's AdamW, which it expects, in vain, among a parameter's loaded tensors."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(
        self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        group_index, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group_index]["params"][order]]
        original(
            self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors
        )

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _storages(chunks: Sequence[DistributedDataParallel]) -> set[int]:
    """Addresses of the storages that training will write."""
    held = (
        tensor
        for chunk in chunks
        for tensor in (*chunk.module.parameters(), *chunk.module.buffers())
    )
    return {tensor.untyped_storage().data_ptr() for tensor in held}


def _copied(
    tensors: Sequence[tuple[Any, torch.Tensor]], live: set[int]
) -> list[tuple[Any, torch.Tensor]]:
    """Copies on the host; on CPU only tensors in `live` storages are copied: others were gathered for this save."""
    return [
        (
            item,
            tensor.clone()
            if tensor.is_cpu and tensor.untyped_storage().data_ptr() in live
            else tensor.cpu(),
        )
        for item, tensor in tensors
    ]


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


def _random_state() -> dict[str, Any]:
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


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(state["megatron"])
