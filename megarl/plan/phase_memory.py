"""The memory of every GPU in each phase, and of every node's host: arithmetic, without a GPU.

Memory changes hands as in fleet/memory.py: on GPUs that models and engines share, the model or engine that computes
holds the memory, next to the policy's parameters. Parameters are those of Megatron's real modules (model_size.py);
activations are in activations.py, an engine's memory in engine_memory.py. Nothing here was measured on a GPU;
assumptions are constants that are marked so.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megarl.checkpoints.hf_export import FILE_BYTES
from megarl.config import CheckpointConfig, Recipe
from megarl.config.hardware import Hardware
from megarl.parallel.boxes import CHUNK_BYTES
from megarl.placement.roles import (
    Phase,
    RoleName,
    engine_layout,
    reference_copy,
    shared_slots,
    trains_merged,
)
from megarl.placement.train_layout import TrainLayout
from megarl.plan.activations import activation_bytes, forward_bytes, logits_bytes
from megarl.plan.adapter_sizes import adapter_slot_bytes
from megarl.plan.batch import RankWork, Samples, samples_bytes
from megarl.plan.engine_memory import (
    MIB,
    Kv,
    cache_tokens,
    kept_bytes,
    kv_of,
    most_states,
    request_bytes,
    running_bytes,
    settings_of,
    token_bytes,
    weight_bytes,
    with_states,
)
from megarl.plan.fp8_training import fp8_linears_of
from megarl.plan.memory_parts import Parts
from megarl.plan.model_size import ModelSize, ModelSizes
from megarl.plan.muon_cost import SECOND_MOMENT_BYTES
from megarl.plan.optimizer_memory import GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, state_bytes
from megarl.plan.turns import tools_bytes
from megarl.rollout.sglang.batch_sizes import step_sequences
from megarl.types import UserError

# assumption: of a process's CUDA context with its kernels, on recent cards
CONTEXT_BYTES = 600 * MIB
# assumption: of activations and logits, blocks that torch's allocator holds and cannot use
FRAGMENTED_SHARE = 0.06
# parallel/dist_checkpoint.py: of each rank that writes a checkpoint, a box on its way and the one that follows it
CHUNKS = 2
# recovery/state_copies.py: the state of a step is kept until that of the next is whole
COPY_GENERATIONS = 2
SCRATCH_BYTES = 10 * 128  # resharding/execute.py: of each column of a strip that is quantised
# torch rounds pinned memory up to powers of two: the mean of sizes that fall anywhere
PINNED_SHARE = 1.4
# assumption: of the host, each process of a GPU: libraries, CUDA's own, samples on their way
PROCESS_BYTES = 6 << 30
PHASES: tuple[Phase, ...] = ("rollout", "score", "critic", "train", "reshard")
COMPUTES: Mapping[str, RoleName] = {"train": "policy", "critic": "critic", "score": "reward_model"}


@dataclass(frozen=True)
class MemoryPlan:
    """device: of each phase the fullest slot's parts; fullest_slot: which; slot_bytes: of each phase all slots' totals.

    host: bytes of the fullest node's host by purpose. kv: of one engine.
    """

    capacity_bytes: int
    device: dict[str, Parts]
    fullest_slot: dict[str, int]
    slot_bytes: dict[str, list[int]]
    host: dict[str, int]
    host_capacity_bytes: int
    kv: Kv
    errors: list[UserError] = field(default_factory=list)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def peak_phase(self) -> str:
        return max(self.device, key=lambda phase: self.device[phase].total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest GPU."""
        return self.device[self.peak_phase].total_bytes


def plan_memory(
    recipe: Recipe,
    hardware: Hardware,
    sizes: ModelSizes,
    samples: Samples,
    work: RankWork,
) -> MemoryPlan:
    """The memory of every phase, without errors; the recipe's layouts must have no error.

    work: of the policy's ranks.
    """
    count = _SlotMemory(recipe, hardware, sizes, math.ceil(work.micro_batches))
    phases = [phase for phase in PHASES if COMPUTES.get(phase, "policy") in sizes]
    tables = {phase: count.parts(phase) for phase in phases}
    totals = {phase: [parts.total_bytes for parts in table] for phase, table in tables.items()}
    fullest = {phase: total.index(max(total)) for phase, total in totals.items()}
    return MemoryPlan(
        capacity_bytes=hardware.memory_bytes,
        device={phase: tables[phase][slot] for phase, slot in fullest.items()},
        fullest_slot=fullest,
        slot_bytes=totals,
        host=count.host(samples, work.copies),
        host_capacity_bytes=hardware.host_bytes,
        kv=kv_of(
            recipe, count.tokens, count.token_bytes, samples.running_tokens, count.most_states
        ),
    )


def cannot_train(sizes: ModelSizes, micro_batches: int, memory_bytes: int) -> bool:
    """Whether some model's rank needs more memory while it learns than a GPU has, even with nothing else on it."""
    ranks = [
        _StageRank(size, stage, micro_batches)
        for size in sizes.values()
        if size.trains
        for stage in range(size.layout.pp)
    ]
    # what computes is counted last, because it takes longest
    return any(rank.parts.total_bytes > memory_bytes for rank in ranks) or any(
        (rank.parts + rank.at_work).total_bytes > memory_bytes for rank in ranks
    )


@dataclass(frozen=True)
class _EngineRank:
    """An engine's rank. releases: its engine shares slots, and so releases the memory of all its ranks at once."""

    weights_bytes: int
    adapter_bytes: int
    releases: bool


@dataclass(frozen=True)
class _Slot:
    """All that the memory of a slot depends on: many slots are equal. exchanges: it takes part in a reshard."""

    ranks: tuple[_StageRank, ...]
    engine: _EngineRank | None
    is_shared: bool
    exchanges: bool


class _SlotMemory:
    """The memory of every slot, counted once for equal slots."""

    def __init__(
        self,
        recipe: Recipe,
        hardware: Hardware,
        sizes: ModelSizes,
        micro_batches: int,
    ) -> None:
        self.recipe = recipe
        self.hardware = hardware
        self.sizes = sizes
        self.engine = engine_layout(recipe)
        self.policy = sizes["policy"]
        shape = self.policy.shape
        self.settings = with_states(settings_of(recipe, hardware), recipe, shape)
        self.engine_weights = weight_bytes(shape, self.engine, recipe.model.dtype)
        self.token_bytes = token_bytes(shape, self.engine, self.settings.cache_item_bytes)
        self.slots = self._slots(micro_batches)
        rooms = [self._tokens(slot, slot.engine) for slot in {*self.slots} if slot.engine]
        # external engines are on none of these slots
        self.tokens = min(rooms, default=0)
        cache_bytes = float(max(0, self.tokens) * self.token_bytes)
        of_request = request_bytes(shape, self.engine)
        draft = self.engine.draft
        self.most_states = most_states(self.settings, cache_bytes, of_request, draft)

    def _slots(self, micro_batches: int) -> list[_Slot]:
        engine = self.engine
        ranks: defaultdict[int, list[_StageRank]] = defaultdict(list)  # by slot
        for size in self.sizes.values():
            for stage, slots in enumerate(size.stage_slots()):
                rank = _StageRank(size, stage, micro_batches)
                for slot in slots:
                    ranks[slot].append(rank)
        sides = [size.slots for size in self.sizes.values()]
        shared = shared_slots([range(engine.first, engine.end), *sides])
        unshared_engines = engine.engines_without(shared)
        policy = self.policy
        adapters = adapter_slot_bytes(policy.shape, engine, policy.lora, self.recipe.model.dtype)
        end = max(policy.layout.world_size, engine.end)  # of the slots that exchange weights
        all_slots = []
        for slot in range(self.recipe.placement.gpus):
            engine_rank = None
            if member := engine.member(slot):
                number, rank = member
                releases = number not in unshared_engines
                engine_rank = _EngineRank(self.engine_weights[rank], adapters[rank], releases)
            all_slots.append(_Slot(tuple(ranks[slot]), engine_rank, slot in shared, slot < end))
        return all_slots

    def parts(self, phase: str) -> list[Parts]:
        """Every slot's parts in a phase."""
        role = COMPUTES.get(phase)
        of_slot = {slot: self._parts(slot, phase, role) for slot in {*self.slots}}
        return [of_slot[slot] for slot in self.slots]

    def _parts(self, slot: _Slot, phase: str, computes: RoleName | None) -> Parts:
        total = Parts(other_bytes=self._standing(slot))
        for rank in slot.ranks:
            total += self._rank(rank, slot, computes)
        if slot.engine:
            total += self._engine(slot.engine, phase)
        if phase == "reshard" and slot.exchanges:
            total += Parts(reshard_bytes=self._reshard_bytes())
        return total

    def _rank(self, rank: _StageRank, slot: _Slot, computes: RoleName | None) -> Parts:
        """All of a rank's state while it computes or where it does not share its GPU."""
        role = rank.size.name
        if role == computes:
            return rank.parts + rank.at_work
        if not slot.is_shared:
            return rank.parts
        if role == "policy":
            return Parts(weights_bytes=rank.parts.weights_bytes)
        return Parts()

    def _engine(self, rank: _EngineRank, phase: str) -> Parts:
        """Weights and cache unless they are released."""
        weights = Parts(engine_weights_bytes=rank.weights_bytes)
        if phase == "reshard" and rank.releases:
            return weights
        held = weights + Parts(
            kv_cache_bytes=math.ceil(
                max(0, self.tokens) * self.token_bytes / (1 - self.settings.state_share)
            )
        )
        if phase == "rollout":
            sequences = step_sequences(self.recipe)
            most = min(sequences, (self.settings.graph_sequences or sequences) * self.engine.dp)
            running, logits = running_bytes(self.policy.shape, self.engine, self.settings, most)
            return held + Parts(
                activations_bytes=math.ceil(running), logits_bytes=math.ceil(logits)
            )
        return Parts() if rank.releases else held

    def _tokens(self, slot: _Slot, engine: _EngineRank) -> int:
        """Tokens that SGLang finds room for on this slot, next to the training ranks' memory in a rollout."""
        taken = sum(self._rank(rank, slot, None).total_bytes for rank in slot.ranks)
        free = self.hardware.memory_bytes - self._standing(slot) - taken
        free += kept_bytes(self.settings, self.engine)
        return cache_tokens(self.settings, free, engine.weights_bytes, self.token_bytes)

    def _standing(self, slot: _Slot) -> int:
        """Bytes of a slot in every phase: contexts, communicators, the engine's CUDA graphs and DeepEP's buffers."""
        layouts = [rank.size.layout for rank in slot.ranks]
        groups = sum(map(communicators, layouts)) + slot.exchanges
        num_bytes = CONTEXT_BYTES * len(layouts)
        if slot.engine:
            groups += (self.engine.tp > 1) + (self.engine.dp > 1)
            num_bytes += CONTEXT_BYTES + kept_bytes(self.settings, self.engine)
            num_bytes += slot.engine.adapter_bytes
        return num_bytes + groups * self.hardware.communicator_bytes

    def _reshard_bytes(self) -> int:
        """Buffers of two rounds, one packed while the other is sent, and the scratch memory of quantising."""
        shape = self.policy.shape
        engine = self.engine
        widest = max(
            shape.hidden_size, shape.ffn_size, shape.moe_ffn_size, shape.num_heads * shape.head_dim
        )
        staged = 2 * min(self.recipe.reshard.round_bytes, 2 * max(self.engine_weights))
        if self.recipe.rollout.engine.external:
            # each rank holds a whole file while it is written
            staged += min(FILE_BYTES, sum(self.engine_weights))
        return staged + SCRATCH_BYTES * widest * engine.fp8

    def host(self, samples: Samples, copies: float) -> dict[str, int]:
        """Host bytes of the fullest node by purpose; see the constants."""
        engine = self.engine
        policy = self.policy
        gpus_per_node = self.recipe.placement.gpus_per_node
        held = samples_bytes(
            self.recipe, policy.shape, policy.layout, engine, samples, copies=copies
        )
        per_node = [Counter(samples=num_bytes) for num_bytes in held]
        if tools := tools_bytes(self.recipe):
            for first_slot in range(engine.first, engine.end, engine.tp):
                per_node[first_slot // gpus_per_node]["tools"] += tools
        of_slot = {slot: self._slot_host(slot) for slot in {*self.slots}}
        for number, slot in enumerate(self.slots):
            per_node[number // gpus_per_node].update(of_slot[slot])
        return dict(max(per_node, key=lambda table: table.total()))

    @property
    def _copy_holders(self) -> int:
        """The nodes that have the copy of a rank's state: its own, and the next where there are several.

        So each node has as many copies as it has ranks, or twice as many.
        """
        return min(2, math.ceil(self.recipe.placement.gpus / self.recipe.placement.gpus_per_node))

    def _slot_host(self, slot: _Slot) -> Counter[str]:
        checkpoint = self.recipe.checkpoint
        bytes_by_purpose = Counter(processes=PROCESS_BYTES * (len(slot.ranks) + bool(slot.engine)))
        for rank in slot.ranks:
            bytes_by_purpose.update(rank.host(slot.is_shared, self.recipe))
            if rank.size.trains and checkpoint.memory_copies and self.recipe.run.restarts:
                copies = COPY_GENERATIONS * self._copy_holders
                bytes_by_purpose["memory_copies"] += copies * rank.state_bytes
        saving = [rank.saving_bytes(checkpoint) for rank in slot.ranks if rank.size.trains]
        if checkpoint.every and saving:
            # the roles' checkpoints are begun one after the other, synchronous ones when that is written
            bytes_by_purpose["checkpoint"] = sum(saving) if checkpoint.asynchronous else max(saving)
        if slot.engine and slot.engine.adapter_bytes and slot.engine.releases:
            bytes_by_purpose["engine_weights"] = slot.engine.weights_bytes
        return bytes_by_purpose


@dataclass(frozen=True, eq=False)
class _StageRank:
    """The ranks of one pipeline stage, which hold as much. micro_batches: of one update."""

    size: ModelSize
    stage: int
    micro_batches: int

    @cached_property
    def parts(self) -> Parts:
        """Memory that the rank holds in every phase."""
        size = self.size
        train = size.recipe.train
        weights = self._weights_bytes + self._code_bytes
        if not size.trains:
            return Parts(weights_bytes=weights)
        state = 0
        if not train.optimizer_offload:
            state = self._share * state_bytes(train, size.weight_bytes) - self._unneeded_moments
        gradients = size.trained(self.stage) * GRADIENT_BYTES
        return Parts(weights, gradients, state)

    @property
    def _weights_bytes(self) -> int:
        """In the model's type, with buffers where it is not another model's."""
        size = self.size
        if size.shares_weights:
            return size.trained(self.stage) * size.weight_bytes
        return sum(
            chunk.elements * size.weight_bytes + chunk.buffer_bytes
            for chunk in size.stages[self.stage]
        )

    @property
    def _code_bytes(self) -> int:
        """Codes of its weights in fp8, which TransformerEngine's modules keep from one update to the next.

        All stages are taken to have as many of them as the one with the most layers.
        """
        size = self.size
        fp8 = fp8_linears_of(size)
        if fp8 is None:
            return 0
        layers = max(len(size.layers(stage)) for stage in range(size.layout.pp))
        mean = fp8.rank_weights(size.layout)
        return math.ceil(fp8.code_copies * mean * layers * size.layout.pp / size.shape.num_layers)

    @cached_property
    def at_work(self) -> Parts:
        """Additional memory while the rank computes."""
        if self.size.trains:
            activations = activation_bytes(self.size, self.stage, self.micro_batches)
            logits = logits_bytes(self.size, self.stage)
        else:
            activations = forward_bytes(self.size, self.stage)
            logits = 0.0
        fragmented = math.ceil(FRAGMENTED_SHARE * (activations + logits))
        return Parts(
            activations_bytes=math.ceil(activations),
            logits_bytes=math.ceil(logits),
            other_bytes=fragmented,
        )

    @cached_property
    def _share(self) -> int:
        """Elements that its optimizer steps on."""
        return math.ceil(self.size.optimizer_share(self.stage))

    @property
    def _unneeded_moments(self) -> int:
        """Bytes of second moments that matrices do not have with Muon."""
        return math.floor(SECOND_MOMENT_BYTES * self.size.muon(self.stage).elements)

    @property
    def state_bytes(self) -> int:
        """Bytes of a copy of what the rank trains (parallel/state_bytes.py): weights, master weights and moments."""
        train = self.size.recipe.train
        item = self.size.weight_bytes
        if train.optimizer_offload:
            optimizer = MASTER_BYTES * (item == 2) + MOMENTS_BYTES
        else:
            optimizer = state_bytes(train, item)
        whole = self.size.trained(self.stage) * item + self._share * optimizer
        return whole - self._unneeded_moments

    def host(self, is_shared: bool, recipe: Recipe) -> dict[str, int]:
        """Bytes of the rank's host by purpose."""
        bytes_by_purpose: dict[str, int] = {}
        size = self.size
        weights = math.ceil(PINNED_SHARE * self._weights_bytes)
        if size.trains and size.recipe.train.optimizer_offload:
            steps = (PINNED_SHARE * GRADIENT_BYTES + MASTER_BYTES + MOMENTS_BYTES) * self._share
            # Megatron first makes a master copy over whole weights.
            building = MASTER_BYTES * (size.trained(self.stage) + self._share)
            bytes_by_purpose["optimizer"] = max(math.ceil(steps), building)
        elif size.trains and is_shared:
            bytes_by_purpose["offloaded_optimizer"] = math.ceil(
                PINNED_SHARE * self.parts.optimizer_bytes
            )
        if size.name == "policy" and reference_copy(recipe):
            bytes_by_purpose["reference"] = weights
        if size.name == "policy" and trains_merged(recipe):
            bytes_by_purpose["frozen_weights"] = weights
        if size.name != "policy" and is_shared:
            bytes_by_purpose["offloaded_weights"] = weights
        return bytes_by_purpose

    def saving_bytes(self, checkpoint: CheckpointConfig) -> int:
        """Bytes of the rank's host while its checkpoint is written.

        An asynchronous one has copies of the rank's part of the weights and, unless the optimizer is on the host, of
        its state.
        """
        chunks = CHUNKS * CHUNK_BYTES
        if not checkpoint.asynchronous:
            return chunks
        copied = self.size.weight_bytes
        if not self.size.recipe.train.optimizer_offload:
            copied += MASTER_BYTES + MOMENTS_BYTES
        return chunks + copied * self._share - self._unneeded_moments


def communicators(layout: TrainLayout) -> int:
    """Communicators of more than one rank.

    Megatron's: tensor, context, data with and without context, pipeline, expert, expert tensor, expert data, and the
    world; and those of rows that are split by their length.
    """
    groups = [layout.tp, layout.cp, layout.dp * layout.cp, layout.pp, layout.world_size]
    groups += [layout.ep, layout.etp, layout.edp]
    if layout.cp > 1:
        groups.append(layout.dp)
    of_rows = layout.max_cp.bit_length() - 1  # of 2, 4, ... ranks
    return sum(size > 1 for size in groups) + of_rows
