"""The recipe: one frozen tree that says everything about a run.

Paths are relative to the working directory of the command. `loading.load_recipe` reads YAML and overrides into it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from pydantic import Field, create_model, model_validator

from megarl.config.data import DataConfig, RewardConfig
from megarl.config.episode import EpisodeConfig
from megarl.config.fields import (
    Branch,
    Count,
    FilePath,
    FolderName,
    LearningRate,
    ParallelSize,
    RunSeconds,
    SampleCount,
    SamplingTemperature,
    Seed,
    ServerAddress,
    Slot,
    Temperature,
    Text,
    TopP,
    VariableName,
    Whole,
)
from megarl.config.models import (
    CriticConfig,
    LoraConfig,
    ReferenceConfig,
    RewardModelConfig,
    TrainConfig,
)
from megarl.types import Hyperparameters

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class RunConfig(Branch):
    """The run as a whole: `dir/name` receives every file.

    `timeout_s` limits silence, not work: of a collective or rendezvous whose peers do not arrive, of a training rank or
    engine whose process does not answer, of an SGLang scheduler that is stopped or stays in one iteration of its loop
    (the forward pass of one batch). After that time the run ends and names the process. A rollout, a step or a
    checkpoint may take longer.
    """

    name: FolderName
    dir: FilePath = "runs"
    seed: Seed = 1
    steps: Count
    trackers: Annotated[tuple[Tracker, ...], Field(strict=False)] = ()
    # of W&B, experiment of MLflow; the clients' own variable, or megarl, unless set
    project: FolderName | None = None
    sample_log_count: Whole = 8  # responses written to samples.jsonl each step
    timeout_s: RunSeconds = 600.0
    # so often in a window an engine, or the ranks of a GPU, are started anew that have died or hang; 0: the run ends
    restarts: Whole = 3
    restart_window_s: RunSeconds = 3600.0
    # updates from one comparison of replicated weights to the next; null: there is none
    compare_replicas_every: Count | None = 1
    # where ranks or an engine compute wrong numbers; repeat: the step, if the run can recover
    on_silent_fault: Literal["stop", "repeat"] = "stop"


class ModelConfig(Branch):
    """A HF checkpoint folder, a folder with its config.json alone, for plans, and the type of both sides' weights."""

    path: FilePath
    config: FilePath | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


# A recipe that leaves a hyperparameter out has the row's own.
_OVERRIDES: Any = {
    field.name: (get_type_hints(Hyperparameters)[field.name] | None, Field(None, **field.metadata))
    for field in dataclasses.fields(Hyperparameters)
}
_AlgorithmKeys: Any = create_model(
    "AlgorithmKeys", __base__=Branch, name=(Text, "grpo"), **_OVERRIDES
)


class AlgorithmConfig(_AlgorithmKeys):
    """The name of a row of `megarl.algos.ALGORITHMS`, and the hyperparameters that override the row's."""

    @property
    def given(self) -> dict[str, Any]:
        """The hyperparameters that are set."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    @property
    def corrects_engine(self) -> bool:
        """Whether a weight or the ratio itself corrects for the engine's other probabilities."""
        return self.rollout_correction not in (None, "off") or self.old_logprobs == "engine"


class WarmStartConfig(Branch):
    """Supervised steps on the training answers before step 1; none by default."""

    steps: Whole = 0
    sequences_per_step: Count = 256
    lr: LearningRate = 1e-3
    warmup_steps: Whole = 0


class EngineConfig(Branch):
    """`count` SGLang engines of `tp` slots each; `sglang` passes SGLang's own server arguments through.

    With `external` the engines are SGLang servers that others have started, and `count` is their number: it may be left
    out. They read each step's weights as files below `external_dir`, which training ranks and servers must share.
    """

    count: ParallelSize = 1
    # while the run goes on `megarl engines` may ask for 1 to so many; null: count stays
    max_count: ParallelSize | None = None
    tp: ParallelSize = 1
    ep: ParallelSize = 1  # groups of tp / ep slots that share the experts out among them
    # SGLang's DP attention: groups of tp / dp slots that each hold the whole attention
    dp: ParallelSize = 1
    fp8: bool = False  # weights in float8 tiles of 128 x 128, quantised before they are sent
    # dense layers on each slot, or over all; unset: whole with dp > 1
    dense: Literal["whole", "cut"] | None = None
    # the output layer of each dp group, or of all; group with dp > 1
    head: Literal["group", "engine"] | None = None
    # whether tokens go to all slots, or to those that they chose
    experts: Literal["gather", "deepep"] = "gather"
    # speculative decoding: tokens that the MTP layer drafts for each step
    draft: Annotated[int, Field(ge=0, le=3)] = 0
    sglang: dict[str, Any] = {}
    # host:port of each server
    external: Annotated[tuple[ServerAddress, ...], Field(strict=False)] = ()
    # the environment variable with the servers' API key; null: they want none
    external_key_env: VariableName | None = None
    # null: the run's folder
    external_dir: FilePath | None = None

    @model_validator(mode="before")
    @classmethod
    def _count_servers(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and "count" not in keys:
            servers = keys.get("external")
            if isinstance(servers, list | tuple) and servers:
                return {**keys, "count": len(servers)}
        return keys

    @property
    def most(self) -> int:
        """The engines that have GPUs in `placement`."""
        return self.max_count or self.count


class RolloutConfig(Branch):
    """What is sampled in one step, and by which engines.

    A response is sampled in phases of at most `phase_tokens` new tokens; between two phases no engine runs. A step
    trains as soon as `prompts_per_step` groups are complete, and the others go on with the next weights. At most
    `prompts_in_flight` prompts are begun and not trained on yet. With `ahead` the engines that share no GPU with other
    models sample one phase while the ranks learn, with the weights from before these updates.

    The policy is the distribution that samples are drawn from, softmax(logits / temperature): logprobs, ratios, entropy
    and the KL to the reference use this temperature on both sides. Supervised losses use temperature 1.
    """

    prompts_per_step: Count
    samples_per_prompt: SampleCount  # at least 2 where an advantage compares the samples of a group
    max_response_tokens: Count
    phase_tokens: Count | None = None  # null: a response is sampled whole, in one phase
    prompts_in_flight: Count | None = None  # null: prompts_per_step
    ahead: Literal[0, 1] = 0  # phases that are sampled while the ranks learn
    temperature: SamplingTemperature = 1.0
    top_p: TopP = 1.0  # 1 for training samples; an evaluation's may be less
    seeded: bool = False  # the same seed and weights give the same samples, to the last bit; slower
    engine: EngineConfig = EngineConfig()

    @property
    def in_flight(self) -> int:
        """The prompts that are begun and not trained on yet, at most; more where dynamic sampling draws more."""
        return self.prompts_in_flight or self.prompts_per_step


class EvaluationSetConfig(Branch):
    """How one set of `data.eval` is answered; keys that are not set are as for all sets."""

    max_prompts: Count | None = None
    samples: SampleCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_response_tokens: Count | None = None


class EvaluationConfig(Branch):
    """`samples` answers to at most `max_prompts` prompts of each set, every `every` steps and at the end.

    Also before training, unless `at_start` is false. At temperature 0 decoding is greedy. `max_response_tokens` is the
    rollout's unless it is set; `sets` overrides keys for single sets.
    """

    every: Count = 10
    at_start: bool = True
    max_prompts: Count = 256
    samples: SampleCount = 1
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    max_response_tokens: Count | None = None
    sets: Mapping[FolderName, EvaluationSetConfig] = {}

    def of(self, name: str) -> EvaluationConfig:
        """The keys for the set of this name."""
        set_keys = self.sets.get(name, EvaluationSetConfig()).model_dump(exclude_none=True)
        return self.model_copy(update=set_keys)


class CheckpointConfig(Branch):
    """Everything that a run needs to resume, written every `every` steps (never if not set); the last `keep` stay.

    Where the disk is full or broken, the run goes on without a checkpoint, `may_fail` times in a row. With
    `memory_copies` the nodes' memory has the state of the ranks after each step, from which a rank that fails is
    brought back, so that its step's training alone is repeated; otherwise the run goes back to its newest checkpoint.
    Each rank's weights and optimizer are there twice, those of the step and of the step before, and on a second node
    where there are several.
    """

    every: Count | None = None
    keep: Count = 3
    asynchronous: bool = True  # files are written while training goes on
    may_fail: Whole = 2
    # off by default: the largest models fill the hosts without them
    memory_copies: bool = False


class ReshardConfig(Branch):
    """`round_bytes` bounds the bytes a member has in flight, whatever the model's size.

    `verify` compares the engines' weights with the trained weights: by checksums, or by sending every byte again.
    """

    round_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 512 * 1024 * 1024
    verify: Literal["off", "checksum", "full"] = "off"


class PlacementConfig(Branch):
    """GPU slots of the run; training ranks and engines share them or have separate slots."""

    gpus: ParallelSize
    # training ranks, on the first slots; all slots unless it is set
    train_gpus: ParallelSize | None = None
    first_engine_gpu: Slot = 0  # the engines' first slot; at train_gpus they have GPUs of their own
    # neighbours with fast links: what several of them need enters their node once
    gpus_per_node: ParallelSize = 8
    # nodes: of a Ray cluster that runs, by the addresses it has
    network: Literal["loopback", "nodes"] = "loopback"
    # so many nodes more, which are idle until one takes the place of a node that died
    spare_nodes: Whole = 0
    # a file of recipes/hardware, with whose figures `megarl plan` calculates
    hardware: FilePath | None = None

    @property
    def node_gpus(self) -> int | None:
        """GPUs of each node of the running Ray cluster; None where the run starts its own Ray on this machine."""
        if self.network == "nodes":
            return self.gpus_per_node
        return None

    def gpu_of(self, slot: int) -> int:
        """The index of a slot's GPU on its node."""
        if self.network == "nodes":
            return slot % self.gpus_per_node
        return slot


class Recipe(Branch):
    """Everything about a run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    reward: RewardConfig
    rollout: RolloutConfig
    episode: EpisodeConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    train: TrainConfig
    lora: LoraConfig | None = None
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    reshard: ReshardConfig = ReshardConfig()
    placement: PlacementConfig

    @property
    def longest_sample(self) -> int:
        """The most tokens after the prompt of a sample to train on."""
        if self.episode:
            return self.episode.max_tokens
        return self.rollout.max_response_tokens

    @property
    def longest_response(self) -> int:
        """The most tokens after a prompt, in training or evaluation."""
        sets = [self.evaluation.of(name).max_response_tokens or 0 for name in self.data.eval]
        if sets and not self.episode:
            return max(self.longest_sample, *sets)
        return self.longest_sample

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a prompt with its response."""
        return self.data.max_prompt_tokens + self.longest_response

    @property
    def first_gpus(self) -> int:
        """The GPUs that a run begins with: on several nodes without those of engines that are not there yet."""
        engine = self.rollout.engine
        placement = self.placement
        are_last = placement.first_engine_gpu + engine.most * engine.tp == placement.gpus
        if placement.node_gpus and are_last:
            return placement.gpus - (engine.most - engine.count) * engine.tp
        return placement.gpus

    @property
    def engine_nodes(self) -> int:
        """The nodes that one engine spans."""
        tp = self.rollout.engine.tp
        return max(1, tp // (self.placement.node_gpus or tp))

    def dump_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that loads back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
