"""The seconds of a step, phase by phase: an estimate from a hardware table, not yet compared with a run on GPUs.

Phases add up, but for the phase of sampling that `rollout.ahead` puts beside training: ranks wait for what of it is
longer. Rewards are assumed to be scored while other samples are drawn.
docs/plan.md lists what is counted and what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megarl.algos import ALGORITHMS, has_reference, hyperparameters_of
from megarl.config import CheckpointConfig, Recipe
from megarl.config.hardware import Hardware
from megarl.placement.flex_dispatcher import is_flex
from megarl.placement.recomputation import recomputed_parts
from megarl.placement.roles import RoleName, Roles, reference_copy, trains_merged
from megarl.plan.batch import RankWork, Samples
from megarl.plan.expert_exchange import routing_of
from megarl.plan.fp8_training import Fp8Linears, Module, fp8_linears_of
from megarl.plan.layer_time import HIDDEN_SHARE, LAYER_S, RankLayers, overlaps_of
from megarl.plan.model_size import ModelSize, ModelSizes
from megarl.plan.muon_cost import SECOND_MOMENT_BYTES, MuonWork, matrix_elements
from megarl.plan.optimizer_memory import GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, state_bytes
from megarl.plan.rollout_time import RolloutTime
from megarl.training.flops import (
    TRAIN_OVER_FORWARD,
    module_forward_flops,
    output_forward_flops,
    total_forward_flops,
)
from megarl.types import IntArray, RecomputedPart

# assumption: a GPU's eighth of a host's memory bandwidth, for an optimizer there
HOST_ADAM_BYTES_PER_S = 40e9
# the modules whose linear layers are computed again with a part of a layer
MODULES_OF: Mapping[RecomputedPart, Collection[Module]] = {
    "mla_up_proj": {"mla_up_proj"},
    "mlp": {"mlp"},
    "moe": {"experts", "shared_experts"},
    "shared_experts": {"shared_experts"},
}


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


@dataclass(frozen=True)
class ComputingModel:
    """The policy or an auxiliary model, with a step's samples; the bytes are of its fullest rank.

    recomputed: parts of the layers that each pipeline rank computes again in the backward pass. takes_turns: its GPUs'
    memory changes hands.
    parameters: of the whole model that are trained. frozen_bytes: of the weights, where adapters are trained; 0
    otherwise. expert_grads_bytes: of grads_bytes, those of experts, which have other replicas. sums_beside: gradients
    are summed beside the backward pass of an update's last micro-batch. muon: of the stage with most of that work.
    muon_parameters: of the whole model those that have one moment. trains_mtp: whether the layers of multi-token
    prediction are trained. fp8: the linear layers that multiply in fp8; None: none do.
    """

    layers: RankLayers
    samples: Samples
    share: RankWork
    recomputed: Sequence[frozenset[RecomputedPart]]
    offloads: bool
    takes_turns: bool
    weights_bytes: float
    grads_bytes: float
    optimizer_bytes: float
    parameters: int
    frozen_bytes: float = 0.0
    expert_grads_bytes: float = 0.0
    sums_beside: bool = False
    muon: MuonWork = MuonWork()
    muon_parameters: int = 0
    trains_mtp: bool = False
    fp8: Fp8Linears | None = None
    weight_bytes: int = 2  # of one weight

    @property
    def hardware(self) -> Hardware:
        return self.layers.hardware

    @property
    def trained_bytes(self) -> float:
        return self.weights_bytes - self.frozen_bytes

    @property
    def crossing_s(self) -> float:
        """Seconds in which the weights cross PCIe."""
        return self.weights_bytes / self.hardware.pcie_bytes_per_s

    def forward_s(self, updates: int | None = None) -> float:
        """Seconds of one forward pass over the samples of so many of the step's updates, or of all.

        The pipeline fills and drains once, and all stages wait for the slowest one.
        """
        of_all = self.share.updates
        num = of_all if updates is None else updates
        if not num:
            return 0.0
        slowest_s = num / of_all * max(self._stages_s(1, 0))
        return (1 + self.share.bubble / num) * slowest_s

    @property
    def updates_s(self) -> float:
        """Forward, again where it is recomputed, and backward: all stages wait for the slowest one."""
        again_s = [
            load * self._again_s(parts)
            for load, parts in zip(self.layers.stage_loads, self.recomputed, strict=True)
        ]
        stages_s = [sum(parts_s) for parts_s in zip(self._stages_s(1, 1), again_s, strict=True)]
        return (1 + self.share.bubble) * max(stages_s)

    def _stages_s(self, forwards: int, backwards: int) -> list[float]:
        """So many passes of each pipeline rank, without the bubble; the last one has the output layer besides.

        Where multi-token prediction is trained, the last one has its layers too.
        """
        layers_s = self._mean_layers_s(forwards, backwards)
        stages_s = [load * layers_s for load in self.layers.stage_loads]
        flops = self._output_flops(forwards + backwards * self.logits_again, backwards)
        if backwards and self.trains_mtp:
            shape = self.layers.shape
            num_predicted = shape.num_mtp_layers
            of_layer_s = layers_s * self.layers.layout.pp / shape.num_layers
            stages_s[-1] += num_predicted * of_layer_s
            # the output layer once more for each of them
            flops *= 1 + num_predicted
        of_stage = self._reached / self.layers.layout.pp
        stages_s[-1] += flops / of_stage / self.share.balance
        return stages_s

    @property
    def logits_again(self) -> int:
        """Forward passes of the output layer in a backward pass, which has kept no logits (parallel/logprobs.py)."""
        return 1

    def _output_flops(self, forwards: int, backwards: int) -> float:
        """Of the output layer."""
        flops = self._computed(partial(output_forward_flops, self.layers.shape))
        return self._passes(forwards, backwards) * flops

    def _again_s(self, parts: frozenset[RecomputedPart]) -> float:
        """What a mean stage takes more where it computes these parts again."""
        if "layer" in parts:
            return self._mean_layers_s(2, 1) - self._mean_layers_s(1, 1)
        return sum(map(self._part_s, parts))

    def _part_s(self, part: RecomputedPart) -> float:
        layers = self.layers
        flops = self._computed(
            lambda lengths: module_forward_flops(layers.shape, lengths).get(part, 0.0)
        )
        exchanges_s = layers.part_s(part, self._rank_tokens)
        each = layers.part_micro_batch_s(part)
        products_s = self._flops_s(flops, 1, 0, MODULES_OF.get(part, ()))
        seconds = (products_s + exchanges_s) / self.share.balance
        return seconds + self.share.updates * self.share.micro_batches * each

    def _computed(self, sum_of: Callable[[IntArray], float]) -> float:
        """A sum over sequences of these lengths, for the step's samples without the prompts that others bring."""
        samples = self.samples
        num_saved = self.share.saved_prompts * samples.num_trained
        return float(
            sum_of(samples.lengths) - num_saved * sum_of(np.array([samples.prompt_tokens]))
        )

    @property
    def _reached(self) -> float:
        """Operations a second of all ranks together."""
        world_size = self.layers.layout.world_size
        return world_size * self.hardware.bf16_flops * self.hardware.compute_share

    def _mean_layers_s(self, forwards: int, backwards: int) -> float:
        """So many passes of the layers of a mean pipeline rank, without the bubble.

        Products, exchanges less what is hidden of them, and each micro-batch, with what it costs in `RankLayers`.
        """
        share = self.share
        layers = self.layers
        exchanges = layers.exchanges(self._rank_tokens)
        exchanges_s = exchanges.total(forwards, backwards)
        if layers.overlaps:
            exchanges_s -= self._hidden_s(exchanges.experts, forwards, backwards)
        each = layers.micro_batch_s(self.weights_bytes, self.grads_bytes, forwards, backwards)
        products_s = self._products_s(forwards, backwards)
        products_s -= self._output_flops(forwards, backwards) / self._reached
        seconds = (products_s + exchanges_s) / share.balance
        seconds += share.updates * share.micro_batches * each
        if self.fp8:
            seconds += share.updates * self._fp8_update_s(self.fp8, forwards, backwards)
        return seconds

    def _fp8_update_s(self, fp8: Fp8Linears, forwards: int, backwards: int) -> float:
        """Of each update, what fp8 takes however few its tokens are: its weights' codes, and further kernels."""
        layers = self.layers
        num_layers = layers.shape.num_layers / layers.layout.pp
        micro_batches = self.share.micro_batches
        weights = fp8.rank_weights(layers.layout)
        moved = fp8.update_bytes(weights) + micro_batches * fp8.micro_batch_bytes(
            weights, forwards, backwards
        )
        launched = micro_batches * num_layers * fp8.kernels(forwards, backwards) * LAYER_S
        return moved / self.hardware.hbm_reached_per_s + launched

    @property
    def _rank_tokens(self) -> float:
        """Of the step's samples, the tokens that each data-parallel rank computes."""
        return self._computed(np.sum) / self.layers.layout.dp

    def _products_s(self, forwards: int, backwards: int) -> float:
        """FLOPs over what all ranks reach, and what is quantised for them."""
        flops = self._computed(partial(total_forward_flops, self.layers.shape))
        return self._flops_s(flops, forwards, backwards)

    def _flops_s(
        self, flops: float, forwards: int, backwards: int, modules: Collection[Module] | None = None
    ) -> float:
        """So many passes of `flops` each, of which the linear layers of these modules, or all, may be in fp8."""
        plain_s = self._passes(forwards, backwards) * flops / self._reached
        if self.fp8 is None:
            return plain_s
        hardware = self.hardware
        tokens = self._computed(np.sum)
        in_fp8 = forwards
        if self.fp8.backward == "fp8":
            in_fp8 = self._passes(forwards, backwards)
        speed_up = (hardware.fp8_flops or hardware.bf16_flops) / hardware.bf16_flops
        saved_s = in_fp8 * self.fp8.flops(tokens, modules) / self._reached * (1 - 1 / speed_up)
        moved = forwards * self.fp8.forward_bytes(tokens, modules)
        if backwards:
            moved += backwards * self.fp8.backward_bytes(tokens, modules)
        moved /= self.layers.layout.world_size
        return plain_s - saved_s + moved / hardware.hbm_reached_per_s

    def _passes(self, forwards: int, backwards: int) -> int:
        """The number of forward passes that cost as much.

        A backward pass costs two (gradients of inputs and of weights), and one where the weights are frozen;
        adapters' own products are not counted.
        """
        return forwards + backwards * (1 if self.frozen_bytes else TRAIN_OVER_FORWARD - 1)

    def _hidden_s(self, experts_s: float, forwards: int, backwards: int) -> float:
        """Of so many passes, what the step does not wait for; experts_s: of one exchange with experts, and back."""
        layers = self.layers
        exchanged_s = (forwards + backwards) * experts_s
        if "experts" in layers.overlaps:
            # a pass without gradients goes through Megatron's plain schedule
            beside_s = self._products_s(forwards, backwards) if backwards else 0.0
            hidden_s = HIDDEN_SHARE * min(exchanged_s, beside_s)
            return layers.paired_share(self.share.micro_batches) * hidden_s
        flops = self._computed(
            lambda lengths: module_forward_flops(layers.shape, lengths)["shared_experts"]
        )
        sums_s = (forwards + backwards) * layers.part_s("shared_experts", self._rank_tokens)
        shared_s = self._flops_s(flops, forwards, backwards, {"shared_experts"}) + sums_s
        return HIDDEN_SHARE * min(exchanged_s, shared_s)

    @property
    def memory_s(self) -> float:
        """The optimizer's state to the GPU and back to the host, where GPUs are shared and it does not live there."""
        if self.takes_turns and not self.offloads:
            return 2 * self.optimizer_bytes / self.hardware.pcie_bytes_per_s
        return 0.0

    @property
    def gradients_s(self) -> float:
        """Gradients summed into shards and weights gathered again, once an update; only the sums can be hidden.

        A ring of n ranks moves (n - 1) / n of each (Rabenseifner 2004); experts have replicas of their own.
        """
        layout = self.layers.layout
        of_experts = self.expert_grads_bytes
        replicas = layout.dp * layout.cp
        of_others = (self.grads_bytes - of_experts) * (1 - 1 / replicas)
        volume = of_experts * (1 - 1 / layout.edp) + of_others
        sums_s = volume / self.layers.link_per_s(layout.world_size)
        # there as gradients, back as weights
        weights_s = sums_s * self.trained_bytes / max(1.0, self.grads_bytes)
        if self.sums_beside:
            passes = self.share.updates * self.share.micro_batches
            sums_s -= HIDDEN_SHARE * min(sums_s, self._products_s(0, 1) / passes)
        return sums_s + weights_s

    @property
    def optimizer_s(self) -> float:
        """The state is read and written once: in the GPU's memory, or in the host's, over PCIe twice."""
        hardware = self.hardware
        if not self.offloads:
            return 2 * self.optimizer_bytes / hardware.hbm_reached_per_s + self._muon_s
        shard = self.optimizer_bytes / 12  # weights: 12 bytes of state each
        crossing = (GRADIENT_BYTES + 2) * shard / hardware.pcie_bytes_per_s
        return 2 * self.optimizer_bytes / HOST_ADAM_BYTES_PER_S + crossing

    @property
    def _muon_s(self) -> float:
        """Muon's products, and matrices that go to where they are whole and come back, in the weights' type."""
        layout = self.layers.layout
        rank_reaches = self._reached / layout.world_size
        sent_bytes = 2 * self.muon.sent * self.weight_bytes
        ranks = max(layout.tp, layout.etp)
        return self.muon.flops / rank_reaches + sent_bytes / self.layers.link_per_s(ranks)

    def learning_time(self) -> TrainTime:
        """The updates of a step."""
        return TrainTime(
            memory_s=self.memory_s,
            updates_s=self.updates_s,
            gradients_s=self.share.updates * self.gradients_s,
            optimizer_s=self.share.updates * self.optimizer_s,
        )


def step_times(
    roles: Roles,
    hardware: Hardware,
    sizes: ModelSizes,
    shares: Mapping[RoleName, RankWork],
    samples: Samples,
    reshard_s: float,
) -> tuple[dict[RoleName, TrainTime], StepTime]:
    """The parts of what each model that trains does in a step, and the seconds of every phase but the rollout."""
    recipe = roles.recipe
    node = recipe.placement.gpus_per_node
    models: dict[RoleName, ComputingModel] = {}
    for role, size in sizes.items():
        train = size.recipe.train
        overlaps = overlaps_of(train.megatron) if size.shape.num_experts else frozenset()
        layers = RankLayers(
            shape=size.shape,
            layout=size.layout,
            hardware=hardware,
            gpus_per_node=node,
            deepep=is_flex(train),
            overlaps=overlaps,
            ring_shares=shares[role].ring_shares,
            routing=routing_of(size.shape, size.model.facts),
        )
        models[role] = _computing(size, layers, samples, shares[role], roles.shared_slots)
    learning: dict[RoleName, TrainTime] = {"policy": policy_time(recipe, models["policy"])}
    score_s = critic_s = 0.0
    if critic := models.get("critic"):
        # a forward pass for the values, then its updates
        learning["critic"] = replace(critic.learning_time(), values_s=critic.forward_s())
        critic_s = learning["critic"].total_s
    if scorer := models.get("reward_model"):
        score_s = scorer.memory_s + scorer.forward_s()
    nodes = -(-recipe.placement.gpus // node)
    step = StepTime(
        rollout_s=0.0,
        score_s=score_s,
        critic_s=critic_s,
        train_s=learning["policy"].total_s,
        ahead_s=0.0,
        reshard_s=reshard_s,
        save_s=sum(save_s(recipe.checkpoint, models[role], nodes) for role in learning),
    )
    return learning, step


def _computing(
    size: ModelSize,
    layers: RankLayers,
    samples: Samples,
    share: RankWork,
    shared: Container[int],
) -> ComputingModel:
    """One role's model with the bytes of the ranks of its fullest stage. shared: slots of several models or engines."""
    train = size.recipe.train
    has_muon = train.optimizer_name == "muon"
    stages = range(size.layout.pp)
    fullest = max(stages, key=size.trained)
    if train.optimizer_offload:
        each = MOMENTS_BYTES + MASTER_BYTES
    else:
        each = state_bytes(train, size.weight_bytes)
    weights = max(sum(chunk.elements for chunk in chunks) for chunks in size.stages)
    frozen = weights - size.trained(fullest) if size.adapter_parameters else 0
    return ComputingModel(
        layers,
        samples,
        share,
        recomputed=[recomputed_parts(train, stage) for stage in stages],
        offloads=train.optimizer_offload,
        takes_turns=any(slot in shared for slot in size.slots),
        weights_bytes=weights * size.weight_bytes,
        grads_bytes=size.trained(fullest) * GRADIENT_BYTES,
        optimizer_bytes=max(
            size.optimizer_share(stage) * each - size.muon(stage).elements * SECOND_MOMENT_BYTES
            for stage in stages
        ),
        parameters=size.adapter_parameters or size.parameters,
        frozen_bytes=frozen * size.weight_bytes,
        expert_grads_bytes=sum(chunk.expert for chunk in size.stages[fullest]) * GRADIENT_BYTES,
        sums_beside=train.ddp.get("overlap_grad_reduce", True),
        muon=max(map(size.muon, stages), key=lambda work: work.flops),
        muon_parameters=matrix_elements(size.shape) if has_muon else 0,
        weight_bytes=size.weight_bytes,
        trains_mtp=train.mtp_loss > 0,
        fp8=fp8_linears_of(size),
    )


def policy_time(recipe: Recipe, model: ComputingModel) -> TrainTime:
    """`PolicyRank`: old log-probabilities of the `updates_with_pass`, those of a reference, then the updates."""
    name = recipe.algorithm.name
    updates = model.share.updates
    with_pass = ALGORITHMS[name].updates_with_pass(
        hyperparameters_of(name, recipe.algorithm), updates
    )
    old_logprobs = model.forward_s(len(with_pass))
    reference = 0.0
    if has_reference(recipe.algorithm, recipe.reference.use):
        reference = model.forward_s()
    merged = trains_merged(recipe)
    # its weights and the policy's change places, and back
    if reference_copy(recipe) or (reference and merged):
        reference += 4 * model.crossing_s
    learnt = model.learning_time()
    memory_s = learnt.memory_s
    if merged:  # the frozen weights come from the host for each update's sums
        memory_s += updates * model.crossing_s
    return replace(learnt, memory_s=memory_s, old_logprobs_s=old_logprobs, reference_s=reference)


def save_s(checkpoint: CheckpointConfig, model: ComputingModel, nodes: int) -> float:
    """Mean seconds a step of writing checkpoints: copies to the host, and files where training waits for them.

    Files have each trained parameter once, in the model's type, and 12 bytes of optimizer, of a matrix with Muon 8; all
    nodes write at once.
    """
    if not checkpoint.every:
        return 0.0
    hardware = model.hardware
    seconds = (model.trained_bytes + model.optimizer_bytes) / hardware.pcie_bytes_per_s
    if not checkpoint.asynchronous:
        file_bytes = model.parameters * (2 + 12) - model.muon_parameters * SECOND_MOMENT_BYTES
        seconds += file_bytes / (nodes * hardware.disk_bytes_per_s)
    return seconds / checkpoint.every
