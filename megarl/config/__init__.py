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
    ReportSeconds,
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
    attribute_docstrings,
)
from megarl.config.models import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ReferenceConfig,
    RewardModelConfig,
    TrainConfig,
)
from megarl.config.timeline import TimelineConfig
from megarl.fp8 import ScaleRule
from megarl.types import Hyperparameters

Tracker = Literal["tensorboard", "wandb", "mlflow"]


class RunConfig(Branch):
    """The run as a whole: `dir/name` receives every file."""

    name: FolderName
    """Name of the run, and of its folder in `run.dir`."""
    dir: FilePath = "runs"
    """Folder of runs."""
    seed: Seed = 1
    """Seed of the order of the data, of samples, and of weights that begin at random."""
    steps: Count
    """Steps of training after the warm start; with `--resume` those before the checkpoint count."""
    trackers: Annotated[tuple[Tracker, ...], Field(strict=False)] = ()
    """Trackers that get the metrics and samples of each step, besides the files of the run."""
    project: FolderName | None = None
    """Project of W&B and experiment of MLflow; null: the clients' own variable, or `megarl`."""
    sample_log_count: Whole = 8
    """Samples of each step that are written to `samples.jsonl`."""
    sample_log_tokens: Whole = 512
    """Tokens of each row of these samples, from its response's first on, that are written with the log-probabilities of
    the engine and of the trainer; 0: none."""
    timeout_s: RunSeconds = 600.0
    """Seconds of silence after which the run ends and names the process.

    It limits silence, not work: of a collective or rendezvous whose peers do not arrive, of a training rank or engine
    whose process does not answer, of an SGLang scheduler that is stopped or stays in one iteration of its loop (the
    forward pass of one batch). A rollout, a step or a checkpoint may take longer.
    """
    hang_report_s: ReportSeconds | None = None
    """Seconds of a phase after which the run writes what it waits for into `hangs`, once a phase; it goes on.

    null: five times the longest earlier phase of the same kind (rollout, train, ...), at least 60; the first of a kind
    is looked at each `run.timeout_s`, and has a page only where it stands still. 0: never because a phase is long.
    """
    restarts: Whole = 3
    """How often within `run.restart_window_s` an engine, or the ranks of a GPU, are started anew after they died or
    hung; 0: the run ends."""
    restart_window_s: RunSeconds = 3600.0
    """Seconds in which `run.restarts` are counted."""
    compare_replicas_every: Count | None = 1
    """Updates from one comparison of replicated weights to the next; null: they are not compared."""
    on_silent_fault: Literal["stop", "repeat"] = "stop"
    """What happens where ranks or an engine compute wrong numbers: the run stops, or repeats the step if it can
    recover."""
    timeline: TimelineConfig = TimelineConfig()


class _AlgorithmName(Branch):
    name: Text = "grpo"
    """Row of the table of algorithms (docs/algorithms.md), which has a value for every other key of this branch."""


# A recipe that leaves a hyperparameter out has the row's own.
_OVERRIDES: Any = {
    field.name: (
        get_type_hints(Hyperparameters)[field.name] | None,
        Field(None, **field.metadata),
    )
    for field in dataclasses.fields(Hyperparameters)
}
_AlgorithmKeys: Any = create_model("AlgorithmKeys", __base__=_AlgorithmName, **_OVERRIDES)


class AlgorithmConfig(_AlgorithmKeys):
    """The name of an algorithm, and the hyperparameters in which the run differs from the algorithm's own row."""

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Those of the hyperparameters too, which are no fields of a class in the source."""
        return {**super().meanings(), **attribute_docstrings(Hyperparameters)}

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
    """Supervised steps; 0: none."""
    sequences_per_step: Count = 256
    """Prompts with their answers in one supervised step."""
    lr: LearningRate = 1e-3
    """Learning rate in the supervised steps, after their warm-up."""
    warmup_steps: Whole = 0
    """Supervised steps over which the learning rate rises linearly to `warm_start.lr`."""


class EngineConfig(Branch):
    """The SGLang engines that sample: how many, and how each splits the model over its GPU slots.

    With `external` the engines are SGLang servers that others have started. They read each step's weights as files
    below `external_dir`, which training ranks and servers must share.
    """

    count: ParallelSize = 1
    """Engines; of external ones the number of servers, which may be left out."""
    max_count: ParallelSize | None = None
    """The most engines that `megarl engines` may ask a live run for; null: `rollout.engine.count` stays."""
    tp: ParallelSize = 1
    """GPU slots of one engine (tensor parallelism)."""
    ep: ParallelSize = 1
    """Groups of `tp / ep` slots that share the experts out among them (expert parallelism)."""
    dp: ParallelSize = 1
    """SGLang's DP attention: groups of `tp / dp` slots that each hold the whole attention and sample sequences of
    their own."""
    weights: Literal["plain", "fp8"] = "plain"
    """The engines' weights: plain as they are trained, or in float8 tiles of 128 x 128, quantised before they are sent;
    `precision` says which stay plain."""
    dense: Literal["whole", "cut"] | None = None
    """Dense layers: whole on each slot, or cut over all of them; null: whole where `rollout.engine.dp` is above 1, else
    cut."""
    head: Literal["group", "engine"] | None = None
    """The output layer is split over each DP group, or over the engine; null: group where `rollout.engine.dp` is above
    1, else engine."""
    experts: Literal["gather", "deepep"] = "gather"
    """All tokens go to all slots, or DeepEP sends each token to the slots of the experts that it chose."""
    place_experts: bool = False
    """Each reshard moves the experts to those slots of an engine over which the routes of the last rollout are even;
    needs `train.replay: r3`."""
    draft: Annotated[int, Field(ge=0, le=3)] = 0
    """Speculative decoding: tokens that the model's MTP layer drafts in each step; 0: off."""
    sglang: dict[str, Any] = {}
    """SGLang's own server arguments, checked against its class."""
    external: Annotated[tuple[ServerAddress, ...], Field(strict=False)] = ()
    """SGLang servers that others have started, each as host:port, in place of engines of the run."""
    external_key_env: VariableName | None = None
    """Environment variable with the API key of the external servers; null: they want none."""
    external_dir: FilePath | None = None
    """Folder that ranks and external servers share, for the weights of each step; null: the run's folder."""

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


class PrecisionConfig(Branch):
    """Which weights stay as they are trained where others are in fp8.

    In engines with `rollout.engine.weights: fp8`, and in `megarl convert --fp8`, whatever the engines have. Norms,
    biases, router, embedding and output layer stay so in any case.
    """

    plain_last_layers: Whole = 0
    """The last layers of the decoder that stay plain; a layer of multi-token prediction is none of them."""
    plain: Annotated[tuple[Literal["kv_b_proj", "shared_experts"], ...], Field(strict=False)] = ()
    """Kinds of weights that stay plain in all layers: kv_b_proj of latent attention, the shared experts."""
    scales: ScaleRule | None = None
    """How a tile's scale follows from its largest magnitude: exact, that over 448; powers_of_two, rounded up to one;
    null: powers_of_two where `train.numbers` is engine, else exact."""


class RolloutConfig(Branch):
    """What is sampled in one step, and by which engines.

    A response is sampled in phases of at most `phase_tokens` new tokens; between two phases no engine runs. A step
    trains as soon as `prompts_per_step` groups are complete, and the others go on with the next weights.

    The policy is the distribution that samples are drawn from, softmax(logits / temperature): logprobs, ratios, entropy
    and the KL to the reference use this temperature on both sides. Supervised losses use temperature 1.
    """

    prompts_per_step: Count
    """Prompts that a step trains on."""
    samples_per_prompt: SampleCount
    """Samples of each prompt (group size); at least 2 where an advantage compares the samples of a group."""
    max_response_tokens: Count
    """The most tokens of a response, or of one turn of an episode."""
    phase_tokens: Count | None = None
    """Partial rollout: the most new tokens of a sample in one phase; null: samples are whole, in one phase."""
    prompts_in_flight: Count | None = None
    """The most prompts that are begun and not trained on yet; null: `rollout.prompts_per_step`."""
    ahead: Literal[0, 1] = 0
    """One-step off-policy: phases that engines with GPUs of their own sample while the ranks learn, with the weights
    from before these updates."""
    temperature: SamplingTemperature = 1.0
    """Sampling temperature of training samples, which defines the policy on both sides."""
    top_p: TopP = 1.0
    """Nucleus sampling of training samples: only 1 is taken; an evaluation's may be less."""
    seeded: bool = False
    """The same seed and weights give the same samples, to the last bit; slower."""
    engine: EngineConfig = EngineConfig()

    @property
    def in_flight(self) -> int:
        """The prompts that are begun and not trained on yet, at most; more where dynamic sampling draws more."""
        return self.prompts_in_flight or self.prompts_per_step


class EvaluationSetConfig(Branch):
    """How one set of `data.eval` is answered; keys that are not set are as for all sets."""

    max_prompts: Count | None = None
    """The most prompts of this set; null: `evaluation.max_prompts`."""
    samples: SampleCount | None = None
    """Answers to each prompt of this set; null: `evaluation.samples`."""
    temperature: Temperature | None = None
    """Sampling temperature for this set; null: `evaluation.temperature`."""
    top_p: TopP | None = None
    """Nucleus sampling for this set, where its temperature is above 0; null: `evaluation.top_p`."""
    max_response_tokens: Count | None = None
    """The most tokens of an answer to this set; null: `evaluation.max_response_tokens`."""


class EvaluationConfig(Branch):
    """How the sets of `data.eval` are answered, and when."""

    every: Count = 10
    """Steps from one evaluation to the next; the last step of the run has one in any case."""
    at_start: bool = True
    """Whether the sets are also answered before training."""
    max_prompts: Count = 256
    """The most prompts of each set."""
    samples: SampleCount = 1
    """Answers to each prompt; with several, avg@k, pass@k and maj@k are logged."""
    temperature: Temperature = 0.0
    """Sampling temperature of evaluations; 0: greedy."""
    top_p: TopP = 1.0
    """Nucleus sampling of evaluations."""
    max_response_tokens: Count | None = None
    """The most tokens of an answer; null: `rollout.max_response_tokens`."""
    sets: Mapping[FolderName, EvaluationSetConfig] = {}
    """Keys that differ for single sets, by the sets' names in `data.eval`."""

    def of(self, name: str) -> EvaluationConfig:
        """The keys for the set of this name."""
        set_keys = self.sets.get(name, EvaluationSetConfig()).model_dump(exclude_none=True)
        return self.model_copy(update=set_keys)


class CheckpointConfig(Branch):
    """Everything that a run needs to resume.

    With `memory_copies` each rank's weights and optimizer are there twice, those of the step and of the step before,
    and on a second node where there are several.
    """

    every: Count | None = None
    """Steps from one checkpoint to the next; one is also written after the warm start and after the last step. null:
    one is written on SIGUSR1 and for `megarl drain` alone."""
    keep: Count = 3
    """Newest checkpoints that stay."""
    asynchronous: bool = True
    """Files are written while training goes on."""
    may_fail: Whole = 2
    """Checkpoints in a row that a full or broken disk may cost before the run ends."""
    memory_copies: bool = False
    """The nodes' memory has the state of the ranks after each step: after a rank fails, its step's training alone is
    repeated, and without copies everything since the newest checkpoint. Off by default, because the largest models
    fill the hosts without them."""


class ReshardConfig(Branch):
    """How the trained weights get into the engines."""

    round_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 512 * 1024 * 1024
    """The most bytes that a member of the exchange has in flight, whatever the model's size."""
    verify: Literal["off", "checksum", "full"] = "off"
    """Whether the engines' weights are compared with the trained ones: by checksums, or by sending every byte again."""


class PlacementConfig(Branch):
    """GPU slots of the run; training ranks and engines share them or have separate slots."""

    gpus: ParallelSize
    """GPU slots of the run, numbered from 0."""
    train_gpus: ParallelSize | None = None
    """Slots of training ranks, from slot 0 on; null: all."""
    first_engine_gpu: Slot = 0
    """First slot of the engines; at `placement.train_gpus` they have GPUs of their own."""
    gpus_per_node: ParallelSize = 8
    """GPUs of a node: neighbours with fast links, into whose node what several of them need is sent once."""
    network: Literal["loopback", "nodes"] = "loopback"
    """loopback: the run starts its own Ray on this machine; nodes: it uses the nodes of a running Ray cluster, and
    their addresses."""
    spare_nodes: Whole = 0
    """Further nodes that are idle until one takes the place of a node that died."""
    hardware: FilePath | None = None
    """YAML file with the figures of the GPUs, of recipes/hardware or written by `megarl doctor --measure`: for `megarl
    plan`, `--dry-run`, `doctor`, `report`, and the memory that engines leave to NCCL."""

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
    precision: PrecisionConfig = PrecisionConfig()
    placement: PlacementConfig

    @property
    def samples_logged_of_a_group(self) -> int:
        """The first samples of each group among which the `run.sample_log_count` of a step are."""
        return -(-self.run.sample_log_count // self.rollout.prompts_per_step)

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
