"""The models of a run: the policy, its reference, the critic and the reward model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.fields import (
    Branch,
    ContextSize,
    Count,
    FilePath,
    LearningRate,
    LoraRank,
    NonNegative,
    ParallelSize,
    Positive,
    Share,
    Slot,
    Text,
    Weight,
    Whole,
)
from megarl.types import LrSchedule, RecomputedPart


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
    # ranks that share the tokens of each sequence; auto: as many as its micro-batch needs
    cp: ContextSize = 1
    vpp: ParallelSize = 1  # virtual stages of each pipeline rank
    # ranks that split one expert; 1, or tp where ep is 1, unless it is set
    etp: ParallelSize | None = None
    layers_per_stage: Annotated[tuple[Whole, ...], Field(strict=False)] = ()  # uneven stages
    lr: LearningRate
    warmup_steps: Whole = 0
    lr_schedule: LrSchedule = "constant"
    lr_end: Share = 0.0  # of lr: the schedule reaches this share after the last step
    weight_decay: NonNegative = 0.0
    grad_clip: Positive = 1.0
    tokens_per_micro_batch: Count = 4096  # of all ranks that share them; with cp auto of each rank
    updates_per_step: Count = 1
    aux_loss: NonNegative = 0.0
    z_loss: NonNegative = 0.0
    mtp_loss: NonNegative = 0.0
    # of the steps of DeepSeek's router biases towards balance, after each update
    router_bias_rate: NonNegative = 0.0
    # of routed experts: none, the old policy's, the engine's
    replay: Literal["off", "r2", "r3"] = "off"
    optimizer_offload: bool = False  # the optimizer lives and steps in host memory
    local_layers: bool = False  # Megatron's own layers on GPUs that lack TransformerEngine; slower
    # tokens that several samples of a micro-batch begin with are computed once
    share_prefixes: bool = False
    # parts of a layer that are computed again in the backward pass, each on so many pipeline ranks from the first
    recompute: dict[RecomputedPart, Whole] = {}
    megatron: dict[str, Any] = {}
    ddp: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}

    @property
    def passes_options(self) -> bool:
        """Whether Megatron gets options of its own."""
        return bool(self.recompute or self.megatron or self.ddp or self.optimizer)


class LoraConfig(Branch):
    """Low-rank adapters (LoRA, arXiv 2106.09685) in place of the policy's weights, which stay frozen.

    A linear layer with weight W computes W x + (alpha / rank) B A x. `targets` are the last parts of the layers' names
    in the checkpoint (q_proj, down_proj); all linear layers of the decoder unless it is set. Each routed expert has
    adapters of its own, of rank `experts`, and alpha / `experts` there. 0: none; null: `rank` over the number of
    experts that a token is sent to, rounded down, at least 1. A run begins with the adapters of `path`, a folder in
    PEFT's format, or with B = 0.

    `sync: merged`: engines get the sums W + (alpha / rank) B A, rounded to `model.dtype` as `rounding` says; in a
    16-bit type training computes with these too. `adapters`: they get the frozen weights once and then the adapters
    alone, with which SGLang computes.
    """

    rank: LoraRank = 16
    alpha: Positive = 32.0
    targets: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    experts: Annotated[int, Field(ge=0, le=4096)] | None = None
    path: FilePath | None = None
    sync: Literal["merged", "adapters"] = "merged"
    rounding: Literal["nearest", "stochastic"] = "nearest"


class ReferenceConfig(Branch):
    """The frozen model of the KL terms: the policy's first weights, unless `path` names a checkpoint.

    It needs no GPU memory: its weights are in host memory and are swapped with the policy's for a forward pass. With
    `lora` the reference is the frozen model, also where a run begins with the adapters of `lora.path`.
    """

    use: bool = False
    path: FilePath | None = None


class RanksConfig(Branch):
    """Training ranks of the critic or the reward model; keys that are not set are as for the policy.

    Their slots begin at `first_gpu`. Ranks and engines that share a slot hold its GPU memory in turn.
    """

    first_gpu: Slot = 0
    gpus: ParallelSize | None = None
    tp: ParallelSize | None = None
    pp: ParallelSize | None = None
    ep: ParallelSize | None = None
    cp: ContextSize | None = None
    vpp: ParallelSize | None = None
    etp: ParallelSize | None = None
    layers_per_stage: Annotated[tuple[Whole, ...] | None, Field(strict=False)] = None
    tokens_per_micro_batch: Count | None = None


class CriticConfig(Branch):
    """The auxiliary model of algorithms that train one: a critic, or PRIME's implicit reward model.

    A critic's checkpoint is a language model or a classifier with one score, an implicit reward model's a language
    model. `path` and the keys of the learning rate are the policy's unless they are set.

    With `shares_weights` a critic learns adapters of the size of `lora` and its head, and computes with the policy's
    frozen weights, which are in memory once; its ranks must be on the policy's slots, in the same layout.
    """

    path: FilePath | None = None
    shares_weights: bool = False
    lr: LearningRate | None = None
    warmup_steps: Whole | None = None
    lr_schedule: LrSchedule | None = None
    lr_end: Share | None = None
    ranks: RanksConfig = RanksConfig()


class RewardModelConfig(Branch):
    """A sequence classifier with one score; `weight` times the score is added to the reward of each response.

    It reads prompt and response as a chat, with its own tokenizer and template; of a chat that is too long, the end.

    `adapters`, in place of `path`, is a folder in PEFT's format: adapters and a head for the policy's frozen weights,
    which are in memory once. Its ranks must be on the policy's slots, in the same layout; tokenizer and template are
    the policy's.
    """

    path: FilePath | None = None
    adapters: FilePath | None = None
    weight: Weight = 1.0
    ranks: RanksConfig = RanksConfig()
