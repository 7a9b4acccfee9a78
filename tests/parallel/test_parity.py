"""Every layout computes what one rank computes: losses, gradients, and the weights after 3 updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megarl.config.models import TrainConfig
from megarl.placement.overlaps import PAIRED_PASSES
from megarl.placement.recomputation import recompute_fields
from megarl.placement.train_layout import TrainLayout
from megarl.types import RecomputedPart
from tests.parallel.checkpoints import write
from tests.parallel.gradients import (
    DENOMINATOR,
    LINEAR,
    VOCAB_SIZE,
    check_learning,
    recorded,
    steps,
    uneven_steps,
)
from tests.parallel.precision import within
from tests.parallel.worlds import (
    LONGEST,
    assign,
    planned,
    ragged,
    recipe,
    run_world,
    world_part,
)

pytestmark = pytest.mark.slow

ONE_RANK = TrainLayout(1, 1, 1, 1)
LAYOUTS = {
    "dp2": TrainLayout(2, 1, 1, 1),
    "tp2": TrainLayout(2, 2, 1, 1),
    "pp2": TrainLayout(2, 1, 2, 1),
    "ep2": TrainLayout(2, 1, 1, 2),
    "cp2": TrainLayout(2, 1, 1, 1, cp=2),
    "vpp2": TrainLayout(2, 1, 2, 1, vpp=2),
    "uneven pp2": TrainLayout(2, 1, 2, 1, stage_layers=(1, 3)),
    "tp4": TrainLayout(4, 4, 1, 1),
    "pp4": TrainLayout(4, 1, 4, 1),
    "cp4": TrainLayout(4, 1, 1, 1, cp=4),
    "tp2 ep2": TrainLayout(2, 2, 1, 2),
    "cp2 ep2": TrainLayout(2, 1, 1, 2, cp=2),
    "tp2 ep4": TrainLayout(4, 2, 1, 4),
    "tp2 ep2 etp2": TrainLayout(4, 2, 1, 2, expert_tp=2),
    "tp2 pp2": TrainLayout(4, 2, 2, 1),
    "tp2 cp2": TrainLayout(4, 2, 1, 1, cp=2),
    "cp2 pp2": TrainLayout(4, 1, 2, 1, cp=2),
    "pp2 ep2": TrainLayout(4, 1, 2, 2),
    "tp2 pp2 ep2": TrainLayout(4, 2, 2, 2),
    "tp2 cp2 ep4": TrainLayout(4, 2, 1, 4, cp=2),
    "tp2 vpp2 ep2": TrainLayout(4, 2, 2, 2, vpp=2),
    "tp2 uneven vpp2": TrainLayout(4, 2, 2, 1, vpp=2, stage_layers=(1, 1, 2, 0)),
    "tp2 pp2 cp2 ep2": TrainLayout(8, 2, 2, 2, cp=2),
    "tp2 vpp2 cp2 ep2": TrainLayout(8, 2, 2, 2, cp=2, vpp=2),
    "cp auto": TrainLayout(4, 1, 1, 1, max_cp=4),
    "cp auto tp2": TrainLayout(4, 2, 1, 1, max_cp=2),
    "cp auto vpp2 ep2": TrainLayout(4, 1, 2, 2, vpp=2, max_cp=2),
    "cp auto tp2 ep4": TrainLayout(8, 2, 1, 4, max_cp=4),
}
TP2_PP2, CP2_VPP2 = TrainLayout(4, 2, 2, 1), TrainLayout(4, 1, 2, 1, cp=2, vpp=2)
OTHERS = {"qwen3": (TP2_PP2, CP2_VPP2), "qwen2": (TP2_PP2,), "llama": (CP2_VPP2,)}
OTHERS |= {"minimax-m2": (LAYOUTS["tp2 ep2"],), "qwen2-moe": (LAYOUTS["tp2 ep2"],)}
OTHERS |= {"hy-v3": (LAYOUTS["tp2 ep2"],), "mixtral": (LAYOUTS["tp2 ep2"],)}
OTHERS |= {"deepseek-v3.2": (LAYOUTS["tp2 cp2"],)}
RECOMPUTE = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
}
# parts of layers, on so many pipeline ranks from the first, and the layout
PARTS_AGAIN: dict[str, tuple[dict[RecomputedPart, int], str]] = {
    "by stage": (
        {"layer": 1, "layernorm": 2, "mla_up_proj": 2, "mlp": 2, "moe": 2, "shared_experts": 2},
        "tp2 vpp2 ep2",
    ),
    "everywhere": (
        {"core_attn": 1, "layernorm": 1, "mla_up_proj": 1, "shared_experts": 1},
        "tp2 cp2 ep4",
    ),
    # when other rows have been in other groups
    "rows by length": ({"core_attn": 2, "layernorm": 2, "mla_up_proj": 2}, "cp auto vpp2 ep2"),
}
# the second step reads the optimizer's state, the third one what the second has made of it
STEPS = 3
LOSSES = {"aux_loss": 0.02, "z_loss": 1e-3}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3-moe": LOSSES,
    "deepseek-v3": LOSSES | {"mtp_loss": 0.1, "router_bias_rate": 1e-3},
    "glm4-moe": LOSSES | {"mtp_loss": 0.1, "router_bias_rate": 1e-3},
    "qwen3-next": LOSSES,
}
# as many key heads of linear attention as any layout splits
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
}


def train(trainer: Any) -> dict[str, Any]:
    return uneven_steps(trainer, STEPS)


def train_again(trainer: Any) -> dict[str, Any]:
    config = trainer._model.chunks[0].config
    return train(trainer) | {"again": (config.recompute_granularity, config.recompute_modules)}


def run(
    path: Path, family: str, layout: TrainLayout, work: Any = train, **keys: Any
) -> list[dict[str, Any]]:
    run_recipe = recipe(path, layout, grad_clip=1.0, weight_decay=0.1, **SETTINGS[family], **keys)
    return run_world(run_recipe, work)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each family's checkpoint and what one rank makes of it."""
    by_family = {}
    for family in SETTINGS:
        folder = tmp_path_factory.mktemp(family)
        path = write(
            folder,
            family,
            mtp_layers=int("mtp_loss" in SETTINGS[family]),
            vocab_size=VOCAB_SIZE,
            pad_token_id=None,
            **CHANGES.get(family, {}),
        )
        by_family[family] = path, run(path, family, ONE_RANK)[0]
    return by_family


# By night: parts of which others are made, whichever family has the whole by day, and layouts that a test below has
# with an option that changes nothing. Qwen3-MoE differs from DeepSeek-V3 in attention, which TP and CP split.
PARTS = {"tp2", "pp2", "ep2", "cp2", "tp2 ep2", "cp2 ep2", "tp2 pp2", "cp2 pp2", "pp2 ep2"}
PARTS |= {"vpp2", "tp4", "cp4", "tp2 cp2", "tp2 cp2 ep4", "tp2 pp2 ep2", "tp2 pp2 cp2 ep2"}
PARTS |= {"uneven pp2", "tp2 vpp2 ep2", "cp auto", "cp auto tp2", "tp2 pp2", "tp2 ep4"}
PARTS |= {"cp auto vpp2 ep2", "tp2 vpp2 cp2 ep2"}
QWEN_LAYOUTS = {"tp4", "cp4", "tp2 pp2 cp2 ep2"}
# GLM-4.5 has the one's attention, with biases, and the other's experts.
BY_DAY = {
    "qwen3-moe": QWEN_LAYOUTS,
    "deepseek-v3": LAYOUTS.keys() - PARTS,
    "glm4-moe": {"tp2 vpp2 ep2"},
    # With tp4 there are more ranks than key/value heads. Its linear attention exchanges tokens for heads.
    "qwen3-next": {"tp4", "cp auto tp2"},
}
CASES = [
    pytest.param(family, name, marks=() if name in BY_DAY[family] else pytest.mark.nightly)
    for family in SETTINGS
    for name in LAYOUTS
]


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.max_cp > 1])
def test_layouts_with_rows_by_length_have_rows_of_all_kinds(name: str) -> None:
    """Of one rank and of several, empty ones, and a split row that a sequence fills up which one rank would hold."""
    layout = LAYOUTS[name]
    sequences = ragged(14, VOCAB_SIZE, seed=3)
    lengths = [len(sequence.token_ids_T) for sequence in sequences]
    rows = [row for dp in range(layout.dp) for row in planned(sequences, layout, dp)]
    assert {row[0][1] if row else 0 for row in rows} == {0, 1, 2, layout.max_cp}
    of_one_rank = LONGEST // layout.max_cp
    assert any(cp > 1 and lengths[place] <= of_one_rank for row in rows for place, cp in row)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_layout_equals_one_rank(one_rank: dict[str, Any], family: str, name: str) -> None:
    """Unverified on a GPU.

    parallel/model.py _default_fields, buffers_config: with TransformerEngine: gradients summed in buckets while
    others are computed, fused SwiGLU and permutation of tokens, apex's weight gradients added in place;
    `batch_p2p_sync` off. To check first: the parity test of all layouts with the defaults, and with each of them
    off; how far layouts differ in bfloat16, for which `IN_BFLOAT16` of tests/parallel/precision.py is a guess.

    parallel/pipeline.py: hops over NCCL without Megatron's exchange of shapes, whose two waits of the host also
    ordered sends before what follows. Simulated: DeepSeek-V3 with PP2 and TP2 PP2 EP2, without VPP. To check first:
    the parity test's PP and VPP layouts, ten times.

    parallel/cp_gather.py, parallel/model.py with train.cp: TransformerEngine's attention on packed rows under
    context parallelism, which takes the same zigzag split. Simulated: DeepSeek-V3 with CP2, the attention's ring
    replaced as a whole. To check first: the parity test's CP layouts.

    parallel/cp_by_length.py with train.cp auto: TransformerEngine's attention in another group of ranks in each
    micro-batch, on one stream for all of them. To check first: the parity test's layouts with "cp auto".
    """
    path, expected = one_rank[family]
    rounding = LINEAR if family == "qwen3-next" else 1.0
    check(run(path, family, LAYOUTS[name]), LAYOUTS[name], expected, rounding)


@pytest.mark.parametrize("name", PARTS_AGAIN)
def test_recomputed_activations_change_nothing(one_rank: dict[str, Any], name: str) -> None:
    """Unverified on a GPU.

    placement/recomputation.py: `moe_act`, which needs TransformerEngine's grouped experts, and the norms that it fuses
    with the products behind them. To check first: this test, with moe_act on every stage.
    """
    parts, layout_name = PARTS_AGAIN[name]
    layout = LAYOUTS[layout_name]
    path, expected = one_rank["deepseek-v3"]
    ranks = run(path, "deepseek-v3", layout, train_again, recompute=parts)
    check(ranks, layout, expected)
    for rank, result in enumerate(ranks):
        fields = recompute_fields(TrainConfig(lr=1.0, recompute=parts), layout.coords(rank).pp)
        modules = fields["recompute_modules"] or ["core_attn"]  # Megatron's default
        assert result["again"] == (fields["recompute_granularity"], modules)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek-v3", TrainLayout(2, 1, 1, 2)),
        ("qwen3-moe", TrainLayout(4, 1, 2, 1, vpp=2)),
    ],
)
def test_gradients_that_are_summed_while_others_are_computed(
    one_rank: dict[str, Any], family: str, layout: TrainLayout
) -> None:
    """In many buckets, as on a GPU with TransformerEngine."""
    path, expected = one_rank[family]
    options = {"ddp": {"overlap_grad_reduce": True, "bucket_size": 5_000}, **SETTINGS[family]}
    check(
        run_world(recipe(path, layout, grad_clip=1.0, weight_decay=0.1, **options), train),
        layout,
        expected,
    )


def in_pairs(trainer: Any, work: Callable[..., Any], *args: Any) -> Any:
    """With Megatron's combined 1F1B, which Megatron itself refuses to types other than bfloat16."""
    from megarl.parallel.paired_passes import ChunkPass

    trainer._model.chunks[0].config.overlap_moe_expert_parallel_comm = True
    with patch.object(ChunkPass, "run", wraps=ChunkPass.run) as pair:
        results = work(trainer, *args)
    assert any(None not in call.args for call in pair.call_args_list)
    return results


@pytest.mark.parametrize("name", ["ep2", "tp2 vpp2 ep2"])
def test_experts_exchange_under_other_micro_batches_products(
    one_rank: dict[str, Any], name: str
) -> None:
    """Unverified on a GPU.

    parallel/paired_passes.py ChunkPass: on a CPU there is one stream. On a GPU tensors of one stream are read and
    freed by the other, and TransformerEngine's layers save and release their own. To check first: this test, also
    with `train.megatron.moe_token_dispatcher_type: flex`, ten times; then that a profile has exchanges under products.
    """
    layout = LAYOUTS[name]
    path, expected = one_rank["qwen3-moe"]
    options = {"ddp": {"overlap_grad_reduce": True, "bucket_size": 5_000}}
    check(
        run(path, "qwen3-moe", layout, partial(in_pairs, work=train), **options), layout, expected
    )


@pytest.mark.nightly
def test_one_expert_that_two_ranks_split_in_pairs_of_passes(tmp_path: Path) -> None:
    """Experts then read what is gathered from both, which Megatron does not free."""
    keys: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": None, "num_experts": 2}
    path = write(tmp_path, "qwen3-moe", mtp_layers=0, **keys)
    layout = TrainLayout(4, 1, 1, 2, expert_tp=2)
    (expected,) = run(path, "qwen3-moe", ONE_RANK)
    check(run(path, "qwen3-moe", layout, partial(in_pairs, work=train)), layout, expected)


def watched(trainer: Any) -> dict[str, Any]:
    from megarl.parallel.paired_passes import ChunkPass

    with patch.object(ChunkPass, "run", wraps=ChunkPass.run) as pair:
        results = train(trainer)
    return results | {"pairs": sum(None not in call.args for call in pair.call_args_list)}


def test_a_recipes_passes_in_pairs_are_those_of_bfloat16(one_rank: dict[str, Any]) -> None:
    """Megatron takes them in bfloat16, and widens what a chunk returns then; types differ by the order of sums."""
    path, _ = one_rank["qwen3-moe"]
    layout = LAYOUTS["ep2"]
    plain, paired = (
        run(path, "qwen3-moe", layout, watched, dtype="bfloat16", megatron={PAIRED_PASSES: on})
        for on in (False, True)
    )
    for alone, beside in zip(plain, paired, strict=True):
        assert not alone["pairs"] and beside["pairs"]
        for metrics, expected in zip(beside["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=0.02, abs=0.02)


def test_parts_are_computed_again_in_pairs_of_passes(one_rank: dict[str, Any]) -> None:
    """Of DeepSeek-V3, whose layers of multi-token prediction are frozen with it."""
    path, _ = one_rank["deepseek-v3"]
    layout = LAYOUTS["tp2 vpp2 cp2 ep2"]
    settings = SETTINGS["deepseek-v3"] | {"mtp_loss": 0.0}
    parts = {"layernorm": 2, "mla_up_proj": 1, "mlp": 2, "shared_experts": 2}
    alone, paired = (
        recipe(path, each, grad_clip=1.0, weight_decay=0.1, recompute=again, **settings)
        for each, again in ((ONE_RANK, {}), (layout, parts))
    )
    (expected,) = run_world(alone, train)
    check(run_world(paired, in_pairs, train), layout, expected)


FLEX: dict[str, Any] = {"moe_token_dispatcher_type": "flex"}


def in_nodes_of_two(trainer: Any, work: Callable[..., Any], *args: Any) -> Any:
    """With DeepEP's stand-in, for which two neighbours of a group are a node."""
    from megarl.cpu.deepep import Buffer

    before = Buffer.sent.over_nvlink
    with patch.object(Buffer, "ranks_per_node", 2):
        results = work(trainer, *args)
    assert Buffer.sent.over_nvlink > before
    return results


@pytest.mark.parametrize("name", ["ep2", "tp2 ep4", "tp2 ep2 etp2", "tp2 vpp2 cp2 ep2"])
def test_tokens_go_to_experts_as_by_deepep(one_rank: dict[str, Any], name: str) -> None:
    """Over two nodes where there are four ranks with experts, of DeepSeek-V3 with multi-token prediction."""
    layout = LAYOUTS[name]
    path, expected = one_rank["deepseek-v3"]
    work = partial(in_nodes_of_two, work=train)
    check(run(path, "deepseek-v3", layout, work, megatron=FLEX), layout, expected)


@pytest.mark.parametrize("name", ["ep2", "tp2 vpp2 ep2"])
def test_shared_experts_run_beside_an_exchange(one_rank: dict[str, Any], name: str) -> None:
    """Unverified on a GPU.

    placement/overlaps.py SHARED_EXPERTS: on a CPU there is one stream. To check first: this test, ten times.
    """
    layout = LAYOUTS[name]
    path, expected = one_rank["deepseek-v3"]
    options = {"megatron": {"moe_shared_expert_overlap": True}}
    check(run(path, "deepseek-v3", layout, **options), layout, expected)


def train_unevenly(trainer: Any) -> dict[str, Any]:
    """The first data-parallel rank has everything, the others rows of padding."""
    sequences = ragged(14, VOCAB_SIZE, seed=3)
    micro_batches = assign(sequences, 0, 1, micro_batches=4)
    if trainer.layout.coords(trainer.rank).dp:
        micro_batches = [[] for _ in micro_batches]
    part = world_part(micro_batches, sequences, DENOMINATOR)
    with recorded(trainer) as learning:
        metrics = steps(trainer, part, STEPS)
    return {"metrics": metrics, "learning": learning}


def test_ranks_without_sequences(one_rank: dict[str, Any]) -> None:
    """Any number of samples goes on any number of ranks."""
    path, expected = one_rank["deepseek-v3"]
    settings = SETTINGS["deepseek-v3"]
    run_recipe = recipe(path, TrainLayout(4, 2, 1, 2), grad_clip=1.0, weight_decay=0.1, **settings)
    ranks = run_world(run_recipe, train_unevenly)
    assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks)
    for metrics, reference in zip(ranks[0]["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(reference, rel=within(1e-4))
    check_learning([rank["learning"] for rank in ranks], [expected["learning"]])


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(tmp_path: Path, family: str) -> None:
    """Without experts; Qwen3's embedding is also its output layer, on two stages in two copies.

    MiniMax-M2's norms of queries and keys are over the heads of all tensor-parallel ranks; Qwen2-MoE's shared expert
    has a gate, which is whole on each of them.
    """
    path = write(tmp_path, family, vocab_size=VOCAB_SIZE, pad_token_id=None)
    (expected,) = run_world(recipe(path, ONE_RANK, weight_decay=0.1), train)
    for layout in OTHERS[family]:
        check(run_world(recipe(path, layout, weight_decay=0.1), train), layout, expected)


def check(
    ranks: list[dict[str, Any]],
    layout: TrainLayout,
    expected: dict[str, Any],
    rounding: float = 1.0,
) -> None:
    for rank, result in enumerate(ranks):
        at = layout.coords(rank)
        is_last = at.pp == layout.pp - 1
        check_logprobs(
            result["logprobs"],
            own_arrays(expected["logprobs"], layout, at.dp) if is_last else None,
        )
        for rank_metrics, reference in zip(result["metrics"], expected["metrics"], strict=True):
            assert (rank_metrics.keys() == reference.keys()) == is_last
            assert rank_metrics == pytest.approx(
                {name: reference[name] for name in rank_metrics}, rel=within(1e-4 * rounding)
            )
    last = [
        result["metrics"]
        for rank, result in enumerate(ranks)
        if layout.coords(rank).pp == layout.pp - 1
    ]
    assert all(metrics == last[0] for metrics in last)
    check_learning([rank["learning"] for rank in ranks], [expected["learning"]], rounding=rounding)


def own_arrays(everything: list[np.ndarray], layout: TrainLayout, dp: int) -> list[np.ndarray]:
    """Of all sequences' those that a data-parallel rank has."""
    if layout.max_cp == 1:
        return everything[dp :: layout.dp]
    batches = planned(ragged(14, VOCAB_SIZE, seed=3), layout, dp)
    return [everything[place] for batch in batches for place, _ in batch]


def check_logprobs(mine: list[np.ndarray] | None, expected: list[np.ndarray] | None) -> None:
    assert (mine is None) == (expected is None)
    for logp_T, other in zip(mine or (), expected or (), strict=True):
        np.testing.assert_allclose(logp_T, other, atol=within(1e-4))
