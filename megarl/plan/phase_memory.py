"""The memory of every GPU in each phase, and of every node's host: arithmetic, without a GPU.

Memory changes hands as in fleet/memory.py: on GPUs that models and engines share, the model or engine that computes
holds the memory, next to the policy's parameters. Parameters are those of Megatron's real modules (model_size.py);
activations are in activations.py, an engine's memory in engine_memory.py. Nothing here was measured on a GPU;
assumptions are constants that are marked so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.algos import has_reference
from megarl.config import Recipe, TrainConfig
from megarl.config.hardware import Hardware
from megarl.fleet.memory import Phase
from megarl.parallel.layout import TrainLayout
from megarl.parallel.option_values import STATE_DTYPES
from megarl.parallel.roles import RoleName, engine_layout
from megarl.parallel.sizes import ChunkSize
from megarl.plan.activations import activation_bytes, forward_bytes, item_bytes, logits_bytes
from megarl.plan.batch import samples_bytes
from megarl.plan.engine_memory import (
    GRAPH_MIB,
    MIB,
    Kv,
    Settings,
    cache_tokens,
    kv_of,
    running_bytes,
    settings_of,
    token_bytes,
    weight_bytes,
)
from megarl.plan.memory_parts import Parts
from megarl.plan.model_size import ModelSize, time_shared
from megarl.types import UserFault

CONTEXT_BYTES = 600 * MIB  # assumption: of a process's CUDA context with its kernels, on recent cards
FRAGMENTED_SHARE = 0.06  # assumption: of activations and logits, blocks that torch's allocator holds and cannot use
GRADIENT_BYTES = 4  # DistributedDataParallelConfig(grad_reduce_in_fp32=True)
MOMENTS_BYTES = 8  # AdamW's two, float32
MASTER_BYTES = 4  # float32 copies of weights in another type; with optimizer_offload on the host alone, and not pinned
GATHER_BYTES = 4  # saving.py, fully_reshardable: every rank gathers a buffer's state, one of three kinds at a time
GATHER_COPIES = 2  # on the GPU, next to the own part: all_gather's list, and ProcessGroupNCCL's flat copy of it
GATHERED_BYTES = 12  # and has all three on its host until filesystem_async.py has cloned what it writes itself
SCRATCH_BYTES = 10 * 128  # resharding/execute.py: of each column of a strip that is quantised
PINNED_SHARE = 1.4  # torch rounds pinned memory up to powers of two: the mean of sizes that fall anywhere
PROCESS_BYTES = 6 << 30  # assumption: of the host, each process of a GPU: libraries, CUDA's own, samples on their way
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
    faults: list[UserFault] = field(default_factory=list)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def peak_phase(self) -> str:
        return max(self.device, key=lambda phase: self.device[phase].total_bytes)


def plan_memory(
    recipe: Recipe,
    hardware: Hardware,
    sizes: Mapping[RoleName, ModelSize],
    mean_tokens: int,
    micro_batches: int,
) -> MemoryPlan:
    """The memory of every phase, without faults; the recipe's layouts must have no fault.

    mean_tokens: of prompt and response together, for the number of sequences that an engine holds at once.
    micro_batches: of one update.
    """
    count = _SlotMemory(recipe, hardware, sizes, micro_batches)
    tables = {phase: count.slots(phase) for phase in count.phases}
    fullest = {phase: max(table, key=lambda slot: table[slot].total_bytes) for phase, table in tables.items()}
    return MemoryPlan(
        capacity_bytes=hardware.memory_bytes,
        device={phase: tables[phase][slot] for phase, slot in fullest.items()},
        fullest_slot=fullest,
        slot_bytes={phase: [parts.total_bytes for parts in table.values()] for phase, table in tables.items()},
        host=count.host(mean_tokens),
        host_capacity_bytes=hardware.host_bytes,
        kv=kv_of(recipe, count.tokens, count.token_bytes, mean_tokens),
    )


class _SlotMemory:
    """The memory of every slot. All ranks of a pipeline stage hold the same amount, so it is counted once a stage."""

    def __init__(
        self, recipe: Recipe, hardware: Hardware, sizes: Mapping[RoleName, ModelSize], micro_batches: int
    ) -> None:
        self.recipe, self.hardware, self.sizes = recipe, hardware, sizes
        self.engine = engine_layout(recipe)
        self.shared = time_shared(sizes, self.engine)
        self.settings: Settings = settings_of(recipe, hardware)
        policy = sizes["policy"]
        self.engine_weights = weight_bytes(policy.shape, self.engine, recipe.model.dtype)
        self.token_bytes = token_bytes(policy.shape, self.engine, self.settings.cache_item_bytes)
        self.trained: list[RoleName] = [role for role, size in sizes.items() if size.trains]
        wanted = {"score": "reward_model" in sizes, "critic": "critic" in sizes, "train": True}
        self.phases: list[str] = [phase for phase in PHASES if wanted.get(phase, True)]
        if recipe.checkpoint.every:
            self.phases.insert(self.phases.index("train") + 1, SAVE)
        self._stages = {
            (role, stage): _stage_parts(size, stage, micro_batches)
            for role, size in sizes.items()
            for stage in range(size.layout.pp)
        }
        self.tokens = min(map(self._tokens, range(self.engine.first, self.engine.end)))

    def slots(self, phase: str) -> dict[int, Parts]:
        """Every slot's parts in a phase; `save` is of the role that needs more for it."""
        places = range(self.recipe.placement.gpus)
        if phase != SAVE:
            return {slot: self._slot(slot, phase, COMPUTES.get(phase)) for slot in places}
        saves = [{slot: self._slot(slot, SAVE, role) for slot in places} for role in self.trained]
        return {slot: max((table[slot] for table in saves), key=lambda parts: parts.total_bytes) for slot in places}

    def _slot(self, slot: int, phase: str, computes: RoleName | None) -> Parts:
        total = Parts(other_bytes=self._standing(slot))
        for role, size in self.sizes.items():
            if slot in size.slots:
                total += self._ranks(role, size, slot, phase, computes)
        if slot in range(self.engine.first, self.engine.end):
            total += self._engine(slot, phase)
        if phase == "reshard" and self._exchanges(slot):
            total += Parts(reshard_bytes=self._reshard_bytes())
        return total

    def _ranks(self, role: RoleName, size: ModelSize, slot: int, phase: str, computes: RoleName | None) -> Parts:
        """Of one role's rank: all of its state while it computes or where it does not share its GPU."""
        held = self._stages[role, size.layout.coords(slot - size.first_slot).pp]
        is_at_work = role == computes
        if not is_at_work and slot in self.shared:
            return Parts(weights_bytes=held.parts.weights_bytes) if role == "policy" else Parts()
        if not is_at_work:
            return held.parts
        if phase == SAVE:
            return held.parts + Parts(other_bytes=held.gathering_bytes)
        return held.parts + held.at_work

    def _engine(self, slot: int, phase: str) -> Parts:
        """Weights and cache unless they are released; an engine's ranks release them together."""
        index, rank = divmod(slot - self.engine.first, self.engine.tp)
        first = self.engine.first + index * self.engine.tp
        releases = bool(self.shared & set(range(first, first + self.engine.tp)))
        weights = Parts(engine_weights_bytes=self.engine_weights[rank])
        cache = Parts(kv_cache_bytes=max(0, self.tokens) * self.token_bytes)
        if phase == "rollout":
            shape, wanted = self.sizes["policy"].shape, kv_of(self.recipe, self.tokens, self.token_bytes, 1).wanted
            most = min(wanted, self.settings.graph_sequences or wanted)
            running, logits = running_bytes(shape, self.engine, self.settings, most)
            return weights + cache + Parts(activations_bytes=math.ceil(running), logits_bytes=math.ceil(logits))
        if not releases:
            return weights + cache
        return weights if phase == "reshard" else Parts()

    def _tokens(self, slot: int) -> int:
        """Tokens that SGLang finds room for on this slot, next to the training ranks' memory in a rollout."""
        taken = self._standing(slot)
        for role, size in self.sizes.items():
            if slot in size.slots:
                taken += self._ranks(role, size, slot, "rollout", None).total_bytes
        graphs = self.settings.graph_sequences * GRAPH_MIB * MIB  # made behind the cache, in what it leaves
        free = self.hardware.memory_bytes - taken + graphs
        weights = self.engine_weights[(slot - self.engine.first) % self.engine.tp]
        return cache_tokens(self.settings, free, weights, self.token_bytes)

    def _standing(self, slot: int) -> int:
        """Of a slot whatever the phase: its processes' contexts and communicators, the engine's CUDA graphs."""
        found = 0
        for size in self.sizes.values():
            if slot in size.slots:
                found += CONTEXT_BYTES + communicators(size.layout) * self.hardware.communicator_bytes
        if slot in range(self.engine.first, self.engine.end):
            groups = (self.engine.tp > 1) + (self.engine.dp > 1)
            found += CONTEXT_BYTES + groups * self.hardware.communicator_bytes
            found += math.ceil(self.settings.graph_sequences * GRAPH_MIB * MIB)
        return found + self.hardware.communicator_bytes * self._exchanges(slot)

    def _exchanges(self, slot: int) -> bool:
        return slot < max(self.sizes["policy"].layout.world_size, self.engine.end)

    def _reshard_bytes(self) -> int:
        """Buffers of two rounds, one packed while the other is sent, and the scratch memory of quantising."""
        shape, engine = self.sizes["policy"].shape, self.engine
        widest = max(shape.hidden_size, shape.ffn_size, shape.moe_ffn_size, shape.num_heads * shape.head_dim)
        staged = 2 * min(self.recipe.reshard.round_bytes, 2 * max(self.engine_weights))
        return staged + SCRATCH_BYTES * widest * engine.fp8

    def host(self, mean_tokens: float) -> dict[str, int]:
        """Of the fullest node by purpose; see the constants."""
        policy = self.sizes["policy"]
        samples = samples_bytes(self.recipe, policy.shape, policy.layout, self.engine, mean_tokens)
        per_node = {node: {"samples": num_bytes} for node, num_bytes in enumerate(samples)}
        node_size = self.recipe.placement.gpus_per_node
        for slot in range(self.recipe.placement.gpus):
            table = per_node[slot // node_size]
            for purpose, num_bytes in self._slot_host(slot).items():
                table[purpose] = table.get(purpose, 0) + num_bytes
        return max(per_node.values(), key=lambda table: sum(table.values()))

    def _slot_host(self, slot: int) -> dict[str, int]:
        found: dict[str, int] = {"processes": 0}
        most = begun = 0  # of checkpoints: the roles' begin one after the other, synchronous ones when that is written
        if slot in range(self.engine.first, self.engine.end):
            found["processes"] += PROCESS_BYTES
        for role, size in self.sizes.items():
            if slot not in size.slots:
                continue
            found["processes"] += PROCESS_BYTES
            held = self._stages[role, size.layout.coords(slot - size.first_slot).pp]
            of_rank = held.host(size, slot in self.shared, self.recipe)
            found |= {purpose: found.get(purpose, 0) + num_bytes for purpose, num_bytes in of_rank.items()}
            if size.trains and self.recipe.checkpoint.every:
                gathering, waiting = held.staging(size)
                most = max(most, begun + gathering, begun + waiting)
                begun += waiting if self.recipe.checkpoint.asynchronous else 0
        return found | ({"checkpoint": most} if most else {})


@dataclass(frozen=True)
class _Held:
    """A rank of one stage: its constant memory, the additional memory while it computes or saves, and its state."""

    parts: Parts
    at_work: Parts
    gather_bytes: int = 0  # of the whole of a buffer's one kind of state
    gathering_bytes: int = 0  # of the GPU meanwhile
    share: int = 0  # elements that this rank's optimizer steps on
    trained: int = 0  # elements

    def host(self, size: ModelSize, is_shared: bool, recipe: Recipe) -> dict[str, int]:
        """Bytes of the rank's host by purpose."""
        found: dict[str, int] = {}
        weights = self.parts.weights_bytes
        if size.trains and size.recipe.train.optimizer_offload:
            steps = (PINNED_SHARE * GRADIENT_BYTES + MASTER_BYTES + MOMENTS_BYTES) * self.share
            building = MASTER_BYTES * (self.trained + self.share)  # Megatron first makes one over whole weights
            found["optimizer"] = max(math.ceil(steps), building)
        elif size.trains and is_shared:
            found["offloaded_optimizer"] = math.ceil(PINNED_SHARE * self.parts.optimizer_bytes)
        if size.role == "policy" and has_reference(recipe.algorithm, recipe.reference.use):
            found["reference"] = math.ceil(PINNED_SHARE * weights)
        if size.role != "policy" and is_shared:
            found["offloaded_weights"] = math.ceil(PINNED_SHARE * weights)
        return found

    def staging(self, size: ModelSize) -> tuple[int, int]:
        """Bytes of the rank's host while its checkpoint is gathered, and afterwards until it is written.

        First the optimizer's whole state, with a buffer's own part and two lists of one kind of it, or with clones of
        what this rank writes, as large as its own part; these stay, and the weights join them.
        """
        gathering = GATHERED_BYTES * (self.trained + self.share) + 2 * self.gather_bytes
        return gathering, (GATHERED_BYTES + item_bytes(size)) * self.share


def _stage_parts(size: ModelSize, stage: int, micro_batches: int) -> _Held:
    chunks, layout, item = size.stages[stage], size.layout, item_bytes(size)
    weights = sum(chunk.elements * item + chunk.buffer_bytes for chunk in chunks)
    if not size.trains:
        running = forward_bytes(size, stage)
        return _Held(Parts(weights_bytes=weights), _at_work(running, 0.0))
    trained = sum(chunk.trained for chunk in chunks)
    share = math.ceil(sum(chunk.dense / (layout.dp * layout.cp) + chunk.expert / layout.edp for chunk in chunks))
    parts = Parts(
        weights_bytes=weights,
        grads_bytes=trained * GRADIENT_BYTES,
        optimizer_bytes=0 if size.recipe.train.optimizer_offload else share * state_bytes(size.recipe.train, item),
    )
    at_work = _at_work(activation_bytes(size, stage, micro_batches), logits_bytes(size, stage))
    return _Held(parts, at_work, *_gathered(layout, chunks), share, trained)


def state_bytes(train: TrainConfig, item: int) -> int:
    """Bytes of the GPU that AdamW keeps of a weight of `item` bytes: its master in another type and two moments."""
    options = train.optimizer
    if not options.get("use_precision_aware_optimizer"):
        return MASTER_BYTES * (item == 2) + MOMENTS_BYTES
    master, *moments = (
        STATE_DTYPES.get(str(options.get(key)), STATE_DTYPES["float32"]).itemsize
        for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    )
    keeps_remainders = item == 2 and master == 4 and options.get("store_param_remainders", True)  # lower halves alone
    return (2 if keeps_remainders else master) + sum(moments)


def _gathered(layout: TrainLayout, chunks: Sequence[ChunkSize]) -> tuple[int, int]:
    """Bytes of one kind of state in the largest buffer; of all copies of it on the GPU, the own part among them."""
    buffers = [(chunk.dense, layout.dp * layout.cp) for chunk in chunks]
    buffers += [(chunk.expert, layout.edp) for chunk in chunks]
    on_gpu = max(GATHER_COPIES * elements + elements / replicas for elements, replicas in buffers)
    return GATHER_BYTES * max(elements for elements, _ in buffers), math.ceil(GATHER_BYTES * on_gpu)


def _at_work(activations: float, logits: float) -> Parts:
    fragmented = math.ceil(FRAGMENTED_SHARE * (activations + logits))
    return Parts(activations_bytes=math.ceil(activations), logits_bytes=math.ceil(logits), other_bytes=fragmented)


def communicators(layout: TrainLayout) -> int:
    """Megatron's communicators of more than one rank.

    Tensor, context, data with and without context, pipeline, expert, expert tensor, expert data; and the world.
    """
    groups = (layout.tp, layout.cp, layout.dp, layout.dp * layout.cp, layout.pp, layout.ep, layout.etp, layout.edp)
    return sum(size > 1 for size in groups) - (layout.cp == 1 and layout.dp > 1) + (layout.world_size > 1)
