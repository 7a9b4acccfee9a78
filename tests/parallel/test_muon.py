"""Muon: its step beside torch's, the matrices of the families, and layouts beside one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.optim import _muon

from megarl.model.hf_config import read_model
from megarl.model.matrices import layer_matrices, matrices
from megarl.parallel import newton_schulz
from megarl.placement.train_layout import TrainLayout
from tests.parallel.checkpoints import write
from tests.parallel.gathered import check_same, read_whole
from tests.parallel.gradients import (
    LINEAR,
    VOCAB_SIZE,
    Learning,
    Tensors,
    check_gradients,
    uneven_steps,
    whole,
)
from tests.parallel.precision import ROUNDING_OF_BFLOAT16, dtype, within
from tests.parallel.test_fused_adam import load_and_go_on, load_and_save, one_more
from tests.parallel.worlds import recipe, rectangles, run_world

UPDATES = 3
ONE_RANK = TrainLayout(1, 1, 1, 1)
LAYOUTS = {
    ("qwen3-moe", "tp2 ep2 etp2"): TrainLayout(4, 2, 1, 2, expert_tp=2),
    ("deepseek-v3", "tp2 vpp2 cp2 ep2"): TrainLayout(8, 2, 2, 2, cp=2, vpp=2),
    ("qwen3-next", "tp4"): TrainLayout(4, 4, 1, 1),
}
# the other two have more, but for heads of attention that no rank splits and that are all of it
NIGHTLY = {"qwen3-moe": pytest.mark.nightly}


@pytest.mark.parametrize("size", [(24, 40), (40, 24), (16, 16), (1, 8)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_matrices_are_made_orthogonal_as_by_torch(size: tuple[int, int], kind: torch.dtype) -> None:
    stack = torch.randn(3, *size, generator=torch.Generator().manual_seed(0)).to(kind)
    stack[2] = 0
    own = newton_schulz.orthogonalised(stack)
    for matrix, made in zip(stack, own, strict=True):
        torch.testing.assert_close(made, torchs_orthogonalised(matrix))


def torchs_orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    settings = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), _muon.DEFAULT_NS_STEPS
    with in_type(matrix.dtype):
        return _muon._zeropower_via_newtonschulz(matrix, *settings, _muon.EPS)


def in_type(kind: torch.dtype) -> Any:
    """Inside, torch.optim.Muon makes matrices orthogonal in `kind`, not in bfloat16."""
    return patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.to(kind, copy=True))


def test_an_update_is_scaled_as_by_torch() -> None:
    for size in ((4, 9), (9, 4)):
        expected = _muon._adjust_lr(1.0, "match_rms_adamw", torch.Size(size))
        assert newton_schulz.update_scale(*size) == pytest.approx(expected)


def test_heads_and_experts_are_matrices(paths: dict[str, Path]) -> None:
    shape = read_model(str(paths["deepseek-v3"])).known_shape
    assert shape and shape.mla and shape.mla.q_lora_rank and shape.num_mtp_layers == 1
    mla, heads, hidden = shape.mla, shape.num_heads, shape.hidden_size
    sizes: dict[str, list[tuple[int, int, int]]] = {}
    for found in layer_matrices(shape, shape.num_layers):
        name = found.tensor.removeprefix(f"model.layers.{shape.num_layers}.")
        sizes.setdefault(name, []).append((found.count, found.rows, found.cols))
    ffn, latent, rank = shape.moe_ffn_size, mla.kv_lora_rank, mla.q_lora_rank
    expert = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    expected = {
        "self_attn.q_a_proj.weight": [(1, rank, hidden)],
        "self_attn.q_b_proj.weight": [(heads, mla.nope_dim + mla.rope_dim, rank)],
        "self_attn.kv_a_proj_with_mqa.weight": [(1, latent + mla.rope_dim, hidden)],
        "self_attn.kv_b_proj.weight": [(heads, mla.nope_dim, latent), (heads, mla.v_dim, latent)],
        "self_attn.o_proj.weight": [(1, hidden, heads * mla.v_dim)],
        "eh_proj.weight": [(1, hidden, 2 * hidden)],
    }
    expected |= {
        f"mlp.experts.{{}}.{kind}.weight": [(shape.num_experts, *size)]
        for kind, size in expert.items()
    }
    expected |= {f"mlp.shared_experts.{kind}.weight": [(1, *size)] for kind, size in expert.items()}
    assert sizes == expected


def train(trainer: Any) -> dict[str, Any]:
    return uneven_steps(trainer, UPDATES)


def run(path: Path, layout: TrainLayout, work: Any = train, *args: Any, **keys: Any) -> list[Any]:
    made = recipe(path, layout, grad_clip=1.0, weight_decay=0.1, optimizer_name="muon", **keys)
    return run_world(made, work, *args)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    changes: dict[str, dict[str, Any]] = {
        "qwen3-next": {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    }
    return {
        family: write(
            tmp_path_factory.mktemp(family),
            family,
            int(family == "deepseek-v3"),
            vocab_size=VOCAB_SIZE,
            pad_token_id=None,
            **changes.get(family, {}),
        )
        for family, _ in LAYOUTS
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=NIGHTLY.get(case[0], ())) for case in LAYOUTS],
)
def test_every_layout_learns_what_one_rank_does(
    paths: dict[str, Path], family: str, name: str
) -> None:
    """Losses, norms, gradients and weights; and the weights are those that torch's Muon and AdamW make of gradients.

    Unverified on a GPU.

    parallel/matrix_exchange.py: as in tests/gpu/test_muon.py. To check first: layouts in bfloat16, whose tolerances
    are guesses.
    """
    path = paths[family]
    keys = {"mtp_loss": 0.1} if family == "deepseek-v3" else {}
    ranks, (alone,) = (run(path, layout, **keys) for layout in (LAYOUTS[family, name], ONE_RANK))
    learning, expected = (whole([rank["learning"] for rank in world]) for world in (ranks, [alone]))
    last = next(rank["metrics"] for rank in ranks if "loss" in rank["metrics"][0])
    for own, other in zip(last, alone["metrics"], strict=True):
        assert own == pytest.approx(other, rel=within(1e-4))
    check_gradients(learning.gradients, expected.gradients, rounding=LINEAR)
    for each in (expected, learning):
        check_weights(
            path, each, getattr(torch, dtype()), rounding=within(1e-6, ROUNDING_OF_BFLOAT16)
        )
    assert learning.after and expected.after
    for tensor in matrix_rows(path):
        moved = np.abs(expected.after[tensor] - expected.before[tensor]).max()
        difference = np.abs(learning.after[tensor] - expected.after[tensor]).max()
        assert difference < within(1e-3) * moved, tensor


@pytest.mark.slow
def test_in_bfloat16_masters_are_those_of_torch(paths: dict[str, Path]) -> None:
    (learning,) = run(paths["qwen3-moe"], ONE_RANK, train_masters, dtype="bfloat16")
    check_weights(paths["qwen3-moe"], whole([learning]), torch.bfloat16)


def train_masters(trainer: Any) -> Any:
    """What one rank learns, with the float32 masters in place of the weights."""
    from megarl.parallel.optimizer import stepping
    from megarl.parallel.param_names import named_parameters
    from megarl.parallel.shard_ranges import shard_ranges, stepped

    learning = uneven_steps(trainer, UPDATES)["learning"]
    masters = {
        name: stepped(chained, param).view(param.shape)
        for chained in stepping(trainer._model.optimizer)
        for name, param in named_parameters(trainer._model._unwrapped)
        if param in shard_ranges(chained)
    }
    return replace(learning, after=rectangles(trainer, masters))


def check_weights(
    path: Path, learning: Learning[Tensors], kind: torch.dtype, rounding: float = 1e-6
) -> None:
    """Assert that the weights are those that torch's Muon makes of whole gradients, and of others torch's AdamW.

    kind: of numbers in which matrices are made orthogonal. rounding: of the weights.
    """
    blocks = matrix_rows(path)
    held = {name: torch.tensor(learning.before[name]) for name in learning.gradients[0]}
    cut = {name: [held[name][rows] for rows in blocks[name]] for name in blocks}
    plain = [held[name] for name in held if name not in blocks and not is_kept(name)]
    kept = [held[name] for name in held if name not in blocks and is_kept(name)]
    decay = learning.weight_decay
    optimizers = (
        torch.optim.Muon(sum(cut.values(), []), 0.0, decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(plain, 0.0, weight_decay=decay),
        torch.optim.AdamW(kept, 0.0, weight_decay=0.0),
    )
    updates = zip(learning.gradients, learning.rates, learning.norms, strict=True)
    for gradients, rate, norm in updates:
        clipped = min(1.0, learning.grad_clip / (norm + 1e-6))
        for name, weight in held.items():
            weight.grad = torch.tensor(gradients[name]) * clipped
            for part, rows in zip(cut.get(name, ()), blocks.get(name, ()), strict=True):
                part.grad = weight.grad[rows]
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            with in_type(kind):
                optimizer.step()
    assert learning.after
    atol = 1e-3 * sum(learning.rates)
    for name, weight in held.items():
        np.testing.assert_allclose(
            learning.after[name], weight, rtol=rounding, atol=atol, err_msg=name
        )


def is_kept(name: str) -> bool:
    """Whether a weight is not decayed."""
    return "norm" in name or name.endswith((".bias", ".dt_bias", ".A_log"))


def matrix_rows(path: Path) -> dict[str, list[slice]]:
    """By tensor of the checkpoint that Muon learns, the rows of its matrices: one for each head of attention."""
    shape = read_model(str(path)).known_shape
    assert shape is not None
    rows: dict[str, list[slice]] = {}
    for found in matrices(shape):
        starts = [found.first + unit * found.step for unit in range(found.units)]
        for item in range(found.items):
            name = found.tensor.format(item)
            cut = [slice(start, start + found.size) for start in starts]
            rows.setdefault(name, []).extend(cut)
    return rows


def save_and_go_on(trainer: Any, folder: Path) -> dict[str, Any]:
    uneven_steps(trainer, UPDATES)
    trainer._model.save(folder).finish()
    return one_more(trainer)


@pytest.mark.slow
def test_a_resumed_rank_goes_on_to_the_bit_and_other_layouts_read_the_same(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path = paths["qwen3-moe"]
    saved, then = tmp_path / "saved", tmp_path / "then"
    for folder in (saved, then):
        folder.mkdir()
    layout = TrainLayout(2, 1, 1, 2)
    went_on = run(path, layout, save_and_go_on, saved, dtype="bfloat16")
    for rank, other in zip(
        run(path, layout, load_and_go_on, saved, dtype="bfloat16"), went_on, strict=True
    ):
        assert rank["after"] == other["after"]
        assert np.array_equal(rank["state"], other["state"])
    run(path, TrainLayout(4, 2, 2, 1), load_and_save, saved, then, dtype="bfloat16")
    tensors = read_whole(saved)
    check_same(read_whole(then), tensors)
    states = {
        name.split(".")[2]
        for name in tensors
        if name.startswith("optimizer.") and name.endswith("linear_qkv.weight")
    }
    assert states == {"param", "momentum"}
