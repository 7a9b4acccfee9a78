"""The models of a run: the policy that is trained, and those beside it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import (
    Branch,
    Count,
    FilePath,
    LearningRate,
    NonNegative,
    ParallelSize,
    Positive,
    Share,
    Slot,
    Weight,
    Whole,
)
from megarl.types import LrSchedule


class TrainConfig(Branch):
    """Parallel axes and optimiser of the trainer.

    Megatron's own fields pass through: `megatron` to its TransformerConfig, `ddp` to its DistributedDataParallelConfig,
    `optimizer` to its OptimizerConfig.

    The coefficients are of means over the update's tokens: of each sequence's load balance (aux_loss), of the squared
    log of the router's partition function (z_loss), of the multi-token prediction's loss (mtp_loss; 0 freezes it).
    """

    tp: ParallelSize = 1
    pp: ParallelSize = 1
    ep: ParallelSize = 1
    cp: ParallelSize = 1  # ranks that share out each sequence's tokens
    vpp: ParallelSize = 1  # virtual stages of each pipeline rank
    etp: ParallelSize | None = None  # ranks that split one expert; 1, or tp where ep is 1, unless it is set
    layers_per_stage: Annotated[tuple[Whole, ...], Field(strict=False)] = ()  # uneven stages
    lr: LearningRate
    warmup_steps: Whole = 0
    lr_schedule: LrSchedule = "constant"
    lr_end: Share = 0.0  # of lr, what the schedule comes down towards, behind the last step
    weight_decay: NonNegative = 0.0
    grad_clip: Positive = 1.0
    tokens_per_micro_batch: Count = 4096
    updates_per_step: Count = 1
    aux_loss: NonNegative = 0.0
    z_loss: NonNegative = 0.0
    mtp_loss: NonNegative = 0.0
    router_bias_rate: NonNegative = 0.0  # by which DeepSeek's router biases move towards balance after an update
    replay: Literal["off", "r2", "r3"] = "off"  # experts of each token: chosen anew, by the old policy, by the engine
    optimizer_offload: bool = False  # the optimizer lives and steps in host memory
    local_layers: bool = False  # Megatron's own layers on GPUs that lack TransformerEngine; slower
    megatron: dict[str, Any] = Field(default_factory=dict)
    ddp: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any] = Field(default_factory=dict)


class ReferenceConfig(Branch):
    """A model that stays as it is, which the policy's drift is measured against: the start unless `path` names another.

    It needs no GPU memory: its weights wait in the host's and change places with the policy's for a forward pass.
    """

    use: bool = False
    path: FilePath | None = None


class RanksConfig(Branch):
    """Training ranks of a model beside the policy; what is not set is as the policy's.

    They sit on the slots from `first_gpu` on, shared with whoever else is there: those that share take turns.
    """

    first_gpu: Slot = 0
    gpus: ParallelSize | None = None
    tp: ParallelSize | None = None
    pp: ParallelSize | None = None
    ep: ParallelSize | None = None
    cp: ParallelSize | None = None
    vpp: ParallelSize | None = None
    etp: ParallelSize | None = None
    layers_per_stage: Annotated[tuple[Whole, ...] | None, Field(strict=False)] = None
    tokens_per_micro_batch: Count | None = None


class CriticConfig(Branch):
    """The model that learns beside the policy, of algorithms that have one; for PRIME its implicit reward model.

    A critic's checkpoint is a language model's or a classifier's with one score, the reward model's a language model's.
    `path` and what is said of the learning rate are the policy's unless they are set.
    """

    path: FilePath | None = None
    lr: LearningRate | None = None
    warmup_steps: Whole | None = None
    lr_schedule: LrSchedule | None = None
    lr_end: Share | None = None
    ranks: RanksConfig = Field(default_factory=RanksConfig)


class RewardModelConfig(Branch):
    """A sequence classifier with one score, whose `weight` times it is added to the reward of each response.

    It reads prompt and response as a chat, by its own tokenizer and template; of one that is too long, the end.
    """

    path: FilePath | None = None
    weight: Weight = 1.0
    ranks: RanksConfig = Field(default_factory=RanksConfig)
