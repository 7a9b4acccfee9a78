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

from megarl.config import Recipe
from megarl.config.hardware import Hardware
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
from megarl.plan.batch import Samples, samples_bytes
from megarl.plan.engine_memory import (
    MIB,
    Kv,
    Settings,
    cache_tokens,
    kept_bytes,
    kv_of,
    running_bytes,
    settings_of,
    token_bytes,
    weight_bytes,
)
from megarl.plan.memory_parts import Parts
from megarl.plan.model_size import ModelSize
from megarl.plan.optimizer_memory import GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, state_bytes
from megarl.plan.turns import tools_bytes
from megarl.rollout.sglang.batch_sizes import step_sequences
from megarl.types import UserError

# assumption: of a process's CUDA context with its kernels, on recent cards
CONTEXT_BYTES = 600 * MIB
# assumption: of activations and logits, blocks that torch's allocator holds and cannot use
FRAGMENTED_SHARE = 0.06
# fully_reshardable (parallel/dist_checkpoint.py): every rank gathers a buffer's state, one of three kinds at a time.
GATHER_BYTES = 4
# on the GPU, next to the own part: all_gather's list, and ProcessGroupNCCL's flat copy of it
GATHER_COPIES = 2
# and has all three on its host until filesystem_async.py has cloned what it writes itself
GATHERED_BYTES = 12
SCRATCH_BYTES = 10 * 128  # resharding/execute.py: of each column of a strip that is quantised
# torch rounds pinned memory up to powers of two: the mean of sizes that fall anywhere
PINNED_SHARE = 1.4
# assumption: of the host, each process of a GPU: libraries, CUDA's own, samples on their way
PROCESS_BYTES = 6 << 30
PHASES: tuple[Phase, ...] = ("rollout", "score", "critic", "train", "reshard")
SAVE = "save"  # after `train`, in its memory, where checkpoints are written
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
    sizes: Mapping[RoleName, ModelSize],
    samples: Samples,
    micro_batches: int,
) -> MemoryPlan:
    """The memory of every phase, without errors; the recipe's layouts must have no error.

    micro_batches: of one update.
    """
    count = _SlotMemory(recipe, hardware, sizes, micro_batches)
    tables = {phase: count.slots(phase) for phase in count.phases}
    fullest = {
        phase: max(table, key=lambda slot: table[slot].total_bytes)
        for phase, table in tables.items()
    }
    return MemoryPlan(
        capacity_bytes=hardware.memory_bytes,
        device={phase: tables[phase][slot] for phase, slot in fullest.items()},
        fullest_slot=fullest,
        slot_bytes={
            phase: [parts.total_bytes for parts in table.values()]
            for phase, table in tables.items()
        },
        host=count.host(samples),
        host_capacity_bytes=hardware.host_bytes,
        kv=kv_of(recipe, count.tokens, count.token_bytes, samples.running_tokens),
    )


def least_training_bytes(sizes: Mapping[RoleName, ModelSize], micro_batches: int) -> int:
    """A lower bound of what the fullest GPU holds while a model learns: that model's rank alone."""
    trained = [size for size in sizes.values() if size.trains]
    ranks = [
        _StageRank(size, stage, micro_batches)
        for size in trained
        for stage in range(size.layout.pp)
    ]
    return max((rank.parts + rank.at_work).total_bytes for rank in ranks)


class _SlotMemory:
    """The memory of every slot, counted once for all slots of a kind: of the same stages and a like engine rank."""

    def __init__(
        self,
        recipe: Recipe,
        hardware: Hardware,
        sizes: Mapping[RoleName, ModelSize],
        micro_batches: int,
    ) -> None:
        self.recipe = recipe
        self.hardware = hardware
        self.sizes = sizes
        self.engine = engine_layout(recipe)
        self.policy = sizes["policy"]
        self.engine_slots = range(self.engine.first, self.engine.end)
        self.shared = shared_slots([self.engine_slots, *(size.slots for size in sizes.values())])
        self.settings: Settings = settings_of(recipe, hardware)
        self.engine_weights = weight_bytes(self.policy.shape, self.engine, recipe.model.dtype)
        self.adapter_bytes = adapter_slot_bytes(
            self.policy.shape, self.engine, self.policy.lora, recipe.model.dtype
        )
        self.token_bytes = token_bytes(
            self.policy.shape, self.engine, self.settings.cache_item_bytes
        )
        wanted = {"score": "reward_model" in sizes, "critic": "critic" in sizes, "train": True}
        self.phases: list[str] = [phase for phase in PHASES if wanted.get(phase, True)]
        if recipe.checkpoint.every:
            self.phases.insert(self.phases.index("train") + 1, SAVE)
        self._ranks: defaultdict[int, list[_StageRank]] = defaultdict(list)  # by slot
        for size in sizes.values():
            stages = [_StageRank(size, stage, micro_batches) for stage in range(size.layout.pp)]
            for rank, slot in enumerate(size.slots):
                self._ranks[slot].append(stages[size.layout.coords(rank).pp])
        self._first_like: dict[int, int] = {}  # slot -> the first slot of its kind
        first_of: dict[tuple[object, ...], int] = {}
        for slot in range(recipe.placement.gpus):
            self._first_like[slot] = first_of.setdefault(self._kind(slot), slot)
        self.tokens = min(
            self._tokens(slot) for slot in first_of.values() if slot in self.engine_slots
        )

    def slots(self, phase: str) -> dict[int, Parts]:
        """Every slot's parts in a phase; `save` is of the role that needs more for it."""
        roles: list[RoleName | None] = [COMPUTES.get(phase)]
        if phase == SAVE:
            roles = [size.name for size in self.sizes.values() if size.trains]
        found = {
            slot: max(
                (self._slot(slot, phase, role) for role in roles),
                key=lambda parts: parts.total_bytes,
            )
            for slot in set(self._first_like.values())
        }
        return {slot: found[first] for slot, first in self._first_like.items()}

    def _kind(self, slot: int) -> tuple[object, ...]:
        """All that the memory of a slot depends on."""
        stages = tuple(map(id, self._ranks[slot]))
        if slot not in self.engine_slots:
            return stages, slot in self.shared, self._exchanges(slot)
        weights = self.engine_weights[(slot - self.engine.first) % self.engine.tp]
        return stages, slot in self.shared, self._exchanges(slot), self._releases(slot), weights

    def _releases(self, slot: int) -> bool:
        """Whether the engine on a slot shares any of its slots, and so releases its memory: all its ranks at once."""
        first = slot - (slot - self.engine.first) % self.engine.tp
        return not self.shared.isdisjoint(range(first, first + self.engine.tp))

    def _slot(self, slot: int, phase: str, computes: RoleName | None) -> Parts:
        total = Parts(other_bytes=self._standing(slot))
        for rank in self._ranks[slot]:
            total += self._rank(rank, slot, phase, computes)
        if slot in self.engine_slots:
            total += self._engine(slot, phase)
        if phase == "reshard" and self._exchanges(slot):
            total += Parts(reshard_bytes=self._reshard_bytes())
        return total

    def _rank(self, rank: _StageRank, slot: int, phase: str, computes: RoleName | None) -> Parts:
        """All of a rank's state while it computes or where it does not share its GPU."""
        role = rank.size.name
        if role != computes and slot in self.shared:
            if role == "policy":
                return Parts(weights_bytes=rank.parts.weights_bytes)
            return Parts()
        if role != computes:
            return rank.parts
        return rank.parts + (
            Parts(other_bytes=rank.gathering_bytes) if phase == SAVE else rank.at_work
        )

    def _engine(self, slot: int, phase: str) -> Parts:
        """Weights and cache unless they are released."""
        rank = (slot - self.engine.first) % self.engine.tp
        weights = Parts(engine_weights_bytes=self.engine_weights[rank])
        cache = Parts(kv_cache_bytes=max(0, self.tokens) * self.token_bytes)
        if phase == "rollout":
            wanted = step_sequences(self.recipe)
            most = min(wanted, (self.settings.graph_sequences or wanted) * self.engine.dp)
            running, logits = running_bytes(self.policy.shape, self.engine, self.settings, most)
            return (
                weights
                + cache
                + Parts(activations_bytes=math.ceil(running), logits_bytes=math.ceil(logits))
            )
        if not self._releases(slot):
            return weights + cache
        if phase == "reshard":
            return weights
        return Parts()

    def _tokens(self, slot: int) -> int:
        """Tokens that SGLang finds room for on this slot, next to the training ranks' memory in a rollout."""
        taken = sum(
            self._rank(rank, slot, "rollout", None).total_bytes for rank in self._ranks[slot]
        )
        free = (
            self.hardware.memory_bytes
            - self._standing(slot)
            - taken
            + kept_bytes(self.settings, self.engine)
        )
        weights = self.engine_weights[(slot - self.engine.first) % self.engine.tp]
        return cache_tokens(self.settings, free, weights, self.token_bytes)

    def _standing(self, slot: int) -> int:
        """Bytes of a slot in every phase: contexts, communicators, the engine's CUDA graphs and DeepEP's buffers."""
        layouts = [rank.size.layout for rank in self._ranks[slot]]
        groups = sum(map(communicators, layouts)) + self._exchanges(slot)
        found = CONTEXT_BYTES * len(layouts)
        if slot in self.engine_slots:
            groups += (self.engine.tp > 1) + (self.engine.dp > 1)
            found += CONTEXT_BYTES + kept_bytes(self.settings, self.engine)
            found += self.adapter_bytes[(slot - self.engine.first) % self.engine.tp]
        return found + groups * self.hardware.communicator_bytes

    def _exchanges(self, slot: int) -> bool:
        return slot < max(self.policy.layout.world_size, self.engine.end)

    def _reshard_bytes(self) -> int:
        """Buffers of two rounds, one packed while the other is sent, and the scratch memory of quantising."""
        shape = self.policy.shape
        engine = self.engine
        widest = max(
            shape.hidden_size, shape.ffn_size, shape.moe_ffn_size, shape.num_heads * shape.head_dim
        )
        staged = 2 * min(self.recipe.reshard.round_bytes, 2 * max(self.engine_weights))
        return staged + SCRATCH_BYTES * widest * engine.fp8

    def host(self, samples: Samples) -> dict[str, int]:
        """Host bytes of the fullest node by purpose; see the constants."""
        policy = self.policy
        gpus_per_node = self.recipe.placement.gpus_per_node
        held = samples_bytes(self.recipe, policy.shape, policy.layout, self.engine, samples)
        per_node = [Counter(samples=num_bytes) for num_bytes in held]
        if tools := tools_bytes(self.recipe):
            for first_slot in self.engine_slots[:: self.engine.tp]:
                per_node[first_slot // gpus_per_node]["tools"] += tools
        of_kind = {slot: self._slot_host(slot) for slot in set(self._first_like.values())}
        for slot, first in self._first_like.items():
            per_node[slot // gpus_per_node].update(of_kind[first])
        return dict(max(per_node, key=lambda table: table.total()))

    def _slot_host(self, slot: int) -> Counter[str]:
        ranks = self._ranks[slot]
        found = Counter(processes=PROCESS_BYTES * (len(ranks) + (slot in self.engine_slots)))
        # of checkpoints: the roles' begin one after the other, synchronous ones when that is written
        most = begun = 0
        for rank in ranks:
            found.update(rank.host(slot in self.shared, self.recipe))
            if rank.size.trains and self.recipe.checkpoint.every:
                gathering, waiting = rank.staging()
                most = max(most, begun + gathering, begun + waiting)
                begun += waiting if self.recipe.checkpoint.asynchronous else 0
        if most:
            found["checkpoint"] = most
        if slot in self.engine_slots and any(self.adapter_bytes) and self._releases(slot):
            found["engine_weights"] = self.engine_weights[
                (slot - self.engine.first) % self.engine.tp
            ]
        return found


@dataclass(frozen=True)
class _StageRank:
    """A rank of one pipeline stage. micro_batches: of one update."""

    size: ModelSize
    stage: int
    micro_batches: int

    @cached_property
    def parts(self) -> Parts:
        """Memory that the rank holds in every phase."""
        size = self.size
        chunks = self.size.stages[self.stage]
        weights = sum(chunk.elements * size.weight_bytes + chunk.buffer_bytes for chunk in chunks)
        if size.shares_weights:
            weights = size.trained(self.stage) * size.weight_bytes
        if not size.trains:
            return Parts(weights_bytes=weights)
        if size.recipe.train.optimizer_offload:
            state = 0
        else:
            state = state_bytes(size.recipe.train, size.weight_bytes)
        return Parts(weights, size.trained(self.stage) * GRADIENT_BYTES, self._share * state)

    @cached_property
    def at_work(self) -> Parts:
        """Additional memory while the rank computes."""
        activations = forward_bytes(self.size, self.stage)
        logits = 0.0
        if self.size.trains:
            activations = activation_bytes(self.size, self.stage, self.micro_batches)
            logits = logits_bytes(self.size, self.stage)
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

    @cached_property
    def _buffers(self) -> list[tuple[int, int]]:
        """(elements, replicas that share their state) of each buffer of gradients."""
        chunks = self.size.stages[self.stage]
        layout = self.size.layout
        dense = [(chunk.dense, layout.dp * layout.cp) for chunk in chunks]
        return dense + [(chunk.expert, layout.edp) for chunk in chunks]

    @cached_property
    def gathering_bytes(self) -> int:
        """GPU bytes while a checkpoint is gathered: copies of the largest buffer's state of one kind."""
        copies = max(
            GATHER_COPIES * elements + elements / replicas for elements, replicas in self._buffers
        )
        return math.ceil(GATHER_BYTES * copies)

    def host(self, is_shared: bool, recipe: Recipe) -> dict[str, int]:
        """Bytes of the rank's host by purpose."""
        found: dict[str, int] = {}
        size = self.size
        weights = math.ceil(PINNED_SHARE * self.parts.weights_bytes)
        if size.trains and size.recipe.train.optimizer_offload:
            steps = (PINNED_SHARE * GRADIENT_BYTES + MASTER_BYTES + MOMENTS_BYTES) * self._share
            # Megatron first makes a master copy over whole weights.
            building = MASTER_BYTES * (size.trained(self.stage) + self._share)
            found["optimizer"] = max(math.ceil(steps), building)
        elif size.trains and is_shared:
            found["offloaded_optimizer"] = math.ceil(PINNED_SHARE * self.parts.optimizer_bytes)
        if size.name == "policy" and reference_copy(recipe):
            found["reference"] = weights
        if size.name == "policy" and trains_merged(recipe):
            found["frozen_weights"] = weights
        if size.name != "policy" and is_shared:
            found["offloaded_weights"] = weights
        return found

    def staging(self) -> tuple[int, int]:
        """Bytes of the rank's host while its checkpoint is gathered, and afterwards until it is written.

        First the optimizer's whole state, with a buffer's own part and two lists of one kind of it, or with clones of
        what this rank writes, as large as its own part; these stay, and the weights join them.
        """
        lists = 2 * GATHER_BYTES * max(elements for elements, _ in self._buffers)
        gathering = GATHERED_BYTES * (self.size.trained(self.stage) + self._share) + lists
        return gathering, (GATHERED_BYTES + self.size.weight_bytes) * self._share


def communicators(layout: TrainLayout) -> int:
    """Megatron's communicators of more than one rank.

    Tensor, context, data with and without context, pipeline, expert, expert tensor, expert data; and the world.
    """
    groups = (
        layout.tp,
        layout.cp,
        layout.dp,
        layout.dp * layout.cp,
        layout.pp,
        layout.ep,
        layout.etp,
        layout.edp,
    )
    return (
        sum(size > 1 for size in groups)
        - (layout.cp == 1 and layout.dp > 1)
        + (layout.world_size > 1)
    )
