"""The rank arithmetic against Megatron's own, and every refusal it makes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator

from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout, divisors

ORDER = "tp-cp-ep-dp-pp"
SHAPE = ModelShape(
    num_layers=4,
    hidden_size=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=200,
    num_experts=8,
    experts_per_token=2,
    moe_ffn_size=128,
)


@st.composite
def layouts(draw: st.DrawFn) -> TrainLayout:
    """Every layout that divides, up to 1024 ranks."""
    tp, dp, pp = (draw(st.sampled_from([1, 2, 3, 4, 8])) for _ in range(3))
    cp, vpp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    stage = tp * cp * dp
    etp = draw(st.sampled_from(divisors(stage)))
    ep = draw(st.sampled_from(divisors(stage // etp)))
    return TrainLayout(stage * pp, tp, pp, ep, cp=cp, vpp=vpp, expert_tp=etp)


def position(groups: list[list[int]], rank: int) -> int:
    """The rank's place within its own group."""
    return next(group.index(rank) for group in groups if rank in group)


@given(layouts())
def test_coords_are_megatrons(layout: TrainLayout) -> None:
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER)
    expert = RankGenerator(
        tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=ORDER
    )
    dense_groups = {axis: dense.get_ranks(axis) for axis in ("tp", "cp", "dp", "pp")}
    expert_groups = {axis: expert.get_ranks(axis) for axis in ("tp", "ep", "dp", "pp")}
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        assert coords.rank == rank
        assert (coords.tp, coords.cp, coords.dp, coords.pp) == tuple(
            position(g, rank) for g in dense_groups.values()
        )
        assert (coords.etp, coords.ep, coords.edp, coords.pp) == tuple(
            position(g, rank) for g in expert_groups.values()
        )


@given(layouts(), st.integers(1, 8), st.integers(1, 300_000))
def test_stages_and_vocabulary_tile(layout: TrainLayout, per_stage: int, vocab: int) -> None:
    num_layers = per_stage * layout.pp * layout.vpp
    stages = [
        layout.layers(stage, num_layers, chunk)
        for chunk in range(layout.vpp)
        for stage in range(layout.pp)
    ]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    padded = layout.padded_vocab(vocab)
    assert padded % (128 * layout.tp) == 0 and vocab <= padded < vocab + 128 * layout.tp


@pytest.mark.parametrize(
    ("layout", "where", "hint"),
    [
        (TrainLayout(6, 2, 2, 1), "placement.gpus", "multiple of 4"),
        (TrainLayout(6, 1, 1, 1, max_cp=4), "train.cp", "raise train.tokens_per_micro_batch"),
        (TrainLayout(3, 3, 1, 1), "train.tp", "set train.tp to 2 or 4"),
        (TrainLayout(3, 1, 3, 1), "train.pp", "set train.pp to 2 or 4"),
        (TrainLayout(6, 1, 2, 1, vpp=3), "train.vpp", "set train.vpp to 2"),
        (TrainLayout(2, 1, 1, 1, vpp=2), "train.vpp", "or raise train.pp"),
        (TrainLayout(2, 1, 2, 1, stage_layers=(3, 2)), "train.layers_per_stage", "whose sum is 4"),
        (
            TrainLayout(2, 1, 2, 1, stage_layers=(1, 1, 2)),
            "train.layers_per_stage",
            "write 2 numbers",
        ),
        (
            TrainLayout(6, 1, 2, 1, cp=2),
            "placement.gpus",
            "multiple of 4, or lower train.tp or train.cp or train.pp",
        ),
        (TrainLayout(6, 2, 1, 2, expert_tp=3), "train.etp", "set train.etp to 2 or 4"),
        # wrong gradients in Megatron
        (TrainLayout(2, 2, 1, 1, expert_tp=1), "train.etp", "set train.etp to 2"),
        (TrainLayout(4, 4, 1, 1, expert_tp=2), "train.etp", "set train.etp to 4"),
        (TrainLayout(6, 2, 3, 1, vpp=2), "train.pp", "set train.pp to 2"),
        (TrainLayout(6, 2, 3, 1, vpp=8), "train.pp", "set train.pp to 2 or 4 and train.vpp to 1"),
        (
            TrainLayout(3, 1, 3, 1, stage_layers=(2, 0, 2)),
            "train.layers_per_stage",
            "whose sum is 4",
        ),
        # 2 and 4 do not divide the 3 ranks
        (TrainLayout(3, 1, 1, 3), "train.ep", "set train.ep to 1"),
        # divides the experts, not the stage
        (TrainLayout(4, 1, 2, 4), "train.ep", "set train.ep to 2"),
        (TrainLayout(4, 1, 1, 2, expert_tp=4), "train.ep", "2 or 4 and leave out train.etp"),
    ],
)
def test_training_errors_name_the_key_and_the_hint(
    layout: TrainLayout, where: str, hint: str
) -> None:
    assert any(error.where == where and hint in error.hint for error in layout.errors(SHAPE))


@pytest.mark.parametrize(
    ("change", "layout", "where"),
    [
        ({"num_kv_heads": 3, "num_heads": 12}, TrainLayout(2, 2, 1, 1), "train.tp"),
        ({"num_dense_layers": 1, "ffn_size": 130}, TrainLayout(4, 4, 1, 1), "train.tp"),
        ({"num_shared_experts": 1, "moe_ffn_size": 130}, TrainLayout(4, 4, 1, 4), "train.tp"),
        (
            {"num_experts": 0, "num_dense_layers": 4, "ffn_size": 128},
            TrainLayout(2, 1, 1, 2),
            "train.ep",
        ),
        (
            {"num_experts": 0, "num_dense_layers": 4, "ffn_size": 128},
            TrainLayout(2, 1, 1, 1, expert_tp=2),
            "train.etp",
        ),
        ({"num_kv_heads": 1, "head_dim": 3}, TrainLayout(4, 4, 1, 4), "train.tp"),  # 30 fused rows
        ({"num_mtp_layers": 1, "hidden_size": 126}, TrainLayout(4, 4, 1, 4), "train.tp"),
    ],
)
def test_training_errors_of_other_families(
    change: dict[str, int], layout: TrainLayout, where: str
) -> None:
    assert [error.where for error in layout.errors(dataclasses.replace(SHAPE, **change))] == [where]


@given(layouts())
def test_a_mend_of_one_axis_mends_it(layout: TrainLayout) -> None:
    """The value that is proposed for an axis leaves no fault of that axis behind."""
    fields = {
        "train.tp": "tp",
        "train.ep": "ep",
        "train.etp": "expert_tp",
        "train.vpp": "vpp",
        "train.pp": "pp",
    }
    for error in layout.errors(SHAPE):
        words = error.hint.split()
        if error.where in fields and words[3].isdigit() and "and" not in words:
            mended = dataclasses.replace(layout, **{fields[error.where]: int(words[3])})
            assert error.where not in [other.where for other in mended.errors(SHAPE)], error


def test_expert_width_counts_only_where_tp_splits_it() -> None:
    narrow = dataclasses.replace(SHAPE, moe_ffn_size=127)
    assert [f.where for f in TrainLayout(2, 2, 1, 1).errors(narrow)] == ["train.tp"]
    assert TrainLayout(2, 2, 1, 2).errors(narrow) == []


def test_all_training_errors_at_once() -> None:
    errors = TrainLayout(7, 3, 3, 3).errors(SHAPE)
    assert {error.where for error in errors} == {
        "train.tp",
        "train.ep",
        "train.pp",
        "placement.gpus",
    }


def test_a_norm_over_all_heads_needs_each_rank_to_have_key_heads_of_its_own() -> None:
    """Otherwise several ranks would have the same weights of the norm, whose gradients they do not add."""
    shape = dataclasses.replace(SHAPE, family="MiniMaxM2ForCausalLM")
    assert TrainLayout(4, 4, 1, 1).errors(shape) == []
    (error,) = TrainLayout(8, 8, 1, 1).errors(shape)
    assert error.where == "train.tp"
    assert "does not divide the key/value heads (4)" in error.problem
    assert error.hint == "set train.tp to 4"
    assert TrainLayout(8, 8, 1, 1).errors(SHAPE) == []
