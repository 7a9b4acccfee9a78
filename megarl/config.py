"""The recipe: one frozen tree that says everything about a run.

Paths are relative to the working directory of the command. `recipe_file.load_recipe` reads YAML and overrides into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from megarl.types import Aggregation, Estimator, KlPlace, LrSchedule, Mismatch, WhenFailed, WhenShort

Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Tracker = Literal["tensorboard"]


class Branch(BaseModel):
    """One branch of the recipe: frozen, exact types, no key that is not declared."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Run(Branch):
    """The run as a whole: `dir/name` receives every file, `timeout_s` bounds collectives and rendezvous."""

    name: FolderName
    dir: Text = "runs"
    seed: Annotated[int, Field(ge=0)] = 1
    steps: Count
    trackers: Annotated[tuple[Tracker, ...], Field(strict=False)] = ()
    sample_log_count: Annotated[int, Field(ge=0)] = 8  # responses written to samples.jsonl each step
    timeout_s: Positive = 600.0


class Model(Branch):
    """A HF checkpoint folder, a folder with its config.json alone, for plans, and the type of both sides' weights."""

    path: Text
    config: Text | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Data(Branch):
    """JSONL or parquet files; `prompt` and `answer` name their columns, `eval` maps a set's name to its file.

    A dotted name is of what lies inside a column: `reward_model.ground_truth`.
    """

    train: Text
    eval: Mapping[FolderName, Text] = Field(default_factory=dict)
    prompt: Text = "prompt"
    answer: Text = "answer"
    max_prompt_tokens: Count = 1024


class Algorithm(Branch):
    """A row of `megarl.algos.ALGORITHMS`, and those of its rules (`megarl.types.Rules`) that are to be others."""

    name: Text = "grpo"
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    clip_high: Positive | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    aggregation: Aggregation | None = None
    kl_coefficient: NonNegative | None = None
    kl_estimator: Estimator | None = None
    kl_place: KlPlace | None = None
    entropy_coefficient: NonNegative | None = None
    whiten: bool | None = None
    gamma: Share | None = None
    gae_lambda: Share | None = None
    critic_lambda: Share | None = None
    value_clip: Positive | None = None
    lambda_alpha: NonNegative | None = None
    positive_nll: NonNegative | None = None
    critic_warmup_steps: Annotated[int, Field(ge=0)] | None = None
    process_scale: Positive | None = None
    mismatch: Mismatch | None = None
    mismatch_low: NonNegative | None = None
    mismatch_high: Positive | None = None
    dynamic_sampling: bool | None = None
    oversample: Annotated[float, Field(ge=1)] | None = None
    max_rounds: Count | None = None
    when_short: WhenShort | None = None
    overlong_share: Share | None = None
    overlong_filter: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The rules that are set."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


class WarmStart(Branch):
    """Supervised steps on the training answers before step 1; none by default."""

    steps: Annotated[int, Field(ge=0)] = 0
    sequences_per_step: Count = 256
    lr: Positive = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 0


class SourceReward(Branch):
    """Who judges the rows of one source: `module:function`, and keyword arguments for it."""

    function: Text
    arguments: dict[str, Any] = Field(default_factory=dict)


class Reward(Branch):
    """`module:function` that scores one response, with keyword arguments; rows of a named source have their own.

    Every verdict is computed in a process that ends when it takes too long or too much: docs/rewards.md. One that
    fails costs what `on_failure` says: its sample leaves the group, the run stops, or the reward is `penalty`.
    """

    function: Text | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    source: Text = "data_source"  # the column that names a row's source
    by_source: Mapping[Text, SourceReward] = Field(default_factory=dict)
    workers: Count = 2  # processes of each function beside every engine
    timeout_s: Positive = 5.0  # of one verdict
    memory_mb: Count = 1024  # of one verdict, beside what the function takes to be there
    on_failure: WhenFailed = "drop"
    penalty: float = 0.0


class Engines(Branch):
    """`count` SGLang engines of `tp` slots each; `sglang` passes SGLang's own server arguments through."""

    count: Count = 1
    tp: Count = 1
    ep: Count = 1  # groups of tp / ep slots that share the experts out among them
    dp: Count = 1  # SGLang's DP attention: groups of tp / dp slots that each hold the whole attention
    fp8: bool = False  # weights in float8 tiles of 128 x 128, quantised before they are sent
    sglang: dict[str, Any] = Field(default_factory=dict)


class Rollout(Branch):
    """What is sampled in one step, and by which engines.

    Logprobs on both sides are those of temperature 1: with another one the loss sees the model, not the sampler.
    """

    prompts_per_step: Count
    samples_per_prompt: Annotated[int, Field(ge=2)]  # the advantage of a sample is relative to the others of its group
    max_response_tokens: Count
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seeded: bool = False  # the same seed and weights give the same samples, to the last bit; slower
    engine: Engines = Field(default_factory=Engines)


class EvaluationSet(Branch):
    """How one set of `data.eval` is answered; what is not set is as for all sets."""

    max_prompts: Count | None = None
    samples: Count | None = None
    temperature: NonNegative | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_response_tokens: Count | None = None


class Evaluation(Branch):
    """`samples` answers to at most `max_prompts` prompts of each set, every `every` steps and at the end.

    Before training, too, unless `at_start` is false. At temperature 0 the answer is the greedy one.
    `max_response_tokens` is the rollout's unless it is set; `sets` has what is otherwise with single sets.
    """

    every: Count = 10
    at_start: bool = True
    max_prompts: Count = 256
    samples: Count = 1
    temperature: NonNegative = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_response_tokens: Count | None = None
    sets: Mapping[FolderName, EvaluationSet] = Field(default_factory=dict)

    def of(self, name: str) -> Evaluation:
        """As the set of this name has it."""
        own = self.sets.get(name, EvaluationSet()).model_dump(exclude_none=True)
        return self.model_copy(update=own)


class Train(Branch):
    """Parallel axes and optimiser of the trainer; `megatron` passes Megatron's own TransformerConfig fields through.

    The coefficients are of means over the update's tokens: of each sequence's load balance (aux_loss), of the squared
    log of the router's partition function (z_loss), of the multi-token prediction's loss (mtp_loss; 0 freezes it).
    """

    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    cp: Count = 1  # ranks that share out each sequence's tokens
    vpp: Count = 1  # virtual stages of each pipeline rank
    etp: Count | None = None  # ranks that split one expert; 1, or tp where ep is 1, unless it is set
    layers_per_stage: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()  # uneven stages
    lr: Positive
    warmup_steps: Annotated[int, Field(ge=0)] = 0
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
    megatron: dict[str, Any] = Field(default_factory=dict)


class Reference(Branch):
    """A model that stays as it is, which the policy's drift is measured against: the start unless `path` names another.

    It needs no GPU memory: its weights wait in the host's and change places with the policy's for a forward pass.
    """

    use: bool = False
    path: Text | None = None


class Ranks(Branch):
    """Training ranks of a model beside the policy; what is not set is as the policy's.

    They sit on the slots from `first_gpu` on, shared with whoever else is there: those that share take turns.
    """

    first_gpu: Annotated[int, Field(ge=0)] = 0
    gpus: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    ep: Count | None = None
    cp: Count | None = None
    vpp: Count | None = None
    etp: Count | None = None
    layers_per_stage: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, Field(strict=False)] = None
    tokens_per_micro_batch: Count | None = None


class Critic(Branch):
    """The model that learns beside the policy, of algorithms that have one; for PRIME its implicit reward model.

    A critic's checkpoint is a language model's or a classifier's with one score, the reward model's a language model's.
    `path` and what is said of the learning rate are the policy's unless they are set.
    """

    path: Text | None = None
    lr: Positive | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    lr_schedule: LrSchedule | None = None
    lr_end: Share | None = None
    ranks: Ranks = Field(default_factory=Ranks)


class RewardModel(Branch):
    """A sequence classifier with one score, whose `weight` times it is added to the reward of each response.

    It reads prompt and response as a chat, by its own tokenizer and template; of one that is too long, the end.
    """

    path: Text | None = None
    weight: float = 1.0
    ranks: Ranks = Field(default_factory=Ranks)


class Checkpoint(Branch):
    """Everything a run needs to go on: written every `every` steps (never, unless it is set), the last `keep` kept."""

    every: Count | None = None
    keep: Count = 3
    asynchronous: bool = True  # files are written while training goes on


class Reshard(Branch):
    """`round_bytes` bounds the bytes a member has in flight, whatever the model's size.

    `verify` holds what the engines got against the trained weights: by sums, or by sending every byte once more.
    """

    round_bytes: Annotated[int, Field(ge=1024)] = 512 * 1024 * 1024
    verify: Literal["off", "checksum", "full"] = "off"


class Placement(Branch):
    """GPU slots of the run; trainer ranks and engines share them, or have slots of their own."""

    gpus: Count
    train_gpus: Count | None = None  # training ranks, on the first slots; all slots unless it is set
    first_engine_gpu: Annotated[int, Field(ge=0)] = 0  # from here on the engines sit; train_gpus: on GPUs of their own
    gpus_per_node: Count = 8  # neighbours with fast links: what several of them need enters their node once
    network: Literal["loopback", "nodes"] = "loopback"  # nodes: of a Ray cluster that runs, by the addresses it has
    hardware: Text | None = None  # a file of recipes/hardware, which `megarl plan` reckons with

    @property
    def node_gpus(self) -> int | None:
        """GPUs of each node of the Ray cluster that runs; None where the run begins one of its own on this machine."""
        return self.gpus_per_node if self.network == "nodes" else None

    def gpu_of(self, slot: int) -> int:
        """The number that a slot's GPU has on its node."""
        return slot % self.gpus_per_node if self.network == "nodes" else slot


class Recipe(Branch):
    """Everything about a run."""

    run: Run
    model: Model
    data: Data
    algorithm: Algorithm = Field(default_factory=Algorithm)
    warm_start: WarmStart = Field(default_factory=WarmStart)
    reward: Reward
    rollout: Rollout
    evaluation: Evaluation = Field(default_factory=Evaluation)
    train: Train
    reference: Reference = Field(default_factory=Reference)
    critic: Critic = Field(default_factory=Critic)
    reward_model: RewardModel = Field(default_factory=RewardModel)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    reshard: Reshard = Field(default_factory=Reshard)
    placement: Placement

    @property
    def longest_response(self) -> int:
        """The most tokens that an engine is asked for at once."""
        sets = [self.evaluation.of(name).max_response_tokens or 0 for name in self.data.eval]
        return max(self.rollout.max_response_tokens, *sets) if sets else self.rollout.max_response_tokens

    @property
    def engine_nodes(self) -> int:
        """The nodes that one engine spans."""
        tp = self.rollout.engine.tp
        return max(1, tp // (self.placement.node_gpus or tp))

    def dump_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that loads back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
