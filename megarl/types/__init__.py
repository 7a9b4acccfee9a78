"""The nouns that cross rooms.

Suffixes: `_P` prompts, `_G` samples of one group, `_T` tokens of one sequence or of one packed row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np

from megarl.types.arrays import BoolArray, FloatArray, IntArray
from megarl.types.arrays import ByteArray as ByteArray
from megarl.types.episodes import TRUNCATED as TRUNCATED
from megarl.types.episodes import EpisodeEnd as EpisodeEnd
from megarl.types.episodes import EpisodeFacts, EpisodeProgress, Transcript
from megarl.types.episodes import TranscriptCall as TranscriptCall
from megarl.types.episodes import TranscriptEntry as TranscriptEntry
from megarl.types.episodes import episode_dict as episode_dict
from megarl.types.errors import DiskFault as DiskFault
from megarl.types.errors import Drained as Drained
from megarl.types.errors import EndedEarly as EndedEarly
from megarl.types.errors import FolderGone as FolderGone
from megarl.types.errors import ProcessLost as ProcessLost
from megarl.types.errors import Silence as Silence
from megarl.types.errors import UserError as UserError
from megarl.types.errors import UserErrors as UserErrors
from megarl.types.faults import FaultMember as FaultMember
from megarl.types.faults import SilentFault as SilentFault
from megarl.types.json_objects import Columns, JsonObject
from megarl.types.sample_rows import UNKNOWN_ENGINE as UNKNOWN_ENGINE
from megarl.types.sample_rows import Row as Row
from megarl.types.sample_rows import RowSummary as RowSummary
from megarl.types.sample_rows import SamplePart as SamplePart
from megarl.types.sample_rows import merged_parts as merged_parts
from megarl.types.sample_rows import num_stale as num_stale
from megarl.types.sample_rows import with_part as with_part
from megarl.types.sequences import TrainSequence as TrainSequence
from megarl.types.sequences import regrouped as regrouped
from megarl.types.sequences import sample_numbers as sample_numbers
from megarl.types.worker_faults import WorkerFaults

Metrics = dict[str, float]
# What a loss is the mean of: tokens of the whole update; sequences' token means; sequences' token sums; the same over a
# constant, the longest response there may be (Dr. GRPO, arXiv 2503.20783).
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Estimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
LrSchedule = Literal["constant", "linear", "cosine"]
# of a layer: all of it, and Megatron's recompute_modules
RecomputedPart = Literal[
    "layer", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"
]
WhenShort = Literal["train", "stop"]
WhenFailed = Literal["drop", "stop", "penalise"]
WhenOverlong = Literal["refuse", "drop"]
OldLogprobs = Literal["train", "engine"]
RolloutCorrection = Literal["off", "tis", "mis_token", "mis_sequence", "mis_geometric", "icepop"]


@dataclass(frozen=True)
class Prompt:
    """One row of the data, tokenised with the chat template.

    token_ids: a tuple, or an array("i") where there are many prompts: 4 bytes a token. `row` is the whole data row, for
    rewards; `messages` is its prompt before the template, a string or a list of chat messages.
    """

    id: str
    text: str
    token_ids: Sequence[int]
    answer: str
    row: Columns = field(default_factory=dict)
    messages: Any = ""


@dataclass(frozen=True)
class Sample:
    """One attempt at a prompt: a response of the engine, or an episode.

    rows: one for a response; one or more for an episode, in the order of their first turns. `text` is the response's
    text, of an episode that of its last turn. verifications: steps in which the model verified drafts, each of which
    gave one token or more; 0 without drafts. prefills: phases in which an engine read the prompt, each of which gave
    one token. is_open: the sample has neither ended nor reached the length limit. is_baseline: the sample is greedy, so
    that the others of its group are compared with it; it is not trained on.

    facts: of an ended episode; open_episode: of an open one; transcript: of either, whole while it is open.
    cached_tokens, of an episode's turn alone: how many of its context's tokens were in the engine's prefix cache.
    """

    rows: tuple[Row, ...]
    text: str
    finished: bool  # False: cut at the length limit, or open
    _: KW_ONLY
    is_open: bool = False
    is_baseline: bool = False
    verifications: int = 0
    prefills: int = 1
    facts: EpisodeFacts | None = None
    transcript: Transcript = ()
    open_episode: EpisodeProgress | None = None
    cached_tokens: int = 0

    @property
    def only_row(self) -> Row:
        """The row of a response, or of a turn. Raises ValueError where there are several."""
        (row,) = self.rows
        return row

    @property
    def episode(self) -> JsonObject | None:
        """What reward functions get of an ended episode, see `episode_dict`; None of any other sample."""
        if self.facts is None:
            return None
        return episode_dict(self.facts, self.transcript)

    @property
    def num_trained(self) -> int:
        """The tokens that the model sampled, in all rows."""
        return sum(row.num_trained for row in self.rows)


@dataclass(frozen=True)
class SampleGroup:
    """All samples of one prompt, with their rewards; those of an episode's turns are in its token rewards."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    rewards_G: FloatArray
    correct_G: BoolArray
    # of each sample, the answer that the reward function extracted from it
    given_answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupSummary:
    """What the controller keeps of a group: the samples themselves stay in the object store.

    rows: of each sample. failures: descriptions of the failed reward results; num_dropped of their samples are not in
    the group. verifications, prefills: of all samples but the baseline. faults: of the engine's worker processes since
    its group before, by the room of their metrics, `reward` or `episode`. reward_worker_s: for how long the mean reward
    worker of its engine has worked since then; None: there are none. source: of the prompt, by its data row; "": the
    row names none.

    Of episodes alone: turn_rewards_G, the sum of the rewards of a sample's turns, None where no turn has any; facts, of
    each sample, None where it is no episode; transcripts, of the first samples, as many as samples.jsonl may show;
    failed_calls, the results of calls whose tools need to be corrected; refused_fields, how often the endpoint has
    refused a field or a path to agents.
    """

    prompt_text: str
    answer: str
    responses: tuple[str, ...]
    rows: tuple[tuple[RowSummary, ...], ...]
    finished_G: BoolArray
    rewards_G: FloatArray
    correct_G: BoolArray
    baseline: int | None = None  # the index of the baseline sample, if there is one
    given_answers: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    num_dropped: int = 0
    failed_calls: tuple[str, ...] = ()
    refused_fields: Mapping[str, int] = field(default_factory=dict)
    verifications: int = 0
    prefills: int = 0
    faults: Mapping[str, WorkerFaults] = field(default_factory=dict)
    reward_worker_s: float | None = None
    source: str = ""
    turn_rewards_G: FloatArray | None = None
    facts: tuple[EpisodeFacts | None, ...] = ()
    transcripts: tuple[Transcript, ...] = ()

    @property
    def response_lengths_G(self) -> IntArray:
        """The tokens of each sample that the model sampled."""
        return np.array([sum(row.num_trained for row in rows) for rows in self.rows], np.int64)

    @property
    def parts_G(self) -> tuple[tuple[SamplePart, ...], ...]:
        """The parts of the tokens of each sample that the model sampled, by ascending versions."""
        return tuple(merged_parts([row.parts for row in rows]) for rows in self.rows)

    @property
    def total_rewards_G(self) -> FloatArray:
        """The reward of each sample together with those of its turns."""
        if self.turn_rewards_G is None:
            return self.rewards_G
        return self.rewards_G + self.turn_rewards_G

    @property
    def drawn_G(self) -> BoolArray:
        """Which samples were drawn from the policy: all but the baseline."""
        return np.arange(len(self.rewards_G)) != (-1 if self.baseline is None else self.baseline)


def bounded(default: Any, **bounds: float) -> Any:
    """A number of `Hyperparameters`, and the bounds (ge, gt, le) that a recipe's value has to be within."""
    return field(default=default, metadata=bounds)


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers and choices of an algorithm; a recipe's key `algorithm.<name>` overrides the row's.

    The string below a field is what `megarl explain` says of the key.
    """

    clip_low: float = bounded(0.2, ge=1e-9, le=1)
    """The ratio is clipped to at least 1 - clip_low; 1: no lower bound."""
    clip_high: float = bounded(0.2, ge=1e-9, le=1e9)
    """The ratio is clipped to at most 1 + clip_high."""
    dual_clip: float | None = bounded(None, gt=1, le=1e9)
    """Where the advantage is negative, the objective is at least this many times the advantage (arXiv 1912.09729)."""
    aggregation: Aggregation = "token_mean"
    """What the loss is the mean of.

    token_mean: all tokens of the update; sequence_mean: the sequences' token means; sequence_sum: their token sums;
    constant: their token sums divided by the longest possible response (arXiv 2503.20783).
    """
    entropy_coefficient: float = bounded(0.0, ge=0, le=1e6)
    """Weight of the entropy, which is subtracted from the loss."""
    positive_nll: float = bounded(0.0, ge=0, le=1e6)
    """Weight of -log p of correct samples, a mean over their tokens."""

    kl_coefficient: float = bounded(0.0, ge=0, le=1e6)
    """Weight of the KL to the reference.

    Above 0 there is a reference without `reference.use`; with a warm start it must be another model than `model.path`.
    """
    kl_estimator: Estimator = "k3"
    """Estimator of the KL from one sampled token."""
    kl_place: KlPlace = "loss"
    """Where the KL to the reference is paid.

    loss: it is added to the loss (the gradient of k1 is 0 in the mean there); reward: each token's reward is lowered by
    its KL under the policy before the step, and the response's reward is added at its last token.
    """

    whiten: bool = False
    """Advantages are shifted and scaled to mean 0 and standard deviation 1 over all tokens of the step."""
    gamma: float = bounded(1.0, ge=0, le=1)
    """Discount of generalised advantage estimation, and without a critic of the tokens' rewards."""
    gae_lambda: float = bounded(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation for the policy, with a critic."""
    lambda_alpha: float = bounded(0.0, ge=0, le=1e6)
    """Above 0, the policy's lambda is 1 - 1 / (lambda_alpha x length of the response)."""
    prime_beta: float = bounded(0.05, ge=1e-9, le=1e9)
    """PRIME's beta: a token's process reward is this many times its log-ratio (arXiv 2502.01456)."""

    critic_lambda: float | None = bounded(None, ge=0, le=1)
    """Lambda of the critic's returns; null, where no row sets it: `algorithm.gae_lambda`."""
    value_clip: float | None = bounded(None, ge=1e-9, le=1e9)
    """A value is trained only this far from the value before the step; null, where no row sets it: without a limit."""
    critic_warmup_steps: int = bounded(0, ge=0, le=2**31 - 1)
    """First steps, in which the critic alone learns; the policy's learning-rate warm-up starts after them."""

    old_logprobs: OldLogprobs = "train"
    """Log-probabilities of the policy before the step, to which the ratio is: the trainer's, or those that the engine
    reported with the samples."""
    rollout_correction: RolloutCorrection = "off"
    """Correction where the engine's probability mu and the trainer's p_old, of the policy before the step, differ.

    By w = p_old / mu of each token: tis truncates w at the upper bound (2). The others weight by w and drop what is out
    of bounds: mis_token and icepop a token by w (up to 2; 0.5 to 5), mis_sequence a sequence by the product of w, which
    is also its weight (up to 2), mis_geometric a sequence by the geometric mean of w (0.99 to 1.01).
    """
    rollout_correction_low: float | None = bounded(None, ge=0, le=1e6)
    """Lower bound of the correction; null: the usual one of `algorithm.rollout_correction`."""
    rollout_correction_high: float | None = bounded(None, ge=1e-9, le=1e9)
    """Upper bound of the correction; null: the usual one of `algorithm.rollout_correction`."""

    dynamic_sampling: bool = False
    """A step has only groups with both right and wrong answers.

    `algorithm.oversample` times as many prompts are sampled as groups are missing, in at most `algorithm.max_rounds`
    rounds (with `rollout.phase_tokens`, where rounds are small, as many prompts as so many whole rounds have).
    """
    oversample: float = bounded(1.5, ge=1, le=100)
    """Each round of dynamic sampling draws this many times as many prompts as groups are missing."""
    max_rounds: int = bounded(10, ge=1, le=2**31 - 1)
    """The most rounds of dynamic sampling in a step."""
    when_short: WhenShort = "train"
    """What a step does if groups are missing after all rounds: train on what there is, or stop the run with the counts.

    The run also ends where there is no group at all.
    """

    overlong_share: float = bounded(0.0, ge=0, le=1)
    """Over this last part of the longest response a penalty grows to -1.

    The longest response has `rollout.max_response_tokens`, or `episode.max_tokens`, observations among them; an episode
    that ends for want of room has all of the penalty. DAPO's 4096 of 20480 tokens are 0.2, with rewards of +1 and -1:
    use such rewards.
    """
    overlong_filter: bool = False
    """Truncated samples count in their group's mean and deviation, but not in the loss.

    Of episodes these are the ends max_tokens and cut; the others (bad_calls, max_turns, timeout) are learnt from.
    """

    def num_drawn(self, missing: int) -> int:
        """How many prompts a round draws when this many groups are missing."""
        if self.dynamic_sampling:
            return math.ceil(missing * self.oversample)
        return missing

    @property
    def pays_kl(self) -> bool:
        """Whether the KL to the reference is subtracted from the tokens' rewards."""
        return self.kl_place == "reward" and self.kl_coefficient > 0


@dataclass(frozen=True)
class StepSeconds:
    """What an engine takes for a decoding step, for each sequence in it, and for each token that it reads."""

    step_s: float
    sequence_s: float
    read_s: float


@dataclass(frozen=True)
class PhaseBalance:
    """How evenly the engines worked in a round of sampling, and how long.

    group_tokens: of each attention group of each engine, tokens of prompts and responses. tail_s: from when 90 % of the
    samples had finished until all had. idle_s: that engines waited for the last of them, the mean engine. seconds:
    until all had finished. expected_s: those that the rounds before let expect of this round's work, by their fit.
    """

    group_tokens: tuple[int, ...]
    tail_s: float
    idle_s: float
    seconds: float
    fit: StepSeconds | None = None
    expected_s: float = 0.0
