"""The seconds of a step, phase by phase: an estimate from a hardware table, not yet compared with a run on GPUs.

Phases add up, but for the phase of sampling that `rollout.ahead` puts beside training: ranks wait for what of it is
longer. Rewards are assumed to be scored while other samples are drawn.
docs/plan.md lists what is counted and what is not.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from megarl.algos import has_reference, hyperparameters_of, needs_old_logprobs
from megarl.config import Recipe
from megarl.config.hardware import Hardware
from megarl.model.shape import ModelShape
from megarl.placement.roles import RoleName, Roles, reference_copy, trains_merged
from megarl.placement.train_layout import TrainLayout
from megarl.plan.batch import RankWork, Samples
from megarl.plan.layer_time import RankLayers
from megarl.plan.model_size import ModelSize
from megarl.plan.optimizer_memory import GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, state_bytes
from megarl.plan.rollout_time import RolloutTime
from megarl.training.flops import TRAIN_OVER_FORWARD, total_forward_flops

# assumption: a GPU's eighth of a host's memory bandwidth, for an optimizer there
HOST_ADAM_BYTES_PER_S = 40e9


@dataclass(frozen=True)
class ComputingModel:
    """The policy or an auxiliary model; the bytes are of its fullest rank.

    recomputes: the backward pass runs the forward pass again. takes_turns: its GPUs' memory changes hands.
    parameters: of the whole model that are trained. deepep: as in `RankLayers`. frozen_bytes: of the weights, where
    adapters are trained; 0 otherwise. expert_grads_bytes: of grads_bytes, those of experts, which have other replicas.
    """

    shape: ModelShape
    layout: TrainLayout
    share: RankWork
    recomputes: bool
    offloads: bool
    takes_turns: bool
    weights_bytes: float
    grads_bytes: float
    optimizer_bytes: float
    parameters: int
    deepep: bool = False
    frozen_bytes: float = 0.0
    expert_grads_bytes: float = 0.0

    @property
    def backward_passes(self) -> int:
        """What the products of a backward pass cost, in forward passes."""
        if self.frozen_bytes:
            return 1
        return TRAIN_OVER_FORWARD - 1

    @property
    def trained_bytes(self) -> float:
        return self.weights_bytes - self.frozen_bytes


@dataclass(frozen=True)
class TrainTime:
    """Parts of what a model's ranks do in a step, in order; memory_s: moving the optimizer's state in and out."""

    memory_s: float = 0.0
    values_s: float = 0.0
    old_logprobs_s: float = 0.0
    reference_s: float = 0.0
    updates_s: float = 0.0
    gradients_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class StepTime:
    """Seconds. save_s: what a checkpoint costs the step that makes it, over the steps between; it is in total_s.

    rollout_s: of sampling before the training. ahead_s: of waiting, after the training, for the phase beside it.
    """

    rollout_s: float
    score_s: float
    critic_s: float
    train_s: float
    ahead_s: float
    reshard_s: float
    save_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())

    @property
    def learning_s(self) -> float:
        """Seconds between the choice of a step's samples and the end of its updates."""
        return self.score_s + self.critic_s + self.train_s

    def with_rollout(self, rollout: RolloutTime) -> StepTime:
        """The same step with this rollout."""
        return replace(self, rollout_s=rollout.before_s, ahead_s=rollout.waited_s(self.learning_s))

    def by_phase(self) -> dict[str, float]:
        """Seconds of each phase that takes any, in order."""
        return {name.removesuffix("_s"): seconds for name, seconds in vars(self).items() if seconds}


def step_times(
    roles: Roles,
    hardware: Hardware,
    sizes: Mapping[RoleName, ModelSize],
    shares: Mapping[RoleName, RankWork],
    samples: Samples,
    reshard_s: float,
) -> tuple[dict[RoleName, TrainTime], StepTime]:
    """The parts of what each model that trains does in a step, and the seconds of every phase but the rollout."""
    recipe = roles.recipe
    node = roles.recipe.placement.gpus_per_node
    models: dict[RoleName, ComputingModel] = {
        role: _computing(size, shares[role], roles.shared_slots) for role, size in sizes.items()
    }
    learning: dict[RoleName, TrainTime] = {
        "policy": policy_time(recipe, models["policy"], samples, hardware, node)
    }
    score_s = critic_s = 0.0
    if "critic" in models:
        learning["critic"] = critic_time(models["critic"], samples, hardware, node)
        critic_s = learning["critic"].total_s
    if "reward_model" in models:
        scorer = models["reward_model"]
        score_s = memory_s(scorer, hardware) + forward_s(scorer, samples, hardware, node)
    nodes = -(-recipe.placement.gpus // node)
    saved = sum(save_s(recipe, models[role], hardware, nodes) for role in learning)
    step = StepTime(
        rollout_s=0.0,
        score_s=score_s,
        critic_s=critic_s,
        train_s=learning["policy"].total_s,
        ahead_s=0.0,
        reshard_s=reshard_s,
        save_s=saved,
    )
    return learning, step


def _computing(size: ModelSize, share: RankWork, shared: Container[int]) -> ComputingModel:
    """One role's model with the bytes of the ranks of its fullest stage. shared: slots of several models or engines."""
    options = size.recipe.train
    stages = range(size.layout.pp)
    fullest = max(stages, key=size.trained)
    offloads = options.optimizer_offload
    if offloads:
        each = MOMENTS_BYTES + MASTER_BYTES
    else:
        each = state_bytes(options, size.weight_bytes)
    weights = max(sum(chunk.elements for chunk in chunks) for chunks in size.stages)
    return ComputingModel(
        shape=size.shape,
        layout=size.layout,
        share=share,
        recomputes=options.megatron.get("recompute_granularity") == "full",
        offloads=offloads,
        takes_turns=any(slot in shared for slot in size.slots),
        weights_bytes=weights * size.weight_bytes,
        grads_bytes=size.trained(fullest) * GRADIENT_BYTES,
        expert_grads_bytes=sum(chunk.expert for chunk in size.stages[fullest]) * GRADIENT_BYTES,
        optimizer_bytes=max(map(size.optimizer_share, stages)) * each,
        parameters=size.adapter_parameters or size.parameters,
        deepep=options.megatron.get("moe_token_dispatcher_type") == "flex",
        frozen_bytes=(weights - size.trained(fullest)) * size.weight_bytes
        if size.adapter_parameters
        else 0.0,
    )


def forward_s(model: ComputingModel, samples: Samples, hardware: Hardware, node: int) -> float:
    """One forward pass over the step's samples."""
    return passes_s(model, samples, hardware, node, forwards=1, backwards=0)


def passes_s(
    model: ComputingModel,
    samples: Samples,
    hardware: Hardware,
    node: int,
    *,
    forwards: int,
    backwards: int,
) -> float:
    """So many passes over the step's samples, stretched by bubble, imbalance and the fullest stage's layers.

    Products: FLOPs over what all ranks reach. The backward pass costs two forward passes (gradients of inputs and of
    weights), or one where the weights are frozen; adapters' own products are not counted. Exchanges and micro-batches:
    `RankLayers`.
    """
    share = model.share
    layers = RankLayers(model.shape, model.layout, hardware, node, model.deepep)
    passes = forwards + backwards * model.backward_passes
    flops = passes * total_forward_flops(model.shape, samples.lengths)
    products = flops / (model.layout.world_size * hardware.bf16_flops * hardware.compute_share)
    exchanges = layers.exchanges(float(samples.lengths.sum()) / model.layout.dp).total(
        forwards, backwards
    )
    each = layers.micro_batch_s(model.weights_bytes, model.grads_bytes, forwards, backwards)
    seconds = (products + exchanges) / share.balance + share.updates * share.micro_batches * each
    return seconds * (1 + share.bubble) * layers.unevenness


def policy_time(
    recipe: Recipe, model: ComputingModel, samples: Samples, hardware: Hardware, node: int
) -> TrainTime:
    """`PolicyRank`: old log-probabilities if it `needs_old_logprobs`, those of a reference, then the updates."""
    hyperparameters = hyperparameters_of(recipe.algorithm.name, recipe.algorithm)
    once = forward_s(model, samples, hardware, node)
    reference = 0.0
    if has_reference(recipe.algorithm, recipe.reference.use):
        reference = once
    merged = trains_merged(recipe)
    crossing_s = model.weights_bytes / hardware.pcie_bytes_per_s
    # its weights and the policy's change places, and back
    if reference_copy(recipe) or (reference and merged):
        reference += 4 * crossing_s
    learnt = learning_time(model, samples, hardware, node)
    if merged:  # the frozen weights come from the host for each update's sums
        learnt = replace(learnt, memory_s=learnt.memory_s + model.share.updates * crossing_s)
    if needs_old_logprobs(hyperparameters, model.share.updates):
        old_logprobs = once
    else:
        old_logprobs = 0.0
    return replace(learnt, old_logprobs_s=old_logprobs, reference_s=reference)


def critic_time(
    model: ComputingModel, samples: Samples, hardware: Hardware, node: int
) -> TrainTime:
    """A forward pass for the values, then its updates."""
    return replace(
        learning_time(model, samples, hardware, node),
        values_s=forward_s(model, samples, hardware, node),
    )


def learning_time(
    model: ComputingModel, samples: Samples, hardware: Hardware, node: int
) -> TrainTime:
    """The updates of a step: forward, again where it is recomputed, and backward."""
    forwards = 1 + model.recomputes
    return TrainTime(
        memory_s=memory_s(model, hardware),
        updates_s=passes_s(model, samples, hardware, node, forwards=forwards, backwards=1),
        gradients_s=model.share.updates * gradients_s(model, hardware, node),
        optimizer_s=model.share.updates * optimizer_s(model, hardware),
    )


def gradients_s(model: ComputingModel, hardware: Hardware, node: int) -> float:
    """Gradients summed into shards and weights gathered again, once an update and not hidden behind anything.

    A ring of n ranks moves (n - 1) / n of each (Rabenseifner 2004); experts have replicas of their own.
    """
    layout = model.layout
    of_experts = model.expert_grads_bytes
    # there as gradients, back as weights
    both = 1 + model.trained_bytes / max(1.0, model.grads_bytes)
    replicas = layout.dp * layout.cp
    volume = of_experts * (1 - 1 / layout.edp) + (model.grads_bytes - of_experts) * (
        1 - 1 / replicas
    )
    inside = layout.world_size <= node
    nvlink = hardware.nvlink_bytes_per_s * hardware.nvlink_share
    fabric = hardware.nic_bytes_per_s * hardware.nic_share
    return both * volume / (nvlink if inside else fabric)


def optimizer_s(model: ComputingModel, hardware: Hardware) -> float:
    """AdamW reads and writes its state once: in the GPU's memory, or in the host's, whose shards cross PCIe twice."""
    if not model.offloads:
        return 2 * model.optimizer_bytes / (hardware.hbm_bytes_per_s * hardware.hbm_share)
    shard = model.optimizer_bytes / 12  # weights: 12 bytes of state each
    return (
        2 * model.optimizer_bytes / HOST_ADAM_BYTES_PER_S
        + (GRADIENT_BYTES + 2) * shard / hardware.pcie_bytes_per_s
    )


def memory_s(model: ComputingModel, hardware: Hardware) -> float:
    """The optimizer's state to the GPU and back to the host, where GPUs are shared and it does not live there."""
    moves = model.takes_turns and not model.offloads
    if moves:
        return 2 * model.optimizer_bytes / hardware.pcie_bytes_per_s
    return 0.0


def save_s(recipe: Recipe, model: ComputingModel, hardware: Hardware, nodes: int) -> float:
    """Mean seconds a step of writing checkpoints: copies to the host, and files where training waits for them.

    Files have each trained parameter once, in the model's type, and 12 bytes of optimizer; all nodes write at once.
    """
    every = recipe.checkpoint.every
    if not every:
        return 0.0
    copied = (model.trained_bytes + model.optimizer_bytes) / hardware.pcie_bytes_per_s
    written = model.parameters * (2 + 12) / (nodes * hardware.disk_bytes_per_s)
    return (copied + (0.0 if recipe.checkpoint.asynchronous else written)) / every
