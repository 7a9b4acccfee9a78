"""Batch arithmetic: lengths that are supposed, samples that are counted, micro-batches that are packed as in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.loading import overlaid
from megarl.model.hf_config import model_shape
from megarl.placement.roles import engine_layout, train_layout
from megarl.placement.train_layout import TrainLayout, fewest_ranks
from megarl.plan import batch
from megarl.plan.batch import advice, response_lengths, samples_bytes, share_of, step_samples
from megarl.training.batching import SampleRef, Update
from tests.plan import recipes as planning


@pytest.mark.parametrize(("count", "share"), [(8192, 0.4), (100, 0.05), (1000, 0.9), (1, 0.5)])
def test_supposed_lengths_have_the_stated_mean_and_end_at_the_longest(
    count: int, share: float
) -> None:
    lengths = response_lengths(count, 20_000, share)
    assert len(lengths) == count and lengths.min() >= 1 and lengths.max() <= 20_000
    assert lengths.mean() == pytest.approx(share * 20_000, rel=0.01)
    assert list(lengths) == list(response_lengths(count, 20_000, share))


def test_every_response_is_the_longest_at_a_share_of_1() -> None:
    assert set(response_lengths(10, 7, 1.0).tolist()) == {7}


def test_samples_are_counted_by_the_algorithm(tmp_path: Path) -> None:
    keys = [
        "rollout.prompts_per_step=30",
        "rollout.samples_per_prompt=4",
        "data.max_prompt_tokens=100",
    ]
    counts = {}
    for name in ("grpo", "dapo", "remax", "sft"):
        samples = step_samples(planning.small(tmp_path, *keys, f"algorithm.name={name}"))
        assert (
            len(samples.responses) == samples.num_drawn
            and len(samples.lengths) == samples.num_trained
        )
        assert (samples.prompt_tokens, samples.longest) == (25, 105)
        counts[name] = samples.drawn_prompts, samples.num_drawn, samples.num_trained
    assert counts == {
        "grpo": (30, 120, 120),
        "dapo": (45, 180, 120),
        "remax": (30, 150, 120),
        "sft": (30, 30, 30),
    }


def test_a_nodes_samples_are_its_engines_and_its_ranks(tmp_path: Path) -> None:
    """Two stages of a node each, all data-parallel ranks on both; 2 experts of 4 layers and 13 bytes a token."""
    recipe = planning.small(
        tmp_path, "algorithm.name=grpo", "rollout.prompts_per_step=10", "rollout.samples_per_prompt=4",
        "train.tp=2", "train.pp=2", "train.replay=r3",
    )  # fmt: skip
    layouts = model_shape(tmp_path), train_layout(recipe), engine_layout(recipe)
    samples = step_samples(recipe)
    node_bytes = samples_bytes(recipe, *layouts, samples, copies=1.0)
    whole = 10 * 4 * samples.mean_tokens * (4 * 2 + 8 + 4 + 1)
    # the first stage takes them out of whole groups
    assert node_bytes == [whole / 2 + 2 * whole, whole / 2 + whole]
    off = overlaid(recipe, {"train": {"replay": "off"}})
    bare = samples_bytes(off, *layouts, samples, copies=1.0)
    assert [num_bytes * 13 for num_bytes in node_bytes] == [num_bytes * 21 for num_bytes in bare]
    split = samples_bytes(recipe, *layouts, samples, copies=1.5)
    assert split == [whole / 2 + 3 * whole, whole / 2 + 1.5 * whole], "each rank of a row has it"


def test_a_share_is_what_a_run_would_pack(tmp_path: Path) -> None:
    """64 samples of 105 at most, on 2 data-parallel ranks, 2 updates: at full length 4 fit a micro-batch of 500."""
    recipe = planning.small(
        tmp_path, "rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "data.max_prompt_tokens=100",
        "train.updates_per_step=2", "train.tokens_per_micro_batch=500",
    )  # fmt: skip
    layout, samples = train_layout(recipe), step_samples(recipe)
    share = share_of(recipe, model_shape(tmp_path), layout, samples)
    assert (share.updates, share.dp, share.sequences, share.tokens_full) == (2, 2, 16, 16 * 105)
    assert share.tokens == samples.lengths.sum() / 4
    assert share.micro_batches_full == 4 and share.micro_batches == 1  # of 27 tokens each 16 fit
    assert share.bubble == 1.0  # (2 - 1) / 1
    assert 0.9 < share.balance <= 1.0


def test_prompts_that_samples_share_are_planned_once(tmp_path: Path) -> None:
    """Prompts of 25 tokens and responses of 2: the four samples of a prompt are together, and less work."""
    keys = ["rollout.prompts_per_step=16", "rollout.samples_per_prompt=4"]
    keys += ["data.max_prompt_tokens=100", "train.tokens_per_micro_batch=500"]
    recipe = planning.small(tmp_path, *keys, "train.updates_per_step=1")
    shares = [
        share_of(
            overlaid(recipe, {"train": {"share_prefixes": is_shared}}),
            model_shape(tmp_path),
            train_layout(recipe),
            step_samples(recipe),
        )
        for is_shared in (False, True)
    ]
    assert [share.saved_prompts for share in shares] == [0.0, 0.75]
    assert shares[0].tokens == shares[1].tokens
    assert shares[1].micro_batches < shares[0].micro_batches
    # at full length prompts of 100 and responses of 5: eight groups of a rank, four of which fit
    assert [share.micro_batches_full for share in shares] == [8, 2]


def test_rows_by_length_are_counted_on_each_of_their_ranks(tmp_path: Path) -> None:
    """At full length each sample of 105 takes both data-parallel ranks, with 54 tokens each; short ones take one."""
    keys = [
        "rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "data.max_prompt_tokens=100",
        "train.updates_per_step=2", "train.cp=auto", "train.tokens_per_micro_batch=54",
    ]  # fmt: skip
    recipe = planning.small(tmp_path, *keys)
    layout, samples = train_layout(recipe), step_samples(recipe)
    assert (layout.dp, layout.max_cp) == (2, 2)
    share = share_of(recipe, model_shape(tmp_path), layout, samples)
    assert share.micro_batches_full == 32
    assert (share.copies, share.ring_shares) == (1.0, {}), "of 27 tokens each"
    recipe = planning.small(tmp_path, *keys, "train.tokens_per_micro_batch=26")
    assert train_layout(recipe).max_cp == 8, "which no check has seen"
    fixed = planning.small(tmp_path, *keys, "train.cp=2", "train.tokens_per_micro_batch=108")
    layout = train_layout(fixed)
    share = share_of(fixed, model_shape(tmp_path), layout, samples)
    assert (share.copies, share.ring_shares, share.micro_batches_full) == (1.0, {}, 32)


def test_ranks_wait_for_the_row_with_the_most_keys_and_values() -> None:
    """Of two places, one has rows of one and of two ranks, and the other one over all four."""
    layout = TrainLayout(4, 1, 1, 1, max_cp=4)
    short, pair, long = (
        SampleRef(0, number, length, length, cp=cp)
        for number, (length, cp) in enumerate([(30, 1), (40, 2), (80, 4)])
    )
    micro_batches = (((pair,), (long,)),) * 2 + (((short,), (long,)), ((), (long,)))
    update = Update(micro_batches, 1.0, tokens=150, loss_tokens=150)
    assert batch._ring_shares([update], layout, 0.75) == {2: 0.75 * 20 / 37.5, 4: 0.75 * 20 / 37.5}


def test_samples_of_mixed_lengths_are_on_as_many_ranks_as_they_need(tmp_path: Path) -> None:
    """Of 31 to 125 tokens, on eight ranks with 50 each, where some need one rank, some two and some four."""
    recipe = planning.small(
        tmp_path, "rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "data.max_prompt_tokens=100",
        "rollout.max_response_tokens=100", "train.tp=1", "train.pp=1", "train.cp=auto",
        "train.tokens_per_micro_batch=50",
    )  # fmt: skip
    layout, samples = train_layout(recipe), step_samples(recipe)
    share = share_of(recipe, model_shape(tmp_path), layout, samples)
    lengths = samples.lengths.tolist()
    ranks = [fewest_ranks(-(-length // 8) * 8, 50) for length in lengths]
    assert {*ranks} == {1, 2, 4}
    needed = sum(length * count for length, count in zip(lengths, ranks, strict=True)) / sum(
        lengths
    )
    assert needed <= share.copies < 4, "short ones fill up split rows, too"
    assert share.ring_shares.keys() == {2, 4}


def test_an_interleaved_pipeline_waits_less(tmp_path: Path) -> None:
    keys = ["train.tokens_per_micro_batch=64", "rollout.prompts_per_step=16"]
    recipe = planning.small(tmp_path, *keys, "train.vpp=2")
    share = share_of(recipe, model_shape(tmp_path), train_layout(recipe), step_samples(recipe))
    assert share.micro_batches % 2 == 0
    assert share.bubble == 1 / (2 * share.micro_batches)


def test_empty_micro_batches_do_not_keep_a_pipeline_busy(tmp_path: Path) -> None:
    """Of two micro-batches, as many as two stages of two chunks need, one has the rank's only sample."""
    keys = ["rollout.prompts_per_step=1", "rollout.samples_per_prompt=2", "train.vpp=2"]
    recipe = planning.small(tmp_path, *keys, "train.updates_per_step=1")
    share = share_of(recipe, model_shape(tmp_path), train_layout(recipe), step_samples(recipe))
    assert (share.sequences, share.micro_batches, share.bubble) == (1, 2, 1 / 2)


def test_what_does_not_divide_is_told_with_the_nearest_that_does(tmp_path: Path) -> None:
    keys = ["rollout.samples_per_prompt=4", "train.updates_per_step=2"]
    fits, does_not = (
        planning.small(tmp_path, *keys, f"rollout.prompts_per_step={count}") for count in (12, 13)
    )
    layout = TrainLayout(16, 1, 2, 1)
    assert layout.dp == 8
    assert advice(fits, layout, 3, step_samples(fits)) == []
    lines = advice(does_not, layout, 3, step_samples(does_not))
    assert [line.rpartition("; ")[2] for line in lines] == [
        "12 or 16 would divide",
        "12 or 15 would divide",
    ]
