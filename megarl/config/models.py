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
from megarl.fp8 import Fp8Backward
from megarl.types import LrSchedule, RecomputedPart
from megarl.types.json_objects import JsonObject


class RopeScalingConfig(Branch):
    """YaRN (arXiv 2309.00071): rotary positions that reach `factor` times as far as those of pretraining.

    The keys are those of `rope_scaling` in a `config.json`.
    """

    rope_type: Literal["yarn"] = "yarn"
    """Kind of the scaling."""
    factor: Annotated[float, Field(ge=1, le=1e6)]
    """How many times as many positions as `model.rope_scaling.original_max_position_embeddings`."""
    original_max_position_embeddings: Count
    """Positions of the pretraining: 32768 of Qwen3, whose `config.json` has more."""


class ModelConfig(Branch):
    """The policy's checkpoint, and the type of its weights in ranks and engines."""

    path: FilePath
    """Folder of a Hugging Face checkpoint with its tokenizer."""
    config: FilePath | None = None
    """Folder with a `config.json` alone, for plans and dry runs where `model.path` is not there."""
    family: Text | None = None
    """Model family of your own as `module:ROW`, for checkpoints of its architecture (docs/models.md); its module may
    lie in the folder where the command is started; null: a family of megarl."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights on both sides."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of rotary positions in ranks, engines and exported checkpoints, and in those of a critic, in place of
    that of `config.json`; null: as the file has it."""

    @property
    def rope_values(self) -> JsonObject | None:
        """The rotary scaling as an object of `config.json`."""
        return self.rope_scaling and self.rope_scaling.model_dump()


class TrainConfig(Branch):
    """Parallel axes and optimizer of the training ranks.

    Coefficients of losses weight means over the update's tokens. `megarl plan --search train` looks for faster layouts.
    """

    tp: ParallelSize = 1
    """Tensor parallelism, with sequence parallelism where it is above 1."""
    pp: ParallelSize = 1
    """Pipeline parallelism: stages."""
    ep: ParallelSize = 1
    """Expert parallelism: ranks that share the experts out among them."""
    cp: ContextSize = 1
    """Context parallelism: ranks that share the tokens of each sequence; auto: as many as its micro-batch needs."""
    vpp: ParallelSize = 1
    """Virtual stages of each pipeline rank (interleaved 1F1B)."""
    etp: ParallelSize | None = None
    """Ranks that split one expert; null: 1, or `train.tp` where `train.ep` is 1."""
    layers_per_stage: Annotated[tuple[Whole, ...], Field(strict=False)] = ()
    """Layers of each of the `train.pp` x `train.vpp` stages, which make all layers of the model; empty: even stages."""
    lr: LearningRate
    """Learning rate for the policy, after the warm-up."""
    warmup_steps: Whole = 0
    """Steps over which the learning rate rises linearly to `train.lr`."""
    lr_schedule: LrSchedule = "constant"
    """Course of the learning rate from the warm-up to the last step."""
    lr_end: Share = 0.0
    """Share of `train.lr` that a linear or cosine schedule reaches after the last step."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    grad_clip: Positive = 1.0
    """Norm to which the gradient of all weights together is clipped."""
    tokens_per_micro_batch: Count = 4096
    """The most tokens of a packed micro-batch, of all ranks that share them; with `train.cp: auto` of each rank."""
    updates_per_step: Count = 1
    """Updates of the optimizer in each step, among which its samples are divided."""
    numbers: Literal["plain", "engine"] = "plain"
    """What the forward pass computes with: plain, the weights in `model.dtype`; engine, in the linear layers that
    engines have in fp8 the same codes and scales, of weights and activations. Masters, gradients and the optimizer are
    the same in both."""
    fp8_backward: Fp8Backward = "dequantised"
    """With what the gradients of these layers are computed: the weights and activations as they were before they were
    rounded (high_precision), their codes times scales (dequantised), or codes, those of the gradients too (fp8)."""
    aux_loss: NonNegative = 0.0
    """Coefficient of each sequence's load-balance loss of the experts."""
    z_loss: NonNegative = 0.0
    """Coefficient of the squared log of the router's partition function."""
    mtp_loss: NonNegative = 0.0
    """Coefficient of the loss of multi-token prediction (MTP); 0 freezes its layers."""
    router_bias_rate: NonNegative = 0.0
    """Step of DeepSeek's router biases towards balance, after each update; 0: they stay."""
    replay: Literal["off", "r2", "r3"] = "off"
    """Routing replay: updates use the experts that the old policy chose (r2), or the engine (r3)."""
    optimizer_name: Literal["adamw", "muon"] = "adamw"
    """muon: whole matrices of linear layers are learnt by Muon (arXiv 2502.16982), with AdamW's rates, and all other
    weights by AdamW."""
    optimizer_offload: bool = False
    """The optimizer's state is in host memory, and its step is computed there."""
    local_layers: bool = False
    """Allows Megatron's own layers on GPUs that lack TransformerEngine; slower."""
    share_prefixes: bool = False
    """Tokens that several samples of a micro-batch begin with are computed once; not with TransformerEngine."""
    recompute: dict[RecomputedPart, Whole] = {}
    """Parts of a layer that are computed again in the backward pass, each with the number of pipeline ranks, from the
    first, that do so."""
    megatron: dict[str, Any] = {}
    """Options of Megatron's TransformerConfig, checked against it."""
    ddp: dict[str, Any] = {}
    """Options of Megatron's DistributedDataParallelConfig, checked against it."""
    optimizer: dict[str, Any] = {}
    """Options of Megatron's OptimizerConfig, checked against it."""

    @property
    def passes_options(self) -> bool:
        """Whether Megatron gets options of its own."""
        return bool(self.recompute or self.megatron or self.ddp or self.optimizer)


class LoraConfig(Branch):
    """Low-rank adapters (LoRA, arXiv 2106.09685) in place of the policy's weights, which stay frozen.

    A linear layer with weight W computes W x + (alpha / rank) B A x.
    """

    rank: LoraRank = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """An adapter's delta is scaled by alpha over its layer's own rank."""
    targets: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Layers with adapters, by the last parts of their names in the checkpoint (q_proj, down_proj); empty: all linear
    layers of the decoder."""
    experts: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Rank of each routed expert's own adapters; 0: none; null: `lora.rank` over the number of experts that a token is
    sent to, rounded down, at least 1."""
    path: FilePath | None = None
    """Folder in PEFT's format with the adapters that the run begins with; null: B is 0."""
    sync: Literal["merged", "adapters"] = "merged"
    """merged: engines get the sums W + (alpha / rank) B A, and in a 16-bit type training computes with these too;
    adapters: they get the frozen weights once and then the adapters alone, with which SGLang computes."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How the sums of `lora.sync: merged` are rounded to `model.dtype`."""


class ReferenceConfig(Branch):
    """The frozen model of the KL terms.

    It needs no GPU memory: its weights are in host memory and are swapped with the policy's for a forward pass. With
    `lora` the reference is the frozen model, also where a run begins with the adapters of `lora.path`.
    """

    use: bool = False
    """Computes the KL to the reference for the metrics where no loss or reward has it."""
    path: FilePath | None = None
    """Checkpoint of the reference, or of a teacher; null: `model.path`."""


class RanksConfig(Branch):
    """Training ranks of the critic or the reward model; ranks and engines that share a slot hold its memory in turn."""

    first_gpu: Slot = 0
    """First GPU slot of these ranks."""
    gpus: ParallelSize | None = None
    """GPU slots of these ranks; null: as many as the policy's."""
    tp: ParallelSize | None = None
    """Tensor parallelism; null: `train.tp`."""
    pp: ParallelSize | None = None
    """Pipeline parallelism; null: `train.pp`."""
    ep: ParallelSize | None = None
    """Expert parallelism; null: `train.ep`."""
    cp: ContextSize | None = None
    """Context parallelism; null: `train.cp`."""
    vpp: ParallelSize | None = None
    """Virtual stages of each pipeline rank; null: `train.vpp`."""
    etp: ParallelSize | None = None
    """Ranks that split one expert; null: `train.etp`."""
    layers_per_stage: Annotated[tuple[Whole, ...] | None, Field(strict=False)] = None
    """Layers of each stage where stages are uneven; null: `train.layers_per_stage`."""
    tokens_per_micro_batch: Count | None = None
    """The most tokens of a packed micro-batch; null: `train.tokens_per_micro_batch`."""


class CriticConfig(Branch):
    """The auxiliary model of algorithms that train one: a critic, or PRIME's implicit reward model."""

    path: FilePath | None = None
    """Its checkpoint: of a critic a language model or a classifier with one score, of an implicit reward model a
    language model; null: `model.path`."""
    shares_weights: bool = False
    """The critic learns adapters of the size of `lora` and its head, and computes with the policy's frozen weights,
    which are in memory once; its ranks must be on the policy's slots, in the same layout."""
    lr: LearningRate | None = None
    """Learning rate for it; null: `train.lr`."""
    warmup_steps: Whole | None = None
    """Steps over which its learning rate rises linearly; null: `train.warmup_steps`."""
    lr_schedule: LrSchedule | None = None
    """Course of its learning rate; null: `train.lr_schedule`."""
    lr_end: Share | None = None
    """Share of its learning rate that the schedule reaches after the last step; null: `train.lr_end`."""
    ranks: RanksConfig = RanksConfig()


class RewardModelConfig(Branch):
    """A sequence classifier with one score, which is added to the reward of each response.

    It reads prompt and response as a chat, with its own tokenizer and template; of a chat that is too long, the end.
    """

    path: FilePath | None = None
    """Its checkpoint; null: there is no reward model, unless `reward_model.adapters` is set."""
    adapters: FilePath | None = None
    """In place of a checkpoint, a folder in PEFT's format with adapters and a head for the policy's frozen weights,
    which are in memory once; its ranks must be on the policy's slots, in the same layout, and tokenizer and template
    are the policy's."""
    weight: Weight = 1.0
    """Factor of the score in the reward."""
    ranks: RanksConfig = RanksConfig()
