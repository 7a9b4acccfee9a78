"""One rank of the bench of adapters: it trains, tells what it holds, and sends its weights or adapters to engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from megarl import device
from megarl.config import Recipe
from megarl.device import Address
from megarl.parallel.optimizer import stepping
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.roles import lora_size, resolve, sent_lora
from megarl.resharding import lora_slots, sglang_map
from megarl.resharding.exchanges import Exchanges
from megarl.resharding.member import Stats
from megarl.resharding.payloads import PayloadName, exchanged, reshard_steps
from megarl.resharding.session import Session
from megarl.resharding.shards import param_table
from megarl.training import flops
from megarl.training.batching import SampleRef, plan_updates
from megarl.types import TrainSequence
from scripts.bench.resharding import wire
from scripts.bench.train import LR, TIMEOUT_S, cross_entropy


class Rank:
    """A training rank on a slot of its own, on which an engine of TP1 is, too; the parent calls its methods."""

    def __init__(
        self, rank: int, meet: Address, recipe: Recipe, sequences: Sequence[TrainSequence]
    ) -> None:
        from megarl.parallel.model import TRANSFORMER_ENGINE
        from megarl.parallel.pipeline import Norms
        from megarl.training.policy import PolicyRank, UpdateShare

        self._imports_bytes = device.held_bytes()
        self._trainer = PolicyRank(rank, resolve(recipe).policy, meet)
        lengths = [
            (len(sequence.token_ids_T), int(sequence.loss_mask_T.sum())) for sequence in sequences
        ]
        refs = [
            SampleRef(index, 0, tokens, learnt) for index, (tokens, learnt) in enumerate(lengths)
        ]
        layout, budget = self._trainer.layout, recipe.train.tokens_per_micro_batch
        work = flops.train_work(self._trainer.shape)
        options = {
            "updates": 1,
            "dp": layout.dp,
            "token_budget": budget,
            "aggregation": "token_mean",
            "work": work,
        }
        (update,) = plan_updates(refs, **options)
        rank_batches = update.micro_batches[layout.coords(rank).dp]
        batches = [[sequences[ref.group] for ref in batch] for batch in rank_batches]
        self._part = UpdateShare(
            batches, Norms(update.denominator, update.tokens, update.loss_tokens)
        )
        self._session = Session(
            meet=meet,
            run_id="bench",
            shape=self._trainer.shape,
            train=layout,
            engine=EngineLayout(count=recipe.placement.gpus, tp=1, ep=1),
            transformer_engine=TRANSFORMER_ENGINE,
            dtype=recipe.model.dtype,
            round_bytes=recipe.reshard.round_bytes,
            timeout_s=TIMEOUT_S,
            gpus_per_node=recipe.placement.gpus_per_node,
            verify="off",
            member=rank,
            lora=sent_lora(recipe, self._trainer.shape),
        )
        self._lora, self._version = lora_size(recipe.lora, self._trainer.shape), 0
        self._exchanges = Exchanges(self._session, self._trainer.params() | self._trainer.factors())
        self._targets: dict[PayloadName, dict[str, torch.Tensor]] = {}

    def step(self) -> float:
        """Seconds of an update, until all ranks have ended it."""
        import torch.distributed as dist

        dist.barrier()
        started = time.perf_counter()
        self._trainer.train_step(self._part, LR, cross_entropy)
        dist.barrier()
        return time.perf_counter() - started

    def begin_peak(self) -> None:
        """Forget the peak of the memory so far."""
        if device.DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            wire.begin_memory()

    def memory(self) -> dict[str, int]:
        """The most bytes since `begin_peak`, and those that the process held when it had made its imports.

        torch's device memory; without a GPU the resident set.
        """
        peak_bytes = (
            torch.cuda.max_memory_allocated() if device.DEVICE == "cuda" else wire.peak_memory()
        )
        return {"peak_bytes": peak_bytes, "imports_bytes": self._imports_bytes}

    def held(self) -> dict[str, int]:
        """Bytes of this rank's tensors; frozen: the weights that wait in host memory to be merged anew."""
        params, factors = self._trainer.params(), self._trainer.factors()
        model, merged = self._trainer._model, self._trainer._merged
        buffers = [
            buffer
            for chunk in model.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        optimizers = [wrapper.optimizer for wrapper in stepping(model.optimizer)]
        shards = [
            shard
            for optimizer in optimizers
            for group in optimizer.param_groups
            for shard in group["params"]
        ]
        pointers = {
            tensor.untyped_storage().data_ptr() for tensor in (*params.values(), *factors.values())
        }
        masters = [shard for shard in shards if shard.untyped_storage().data_ptr() not in pointers]
        states = [
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
        ]
        moments = [value for value in states if torch.is_tensor(value) and value.dim()]
        return {
            "weights_bytes": _bytes([*params.values()]),
            "factors_bytes": _bytes([*factors.values()]),
            "frozen_bytes": _bytes([*merged._frozen.values()]) if merged else 0,
            "grads_bytes": _bytes([buffer.grad_data for buffer in buffers]),
            "optimizer_bytes": _bytes([*masters, *moments]),
        }

    def merge(self) -> float:
        """Seconds of writing the sums into the weights, which a step has at its end; 0 where it has not."""
        started = time.perf_counter()
        self._trainer._write_merged()
        return time.perf_counter() - started if self._trainer._merged else 0.0

    def exchange(self) -> list[Stats]:
        """Bring the next version to the engines, as a reshard of a run does; the cost of each exchange."""
        steps = exchanged(reshard_steps(self._lora, has_weights=self._version > 0))
        self._version += 1
        self._trainer.round_weights(self._version)
        for payload in steps:
            self._targets.setdefault(payload, self._made_targets(payload))
        return [
            self._exchanges.of(step).run(self._version, self._version, self._targets[step])
            for step in steps
        ]

    def _made_targets(self, payload: PayloadName) -> dict[str, torch.Tensor]:
        """Tensors of the sizes that an engine's parameters, or its slots of adapters, have in SGLang."""
        shape, engine = self._session.shape, self._session.engine
        if payload == "weights":
            sizes = param_table(sglang_map.shards(shape, engine, 0))
        else:
            assert self._lora
            sizes = lora_slots.slot_sizes(shape, engine, 0, self._lora)
        dtype = getattr(torch, self._session.dtype)
        return {
            name: torch.zeros(size, dtype=dtype, device=device.DEVICE)
            for name, size in sizes.items()
        }

    def sockets(self) -> list[wire.Socket]:
        return wire.own_sockets()


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def serve(pipe: Connection, *arguments: Any) -> None:
    """Answer with the results of a rank's methods, until None comes."""
    rank = Rank(*arguments)
    for method in iter(pipe.recv, None):
        pipe.send(getattr(rank, method)())
