"""A step's samples: their number, their assumed lengths, and the micro-batches that each rank makes of them.

Nobody knows how long responses will be, so a plan supposes it: log-normal lengths, cut at the longest allowed, with a
stated mean. `batching.plan_updates` makes micro-batches of such samples, as in a run.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist

import numpy as np

from megarl.algos import ALGORITHMS, hyperparameters_of, learns_from_answers
from megarl.config import Recipe
from megarl.model.shape import ModelShape
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout, nearest
from megarl.plan.turns import Turns, turns_of
from megarl.training.batching import MicroBatch, SampleRef, Update, plan_updates
from megarl.training.flops import train_work
from megarl.training.shared_prompts import summed_sizes
from megarl.types import IntArray

MEAN_RESPONSE_SHARE = 0.4  # assumption: of the longest sample, the mean response or episode
PROMPT_SHARE = 0.25  # assumption: of data.max_prompt_tokens, every prompt
LENGTH_SPREAD = 0.7  # assumption: sigma of the logarithm of the lengths, before they are cut


@dataclass(frozen=True)
class Samples:
    """The samples of one step. drawn_prompts: with dynamic sampling more than are trained on.

    responses [num_drawn] are token counts of everything that is drawn, in no order; the first num_trained are learnt
    from. An episode's are all tokens after its prompt, observations among them. longest: prompt and response together.
    """

    prompts: int
    drawn_prompts: int
    num_drawn: int
    num_trained: int
    prompt_tokens: int
    longest: int
    responses: IntArray
    turns: Turns = Turns()

    @cached_property
    def sampled_tokens(self) -> float:
        """Of everything that is drawn, the tokens that engines sample; the others are observations."""
        return float(self.responses.sum()) * (1 - self.turns.observed_share)

    @cached_property
    def lengths(self) -> IntArray:
        """[num_trained] of prompt and response together."""
        return self.prompt_tokens + self.responses[: self.num_trained]

    @cached_property
    def mean_tokens(self) -> int:
        """Of prompt and response together, rounded up."""
        return math.ceil(self.lengths.mean())

    @cached_property
    def running_tokens(self) -> int:
        """Of a sequence that runs, in the mean over time: long ones run longest, half of what they become."""
        responses = self.responses.astype(np.float64)
        return self.prompt_tokens + math.ceil((responses**2).sum() / (2 * responses.sum()))


@dataclass(frozen=True)
class RankWork:
    """The work of each of a model's data-parallel ranks in one of the step's updates (means over updates).

    micro_batches_full: if every response had the longest length. bubble: of a pipeline's time with so many
    micro-batches, over the time without, less 1: (pp - 1) / (micro-batches x vpp) (Narayanan et al. 2021, section 2.2);
    micro-batches that are empty on all ranks pass quickly, and are not counted in it.
    balance: the work of the mean rank over that of the slowest, micro-batch by micro-batch. saved_prompts: of the
    samples, the share whose prompt another sample of their micro-batch brings (`train.share_prefixes`).
    copies: the data-parallel ranks that have a sample, in the mean of all tokens; more than 1 with `train.cp: auto`.
    ring_shares: with `train.cp: auto`, by the ranks of a row: of the rows that pass on the most keys and values at
    their place, the tokens of a rank, over those of the mean rank, times `balance`, by which all seconds are divided.
    """

    updates: int
    dp: int
    sequences: float
    tokens: float
    tokens_full: float
    micro_batches: float
    micro_batches_full: float
    bubble: float
    balance: float
    saved_prompts: float = 0.0
    copies: float = 1.0
    ring_shares: Mapping[int, float] = field(default_factory=dict)


def step_samples(recipe: Recipe, mean_share: float = MEAN_RESPONSE_SHARE) -> Samples:
    """The assumed samples of a step; mean_share: the mean response over the longest."""
    rollout = recipe.rollout
    name = recipe.algorithm.name
    prompt = max(1, round(PROMPT_SHARE * recipe.data.max_prompt_tokens))
    longest = recipe.longest_sample
    prompts = drawn_prompts = rollout.prompts_per_step
    if learns_from_answers(name):
        trained = drawn = prompts
    else:
        # One round that just brings enough.
        drawn_prompts = hyperparameters_of(name, recipe.algorithm).num_drawn(prompts)
        trained = prompts * rollout.samples_per_prompt
        drawn = drawn_prompts * (rollout.samples_per_prompt + ALGORITHMS[name].greedy_baseline)
    responses = response_lengths(drawn, longest, mean_share)
    full = recipe.data.max_prompt_tokens + longest
    turns = turns_of(recipe, float(responses.mean()))
    return Samples(prompts, drawn_prompts, drawn, trained, prompt, full, responses, turns)


def samples_bytes(
    recipe: Recipe,
    shape: ModelShape,
    layout: TrainLayout,
    engine: EngineLayout,
    samples: Samples,
    *,
    copies: float,
) -> list[int]:
    """Bytes of each node's host: its engines' samples, and those that training ranks there fetch (rank_groups).

    Of each token an id of 8 bytes, a probability of 4, a mark of 1 (whether the model sampled it), and with replay the
    experts of each layer, of 1 byte, or of 2 where there are more than 256. The first pipeline stage fetches whole
    groups too, to take the samples out of them. copies: as of RankWork.
    """
    size = recipe.placement.gpus_per_node
    of_expert = 1 if shape.num_experts <= 256 else 2
    chosen = shape.num_sparse_layers * shape.experts_per_token * of_expert
    of_sample = samples.mean_tokens * (8 + 4 + 1 + chosen * (recipe.train.replay != "off"))
    node_bytes = [0.0] * -(-recipe.placement.gpus // size)
    for first_slot in range(engine.first, engine.end, engine.tp):
        node_bytes[first_slot // size] += samples.num_drawn * of_sample / engine.count
    coords = map(layout.coords, range(layout.world_size))
    ranks = {(at.rank // size, at.dp, at.pp == 0) for at in coords}
    for node, _, is_first in ranks:
        node_bytes[node] += (1 + is_first) * copies * samples.num_trained * of_sample / layout.dp
    return [math.ceil(num_bytes) for num_bytes in node_bytes]


@cache
def response_lengths(count: int, longest: int, mean_share: float) -> IntArray:
    """[count] lengths, shuffled: even quantiles of a cut log-normal distribution whose mean is mean_share x longest.

    Read-only: a search asks for the same ones a thousand times.
    """
    normal = np.array([NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)])
    spread = np.exp(LENGTH_SPREAD * normal)
    low = 0.0
    high = 1e6 * longest / float(spread.min())
    for _ in range(100):  # the mean rises with the median
        middle = (low + high) / 2
        is_longer = np.minimum(spread * middle, longest).mean() > mean_share * longest
        low, high = (low, middle) if is_longer else (middle, high)
    lengths = np.rint(np.minimum(spread * high, longest)).astype(np.int64)
    shuffled = np.random.default_rng(0).permutation(np.maximum(1, lengths))
    shuffled.setflags(write=False)
    return shuffled


def share_of(recipe: Recipe, shape: ModelShape, layout: TrainLayout, samples: Samples) -> RankWork:
    """The work of a model of this recipe and layout with a step's samples; recipe: as the model's ranks read it."""
    work = train_work(shape)
    updates = _updates(recipe, layout, samples, shape, recipe.train.updates_per_step)
    micro_batches = float(np.mean([len(update.micro_batches[0]) for update in updates]))
    slowest = work_of_all = bubble = 0.0
    shares = recipe.train.share_prefixes
    for update in updates:
        works = np.array(
            [
                [
                    # all of a row is split over as many ranks
                    summed_sizes(row, work, shares_prompts=shares) / (row[0].cp if row else 1)
                    for row in rank
                ]
                for rank in update.micro_batches
            ]
        )
        slowest_rank = works.max(0)
        slowest += slowest_rank.sum()
        work_of_all += works.sum() / layout.dp
        bubble += layout.bubble_micro_batches / np.count_nonzero(slowest_rank)
    balance = float(work_of_all / slowest)
    rows = [row for update in updates for rank in update.micro_batches for row in rank]
    held = sum(ref.length for ref in itertools.chain(*rows))
    saved = sum(len(row) - len({ref.group for ref in row}) for row in rows)
    per_rank = len(updates) * layout.dp
    return RankWork(
        updates=len(updates),
        dp=layout.dp,
        sequences=samples.num_trained / per_rank,
        tokens=float(samples.lengths.sum()) / per_rank,
        tokens_full=samples.num_trained * samples.longest / per_rank,
        micro_batches=micro_batches,
        micro_batches_full=_full_micro_batches(recipe, layout, samples, shape),
        bubble=float(bubble / len(updates)),
        balance=balance,
        saved_prompts=saved / samples.num_trained * shares,
        copies=float(held / samples.lengths.sum()),
        ring_shares=_ring_shares(updates, layout, balance),
    )


def _ring_shares(
    updates: Sequence[Update], layout: TrainLayout, balance: float
) -> dict[int, float]:
    """As of RankWork: at each place of an update the ranks of all rows wait for those of one."""
    tokens: defaultdict[int, float] = defaultdict(float)
    for update in updates:
        for rows in zip(*update.micro_batches, strict=True):
            slowest = max(filter(None, rows), key=_passed_on, default=())
            if slowest and slowest[0].cp > 1:
                tokens[slowest[0].cp] += _own_tokens(slowest)
    mean = sum(update.tokens for update in updates) / layout.dp
    return {cp: balance * count / mean for cp, count in tokens.items()}


def _own_tokens(row: MicroBatch) -> float:
    """The tokens of a row on each of its ranks."""
    return sum(ref.length / ref.cp for ref in row)


def _passed_on(row: MicroBatch) -> float:
    """The tokens whose keys and values each of a row's ranks passes on, one rank's after the other."""
    return (row[0].cp - 1) * _own_tokens(row)


def _full_micro_batches(
    recipe: Recipe, layout: TrainLayout, samples: Samples, shape: ModelShape
) -> float:
    """Mean over updates, if all had the longest length: updates of as many samples are then alike."""
    each, more = divmod(samples.num_trained, recipe.train.updates_per_step)
    counts = [each + (place < more) for place in range(recipe.train.updates_per_step)]
    micro_batches = {
        count: len(_full_update(recipe, layout, samples, shape, count).micro_batches[0])
        for count in {*counts}
    }
    return float(np.mean([micro_batches[count] for count in counts]))


def _full_update(
    recipe: Recipe, layout: TrainLayout, samples: Samples, shape: ModelShape, count: int
) -> Update:
    """An update of so many samples of the longest length."""
    prompt = recipe.data.max_prompt_tokens
    responses = np.full(count, samples.longest - prompt)
    full = replace(samples, num_trained=count, prompt_tokens=prompt, responses=responses)
    (update,) = _updates(recipe, layout, full, shape, 1)
    return update


def _updates(
    recipe: Recipe,
    layout: TrainLayout,
    samples: Samples,
    shape: ModelShape,
    updates: int,
) -> list[Update]:
    """So many updates of the samples, split as `RankGroup.plan` splits them."""
    prompt = samples.prompt_tokens
    refs = [
        SampleRef(
            place * samples.prompts // samples.num_trained,
            place,
            prompt + response,
            response,
            num_shared=prompt,
        )
        for place, response in enumerate(samples.responses[: samples.num_trained].tolist())
    ]
    return plan_updates(
        refs,
        updates=updates,
        dp=layout.dp,
        token_budget=recipe.train.tokens_per_micro_batch,
        aggregation="token_mean",
        work=train_work(shape),
        align=layout.tokens_align,
        multiple=layout.batch_multiple,
        bubble_micro_batches=layout.bubble_micro_batches,
        shares_prompts=recipe.train.share_prefixes,
        max_cp=layout.max_cp,
    )


def advice(recipe: Recipe, layout: TrainLayout, engines: int, samples: Samples) -> list[str]:
    """Sizes that do not divide evenly, with the nearest that do. Uneven shares cost time only."""
    prompts = recipe.rollout.prompts_per_step
    updates = recipe.train.updates_per_step
    per_prompt = samples.num_trained // samples.prompts
    ranks = f"train.updates_per_step x data-parallel ranks = {updates} x {layout.dp}"
    uneven = {ranks: (per_prompt, updates * layout.dp)}
    if samples.drawn_prompts == samples.prompts:  # all samples of a prompt are one engine's
        uneven[f"rollout.engine.count = {engines}"] = 1, engines
    sentences = []
    for of, (each, parts) in uneven.items():
        if prompts * each % parts:
            step = parts // math.gcd(parts, each)
            below = prompts // step * step
            dividing = nearest(prompts, [value for value in (below, below + step) if value])
            count = f"{prompts} x {each}" if each > 1 else prompts
            sentences.append(
                f"rollout.prompts_per_step: {count} over {of} leaves a rest; {dividing} would divide"
            )
    return sentences
