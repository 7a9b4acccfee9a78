"""Adapters in every layout are those of one rank: losses, gradients, and the factors after three steps from B != 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.placement.train_layout import TrainLayout
from megarl.types import UserError
from tests.parallel import adapters, test_parity
from tests.parallel.adapters import LORA, STEPS, lora_recipe
from tests.parallel.checkpoints import write
from tests.parallel.gradients import (
    DENOMINATOR,
    LR,
    VOCAB_SIZE,
    Tensors,
    check_gradients,
    check_weights,
    whole,
)
from tests.parallel.precision import within
from tests.parallel.test_parity import FLEX, LAYOUTS, LOSSES, RECOMPUTE, in_nodes_of_two, in_pairs
from tests.parallel.worlds import (
    ragged,
    recipe,
    run_world,
)

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3-moe", "deepseek-v3", "glm4-moe")
ONE_RANK = TrainLayout(1, 1, 1, 1)
OF_EXPERTS = TrainLayout(4, 1, 1, 2, expert_tp=2)
CASES = [  # of each family, composed of the axes that its layers meet
    ("qwen3-moe", LAYOUTS["tp4"]),
    ("qwen3-moe", OF_EXPERTS),
    ("deepseek-v3", LAYOUTS["tp2 ep2 etp2"]),
    ("deepseek-v3", LAYOUTS["tp2 vpp2 ep2"]),
    ("deepseek-v3", LAYOUTS["cp auto tp2 ep4"]),
    ("deepseek-v3", TrainLayout(2, 1, 2, 1, stage_layers=(0, 4))),
    ("glm4-moe", LAYOUTS["tp2 vpp2 ep2"]),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    changes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": None}
    return {
        family: write(tmp_path_factory.mktemp(family), family, **changes) for family in FAMILIES
    }


@pytest.fixture(scope="module")
def one_rank(paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {family: run(path, ONE_RANK)[0] for family, path in paths.items()}


def check(ranks: list[dict[str, Any]], layout: TrainLayout, expected: dict[str, Any]) -> None:
    """As in test_parity.py; and the factors begin equal to the last bit."""
    test_parity.check(ranks, layout, expected)
    learning, reference = whole([rank["learning"] for rank in ranks]), whole([expected["learning"]])
    for name, values in reference.before.items():
        np.testing.assert_array_equal(learning.before[name], values, err_msg=name)


def run(
    path: Path, layout: TrainLayout, lora: dict[str, Any] | None = None, **options: Any
) -> list[dict[str, Any]]:
    run_recipe = lora_recipe(
        path, layout, lora, grad_clip=1.0, weight_decay=0.1, **LOSSES, megatron=options
    )
    return run_world(run_recipe, adapters.train)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_layout_equals_one_rank(
    paths: Any, one_rank: Any, family: str, layout: TrainLayout
) -> None:
    check(run(paths[family], layout), layout, one_rank[family])


def test_recomputed_activations_change_nothing(paths: Any, one_rank: Any) -> None:
    """In one stage too, where the input of the first layer is an embedding that is frozen."""
    family, layout = "deepseek-v3", TrainLayout(2, 1, 1, 2)
    check(run(paths[family], layout, **RECOMPUTE["full"]), layout, one_rank[family])


def test_experts_exchange_under_other_micro_batches_products(paths: Any, one_rank: Any) -> None:
    family, layout = "deepseek-v3", LAYOUTS["tp2 vpp2 ep2"]
    run_recipe = lora_recipe(paths[family], layout, grad_clip=1.0, weight_decay=0.1, **LOSSES)
    check(run_world(run_recipe, in_pairs, adapters.train), layout, one_rank[family])


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_that_are_summed_while_others_are_computed(
    paths: Any, one_rank: Any, family: str
) -> None:
    """In many buckets, as on a GPU with TransformerEngine. The sum over the ranks of one expert comes after them."""
    ddp = {"overlap_grad_reduce": True, "bucket_size": 5_000}
    run_recipe = lora_recipe(
        paths[family], OF_EXPERTS, grad_clip=1.0, weight_decay=0.1, **LOSSES, ddp=ddp
    )
    check(run_world(run_recipe, adapters.train), OF_EXPERTS, one_rank[family])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", TrainLayout(4, 2, 2, 1)), ("qwen2", TrainLayout(2, 2, 1, 1))]
)
def test_dense_families(tmp_path: Path, family: str, layout: TrainLayout) -> None:
    """Qwen3's embedding is also its output layer, on two stages in two copies; Qwen2's attention has biases."""
    path = write(tmp_path, family, vocab_size=VOCAB_SIZE, pad_token_id=None)
    recipes = [
        lora_recipe(path, each, grad_clip=1.0, weight_decay=0.1) for each in (ONE_RANK, layout)
    ]
    (expected,), ranks = (run_world(run_recipe, adapters.train) for run_recipe in recipes)
    check(ranks, layout, expected)


def train_and_export(trainer: Any, out: Path) -> dict[str, Any]:
    results = adapters.train(trainer)
    trainer.export(out)
    return results


@pytest.mark.nightly
def test_multi_token_prediction_layers_stay_as_they_are(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    layout, out = LAYOUTS["tp2 pp2 ep2"], tmp_path / "hf"
    changes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": None}
    path = write(tmp_path, "deepseek-v3", mtp_layers=1, **changes)
    (expected,) = run(path, ONE_RANK)
    run_recipe = lora_recipe(path, layout, grad_clip=1.0, weight_decay=0.1, **LOSSES)
    check(run_world(run_recipe, train_and_export, out), layout, expected)
    before, after = load_file(path / "model.safetensors"), load_file(out / "model.safetensors")
    moved = {name for name, values in before.items() if not np.array_equal(after[name], values)}
    layers = {f"model.layers.{layer}." for layer in range(4)}
    assert (
        before.keys() == after.keys()
        and {name[: len("model.layers.0.")] for name in moved} == layers
    )


# by what is left without adapters: a part of fused layers, a stage, all but the down projections
TARGETS = {
    "queries and values": {"rank": 4, "targets": ["q_proj", "v_proj"]},
    "keys": {"rank": 4, "targets": ["k_proj"]},
    "experts": {"rank": 4, "experts": 2, "targets": ["gate_proj", "up_proj"]},
    "without experts": {"rank": 4, "experts": 0},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("layout", ["tp4", "tp2 pp2 ep2"])
def test_some_layers_alone(paths: Any, name: str, layout: str) -> None:
    expected = run(paths["qwen3-moe"], ONE_RANK, TARGETS[name])[0]
    check(run(paths["qwen3-moe"], LAYOUTS[layout], TARGETS[name]), LAYOUTS[layout], expected)


class Odd(torch.nn.Linear):
    """A linear layer whose parallel state is not known."""


@pytest.mark.parametrize(
    ("param", "says"),
    [
        ("decoder.linear_qkv.weight", "decoder.linear_qkv is a Odd, and adapters are for "),
        ("decoder.linear_fc1.weight3", "the model has no layer decoder.linear_fc1"),
    ],
)
def test_an_unknown_linear_layer_is_refused_by_name(param: str, says: str) -> None:
    from megarl.model.lora_pairs import LoraPair, LoraSize
    from megarl.parallel.lora import attach

    chunk, name = torch.nn.Module(), "model.layers.0.self_attn.q_proj.weight"
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList()  # type: ignore[assignment]
    chunk.decoder.linear_qkv = Odd(4, 4)
    pair = LoraPair(name, param, False, (4, 4), (0, 4), (0, 4), ((0, 0, 4),))
    with pytest.raises(UserError) as caught:
        attach([chunk], [pair], LoraSize(2, 2, 4.0, ()), seed=1)
    assert caught.value.where == "lora" and caught.value.problem.startswith(says)


def logprobs(trainer: Any) -> list[list[np.ndarray]]:
    """As it begins; with B != 0; with the adapters off."""
    sequences = [ragged(6, VOCAB_SIZE, seed=3)]
    outputs = [trainer.token_outputs(sequences)]
    if trainer._model.adapters:
        adapters.set_b(trainer)
        outputs.append(trainer.token_outputs(sequences))
        with trainer._as_reference():
            outputs.append(trainer.token_outputs(sequences))
    return outputs


def test_without_adapters_and_with_b_0_it_is_the_frozen_model(paths: Any) -> None:
    """To the last bit."""
    path, layout = paths["qwen3-moe"], LAYOUTS["tp2 ep2"]
    frozen = run_world(recipe(path, layout), logprobs)[0][0]
    first, moved, off = run_world(lora_recipe(path, layout), logprobs)[0]
    for index, expected in enumerate(frozen):
        np.testing.assert_array_equal(first[index], expected)
        np.testing.assert_array_equal(off[index], expected)
    assert not np.allclose(moved[0], frozen[0], atol=1e-3)


def test_one_rank_equals_transformers_with_factors_by_hand(paths: Any, tmp_path: Path) -> None:
    """transformers' model of the weights W + s B A: dB = s dW A^T, dA = s B^T dW, clipped and stepped by torch."""
    from safetensors.numpy import load_file, save_file

    path = paths["deepseek-v3"]
    result = run_world(
        lora_recipe(path, ONE_RANK, grad_clip=1.0, weight_decay=0.1), adapters.train
    )[0]
    learning = whole([result["learning"]])
    of_a = {values.tobytes() for name, values in learning.before.items() if ".lora_A." in name}
    assert len(of_a) == len(learning.before) / 2, "each A is drawn by its name"
    base = load_file(path / "model.safetensors")
    factors = {
        name: torch.nn.Parameter(torch.from_numpy(values.copy()))
        for name, values in learning.before.items()
    }
    optimizer = torch.optim.AdamW(
        factors.values(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1
    )
    gradients: list[Tensors] = []
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_bytes((path / "config.json").read_bytes())
    for metrics in result["metrics"]:
        deltas = {name: delta(name, factors) for name in base if a_name(name) in factors}
        assert len(deltas) == len(factors) / 2
        merged = base | {
            name: base[name] + added.detach().numpy() for name, added in deltas.items()
        }
        save_file(merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
        loss, of_weights = hf_gradient(tmp_path)
        optimizer.zero_grad()
        torch.autograd.backward(
            list(deltas.values()), [torch.from_numpy(of_weights[name]) for name in deltas]
        )
        gradients.append(
            {
                name: factor.grad.numpy().copy()
                for name, factor in factors.items()
                if factor.grad is not None
            }
        )
        norm = torch.nn.utils.clip_grad_norm_(factors.values(), 1.0)
        optimizer.step()
        expected = {"loss": loss, "grad_norm": norm.item()}
        assert {name: metrics[name] for name in expected} == pytest.approx(
            expected, rel=within(1e-4)
        )
    check_gradients(learning.gradients, gradients)
    check_weights(learning)
    assert len(result["metrics"]) == STEPS


def a_name(weight: str) -> str:
    return weight.replace(".weight", ".lora_A.weight")


def delta(weight: str, factors: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    """(alpha / rank) B A."""
    a, b = factors[a_name(weight)], factors[weight.replace(".weight", ".lora_B.weight")]
    assert len(a) == (LORA["experts"] if ".experts." in weight else LORA["rank"])
    return LORA["alpha"] / len(a) * (b @ a)


def hf_gradient(folder: Path) -> tuple[float, Tensors]:
    """The loss and its gradient of transformers' model of folder / "merged"."""
    from torch.nn.utils.rnn import pad_sequence

    from megarl.parallel.packing import Split, pack
    from tests.parallel.test_reference import gradient_of, hf_loss, hf_model

    model = hf_model(folder / "merged")
    rows = [
        pack([sequence], split=Split(), device="cpu") for sequence in ragged(14, VOCAB_SIZE, seed=3)
    ]
    logits = model(pad_sequence([row.token_ids_L for row in rows], batch_first=True)).logits
    loss = (
        torch.stack([hf_loss(logits[index], row) for index, row in enumerate(rows)]).sum()
        / DENOMINATOR
    )
    loss.backward()
    return loss.item(), gradient_of(model, folder)


def test_tokens_go_to_experts_as_by_deepep(paths: Any, one_rank: Any) -> None:
    """Each expert on two ranks, over two nodes, with parts of layers that are computed again."""
    family, layout = "deepseek-v3", LAYOUTS["tp2 ep2 etp2"]
    again = {"layernorm": 1, "mla_up_proj": 1, "mlp": 1, "shared_experts": 1}
    keys: dict[str, Any] = {"grad_clip": 1.0, "weight_decay": 0.1, **LOSSES}
    run_recipe = lora_recipe(paths[family], layout, **keys, megatron=FLEX, recompute=again)
    ranks = run_world(run_recipe, in_nodes_of_two, adapters.train)
    check(ranks, layout, one_rank[family])
