"""One training rank's part of a Megatron model: built, run, stepped, and moved out of the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from megarl import device
from megarl.cpu import megatron_patches
from megarl.model.lora_pairs import LoraPair
from megarl.numerics.parts import OutputPart
from megarl.parallel import (
    dist_checkpoint,
    fp8_layers,
    groups,
    host_offload,
    lora,
    model,
    optimizer,
    packing,
    shared_weights,
    state_bytes,
)
from megarl.parallel.finiteness import Finiteness
from megarl.parallel.fp8_layers import EngineNumbers
from megarl.parallel.layer_outputs import LayerRecorder
from megarl.parallel.local_spec import use_local_layers
from megarl.parallel.matrix_exchange import MatrixPart
from megarl.parallel.options import effective_options
from megarl.parallel.param_names import named_buffers, named_parameters
from megarl.parallel.pipeline import Pipeline
from megarl.parallel.replicas import Replicated, replicated_gradients, replicated_weights
from megarl.parallel.routing import Choices, Router, Routing
from megarl.parallel.shared_rows import pack_shared
from megarl.parallel.tp_attributes import set_tp_attributes
from megarl.placement.roles import Role
from megarl.timeline import recorder
from megarl.types import TrainSequence
from megarl.types.arrays import TokenArrays
from megarl.types.tensors import ModelChunks, NamedTensors


class RankModel:
    """Rank `rank` of a Megatron world. Every method but `params` is collective.

    The constructor meets the other ranks at the store and builds this rank's chunks with undefined weights; once they
    are loaded, `make_optimizer` copies them. Raises UserError for a Megatron option that does not fit. tp_split_params:
    this rank's weights that are split over TP, as `megatron_map.split_params` says. is_published: engines map the
    parameters, which therefore never move. pairs: the factors of this rank's adapters, where the recipe has `lora`; the
    weights themselves are frozen then. numbers: of the engines, with which it computes; None: plain ones. matrix_parts:
    this rank's parts of all matrices, for `train.optimizer_name: muon`. A role that does not train has no gradients and
    no optimizer.
    """

    def __init__(
        self,
        rank: int,
        role: Role,
        store: Store,
        *,
        tp_split_params: Collection[str],
        numbers: EngineNumbers | None = None,
        is_published: bool = True,
        pairs: Sequence[LoraPair] = (),
        matrix_parts: Sequence[MatrixPart] = (),
    ) -> None:
        recipe = role.recipe
        self._dtype = model.DTYPES[recipe.model.dtype]
        self._select_layers(role, rank)
        train = recipe.train
        layout = role.layout
        shape = role.shape
        facts = role.model.required_facts
        self.rank = rank
        self.shape = shape
        self.layout = layout
        self._rows = self._row_multiple(numbers)
        self._train = train
        self._matrix_parts = matrix_parts
        self._asynchronous = recipe.checkpoint.asynchronous
        self.at = layout.coords(rank)
        self.is_last_stage = self.at.pp == layout.pp - 1
        config = model.transformer_config(facts, shape, layout, self._dtype, train, self.at.pp)
        groups.join(store, rank, layout, recipe.run.seed, recipe.run.timeout_s)
        self.communicator_bytes = groups.open_communicators()
        routing = Routing()
        chunks = model.build_chunks(config, facts, shape, layout, rank, routing)
        set_tp_attributes(chunks, tp_split_params, config.sequence_parallel)
        if numbers:
            fp8_layers.use_engine_numbers(chunks, numbers)
        if not train.mtp_loss:
            model.freeze_mtp(chunks)
        size = role.lora
        self.adapters = lora.attach(chunks, pairs, size, recipe.run.seed) if size else None
        for head in shared_weights.heads(chunks):
            head.requires_grad_(role.trains)
        self._unwrapped: ModelChunks = chunks
        self._trains = role.trains
        self._is_published = is_published
        self._is_offloaded = False
        self._offloaded: host_offload.Offloaded = []
        self._shared: frozenset[str] = frozenset()  # weights that are in another process's memory
        self._saving: dist_checkpoint.Pending | None = None
        self.chunks: Sequence[Any] = chunks
        self.finiteness = Finiteness(chunks, layout.virtual_stages(self.at.pp))
        if role.trains:
            self.chunks = model.wrap(config, chunks, train)
            self.finiteness.watch_gradients(self.chunks)
        self.pipeline = self._pipeline(routing)

    def _select_layers(self, role: Role, rank: int) -> None:
        """Prepare the device, and the layers that it has."""
        if device.DEVICE == "cpu":
            megatron_patches.patch_megatron()
            use_local_layers()
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(role.recipe.placement.gpu_of(role.first_slot + rank))
            model.select_layers(role.recipe.train, self._dtype)

    def _row_multiple(self, numbers: EngineNumbers | None) -> int:
        """The tokens that this rank has a multiple of; prepares TransformerEngine for fp8 before layers are built."""
        if numbers is None or not model.TRANSFORMER_ENGINE:
            return 1
        fp8_layers.make_recipes(numbers.backward)
        return fp8_layers.row_multiple(self.layout.tp)

    def _pipeline(self, routing: Routing) -> Pipeline:
        train = self._train
        return Pipeline(
            self.chunks,
            routing,
            self.finiteness,
            self.layout.max_cp > 1,
            self.shape.vocab_size,
            train.aux_loss,
            train.z_loss,
            train.mtp_loss,
        )

    def pack(
        self, sequences: Sequence[TrainSequence], *arrays: TokenArrays | None
    ) -> packing.PackedRow:
        """A micro-batch as of `packing.pack`, split over the data-parallel ranks that have it or as the layout says."""
        pack = pack_shared if self._train.share_prefixes else packing.pack
        return pack(sequences, *arrays, split=self._split(sequences), device=device.DEVICE)

    def _split(self, sequences: Sequence[TrainSequence]) -> packing.Split:
        layout = self.layout
        ranks = sequences[0].cp if sequences else 1
        if ranks > 1:
            cp_rank = self.at.dp % ranks
        else:
            ranks = layout.cp
            cp_rank = self.at.cp
        return packing.Split(layout.tp, ranks, cp_rank, layout.tokens_align, self._rows)

    def layer_outputs(
        self,
        sequences: Sequence[TrainSequence],
        choices: Callable[[packing.PackedRow], Choices],
        num_terms: int,
    ) -> list[OutputPart]:
        """What each operation of this rank's layers gives for a micro-batch that every data-parallel rank has.

        choices: of the row, the experts to replay. num_terms: in which sums over TP are recorded. Prefixes are not
        shared, whatever the recipe says. Collective.
        """
        row = packing.pack(sequences, split=self._split(sequences), device=device.DEVICE)
        padding = packing.pack((), split=self._split(()), device=device.DEVICE)
        rows = [row] + [padding] * (self.layout.batch_multiple - 1)
        layer_recorder = LayerRecorder(
            row,
            self.pipeline.routing,
            self.shape,
            self.layout,
            self.at,
            num_terms=num_terms,
            has_adapters=self.adapters is not None,
        )

        def keep(of_row: packing.PackedRow, logp_T: Tensor, _: Tensor) -> tuple[Tensor, None]:
            if of_row is row:
                layer_recorder.add_logprobs(logp_T)
            return logp_T.sum(), None

        with layer_recorder.recording(self._unwrapped):
            self.pipeline.run(rows, keep, choices=[choices(each) for each in rows])
        return layer_recorder.parts

    def make_optimizer(self) -> None:
        """Make the optimizer's state from this rank's weights as they are now."""
        self.optimizer = optimizer.build_optimizer(
            self.chunks, self._train, self._dtype, self._matrix_parts
        )

    def options(self) -> dict[str, dict[str, Any]]:
        """Megatron's options that this rank runs with, as a recipe writes them under `train`."""
        names = model.default_field_names(self.shape)
        optimizer_config = optimizer.optimizer_config(
            self._train, self._dtype, optimizer.offloads(self._train)
        )
        return effective_options(
            self._train, self.chunks[0].config, self.chunks[0].ddp_config, optimizer_config, names
        )

    def params(self) -> dict[str, Tensor]:
        """This rank's weights by the map's names: views of long-lived buffers that every step updates in place."""
        return model.params(self._unwrapped)

    def factors(self) -> dict[str, Tensor]:
        """This rank's factors of adapters by the map's names: such views as well."""
        return model.factors(self._unwrapped)

    def share(self, weights: NamedTensors) -> None:
        """Compute with these frozen weights of another process, of the same names, in place of own ones."""
        self._shared = shared_weights.bind(self._unwrapped, weights)

    def moe_layers(self) -> list[int]:
        """All decoder layers with experts, in the whole model."""
        return [layer for layer in range(self.shape.num_layers) if not self.shape.is_dense(layer)]

    def own_moe_layers(self) -> set[int]:
        """Those of `moe_layers` that this pipeline rank has."""
        modules = (module for chunk in self._unwrapped for module in chunk.modules())
        return {module.layer for module in modules if isinstance(module, Router)}

    def replicated_weights(self) -> Replicated:
        """The weights that other ranks hold too; without those to which each rank adds its adapters."""
        only_trained = self.adapters is not None and self.adapters.are_in_weights
        return replicated_weights(self._unwrapped, only_trained=only_trained)

    def replicated_gradients(self) -> Replicated:
        """The gradients that other ranks hold too, between a backward pass and the step."""
        return replicated_gradients(self._unwrapped)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def step(self, lr: float) -> float:
        """One optimizer step on the accumulated gradients; returns their norm before clipping.

        Raises FloatingPointError when it is not finite.
        """
        self._wait_for_save()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with recorder.span("optimizer"):
            _, grad_norm, _ = self.optimizer.step()
        self.optimizer.zero_grad()
        if grad_norm is None or not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}")
        return float(grad_norm)

    def save(self, folder: Path) -> dist_checkpoint.Pending:
        """Write everything that a resumed run needs, or with `checkpoint.asynchronous` begin to."""
        self._saving = dist_checkpoint.save(
            folder, self.chunks, self.optimizer, asynchronous=self._asynchronous
        )
        return self._saving

    def _wait_for_save(self) -> None:
        """Before the optimizer's state changes, which a save may be reading."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def load(self, folder: Path) -> None:
        """Resume from what `save` wrote, in this layout or another."""
        self._wait_for_save()
        dist_checkpoint.load(folder, self.chunks, self.optimizer)

    def load_weights(self, folder: Path) -> None:
        """The weights alone of what `save` wrote, in any layout."""
        dist_checkpoint.load_weights(folder, self.chunks)

    def state_bytes(self) -> state_bytes.StateBytes:
        """What this rank trains, its buffers and its optimizer's state, wherever their memory is now."""
        trained: list[Tensor] = [
            param for _, param in named_parameters(self._unwrapped) if param.requires_grad
        ]
        trained += [
            buffer for name, buffer in named_buffers(self._unwrapped) if name not in self._shared
        ]
        own = [host_offload.contents(tensor, self._offloaded) for tensor in trained]
        return state_bytes.StateBytes(
            own + state_bytes.optimizer_tensors(self.optimizer, self._unwrapped)
        )

    def offload(self) -> None:
        """Free the gradients, move parameters that no engine maps to the host, and on a GPU the optimizer's state.

        Nothing happens where that is done already.
        """
        if self._is_offloaded:
            return
        self._is_offloaded = True
        if self._trains:
            for chunk in self.chunks:
                chunk.offload_grad_buffers(empty_cache=False)
            if not optimizer.offloads(self._train):
                optimizer.move_optimizer(self.optimizer, self.chunks, "cpu")
        if not self._is_published:
            unshared = {
                name: tensor
                for name, tensor in (self.params() | self.factors()).items()
                if name not in self._shared
            }
            self._offloaded = host_offload.offload_params(unshared)
        device.empty_cache()  # after all of it has moved: the engine resumes in the free memory

    def onload(self) -> None:
        """Undo offload; gradients come back as zeros."""
        if not self._is_offloaded:
            return
        self._is_offloaded = False
        if not self._is_published:
            host_offload.onload_params(self._offloaded)
            self._offloaded = []
        if not self._trains:
            return
        if not optimizer.offloads(self._train):
            optimizer.move_optimizer(self.optimizer, self.chunks, device.DEVICE)
        for chunk in self.chunks:
            chunk.restore_grad_buffers()
