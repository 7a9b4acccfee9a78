"""Outputs of layers in real Megatron worlds against those of one rank: clean, and with errors that are planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megarl.commands.compare_layers import chosen_experts
from megarl.model.hf_config import model_shape
from megarl.numerics import operations
from megarl.numerics.differences import Difference, compare, first_difference
from megarl.numerics.parts import StoredPart, read_parts
from megarl.placement.train_layout import TrainLayout
from megarl.types import IntArray
from tests.parallel import checkpoints
from tests.parallel.precision import dtype
from tests.parallel.worlds import recipe, run_world

pytestmark = pytest.mark.slow

ONE_RANK = TrainLayout(1, 1, 1, 1)
LENGTHS = (3, 12, 1, 8)


class Fault(NamedTuple):
    """A planted error: in the weight of a rank whose name ends so, and what is to be named."""

    weight: str
    rank: int
    layer: int
    operation: str
    ranks: tuple[int, ...]
    deviating: tuple[int, ...] = ()


def sequences() -> list[IntArray]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, checkpoints.COMMON["vocab_size"], length) for length in LENGTHS]


def record(trainer: Any, folder: Path, faults: Mapping[str, tuple[str, int]]) -> None:
    """Without an error into `clean`, then with each into a folder of its name."""
    from megarl.training.calls import RecordLayersCall

    trainer.record_layers(RecordLayersCall(folder / "clean", sequences(), num_terms=2))
    for name, (weight, rank) in faults.items():
        params = trainer.params()
        (found,) = [params[key] for key in params if key.endswith(weight)] or [torch.zeros(())]
        kept = found.clone()
        if trainer.rank == rank:
            assert found.dim()
            # a row alone, which a mean over everything would hide
            found[0] *= 1.5
        trainer.record_layers(RecordLayersCall(folder / name, sequences(), num_terms=2))
        found.copy_(kept)


def recorded(
    path: Path, folder: Path, layout: TrainLayout, faults: Mapping[str, tuple[str, int]]
) -> Callable[[str], list[StoredPart]]:
    for name in ("clean", *faults):
        (folder / name).mkdir(parents=True)
    run_world(recipe(path, layout), record, folder, faults)

    def parts(name: str) -> list[StoredPart]:
        files = sorted((folder / name).iterdir())
        assert len(files) == layout.world_size
        return [part for file in files for part in read_parts(file)]

    return parts


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[StoredPart]]]:
    """Each family's checkpoint, and what one rank gives."""
    found = {}
    for family in ("qwen3-moe", "deepseek-v3"):
        folder = tmp_path_factory.mktemp(family)
        path = checkpoints.write(folder, family)
        found[family] = path, recorded(path, folder / "one", ONE_RANK, {})("clean")
    return found


# of experts rank 0 has the first half, rank 1 the other
IN_TP = [
    Fault("layers.1.input_layernorm.weight", 1, 1, operations.INPUT_NORM, (1,)),
    Fault("layers.1.self_attention.linear_proj.weight", 1, 1, operations.ATTENTION, (1,)),
    Fault("layers.2.mlp.router.weight", 0, 2, operations.ROUTER_LOGITS, (0,)),
    Fault("layers.2.mlp.experts.local_experts.1.linear_fc1.weight", 1, 2, operations.EXPERTS, (0, 1)),
]  # fmt: skip
IN_QWEN = [
    Fault("layers.0.self_attention.linear_qkv.weight", 1, 0, operations.QUERY, (1,)),
    Fault("layers.1.self_attention.k_layernorm.weight", 0, 1, operations.KEY, (0,)),
]
IN_DEEPSEEK = [
    Fault("layers.0.mlp.linear_fc2.weight", 0, 0, operations.MLP, (0,)),
    Fault("layers.1.self_attention.kv_layernorm.weight", 1, 1, operations.KEY_VALUE_LATENT, (1,)),
    Fault("layers.3.mlp.shared_experts.linear_fc2.weight", 1, 3, operations.SHARED_EXPERTS, (1,)),
]
CASES: dict[str, tuple[str, TrainLayout, list[Fault]]] = {
    "qwen3-moe tp2 ep2": ("qwen3-moe", TrainLayout(2, 2, 1, 2), IN_TP + IN_QWEN),
    "deepseek-v3 tp2 ep2": ("deepseek-v3", TrainLayout(2, 2, 1, 2), IN_TP + IN_DEEPSEEK),
    "pp2 vpp2": (
        "deepseek-v3",
        TrainLayout(2, 1, 2, 1, vpp=2),
        # the second of two layers of rank 1, which Megatron numbers anew in each chunk
        [Fault("vpp1.decoder.layers.0.pre_mlp_layernorm.weight", 1, 3, operations.MLP_NORM, (1,))],
    ),
    "cp2 dp2": (
        "qwen3-moe",
        TrainLayout(4, 1, 1, 1, cp=2),
        [Fault("layers.3.mlp.router.weight", 3, 3, operations.ROUTER_LOGITS, (3,), (3,))],
    ),
    "cp auto": ("qwen3-moe", TrainLayout(2, 1, 1, 1, max_cp=2), []),
}


@pytest.mark.parametrize("name", CASES)
def test_planted_errors_are_named(one_rank: dict[str, Any], tmp_path: Path, name: str) -> None:
    """And nothing differs without one.

    Unverified on a GPU.

    parallel/layer_outputs.py: the hooks on TransformerEngine's modules, which fuse norms into linear layers.
    rollout/sglang/layer_outputs.py: the hooks on SGLang's modules where kernels fuse operations. To check first: that
    the table of `megarl compare-layers` has all operations but the norms that are fused, in bfloat16, and agrees.
    """
    family, layout, faults = CASES[name]
    path, expected = one_rank[family]
    named = {str(number): fault[:2] for number, fault in enumerate(faults)}
    parts = recorded(path, tmp_path, layout, named)
    differences = compare(parts("clean"), expected, dtype())
    assert first_difference(differences) is None
    assert {(each.layer, each.operation) for each in differences} == {
        (part.layer, part.operation) for part in expected if part.operation in operations.ORDER
    }
    assert min(each.num_tokens for each in differences) == sum(LENGTHS) - len(LENGTHS)
    for number, fault in enumerate(faults):
        difference = first_difference(compare(parts(str(number)), expected, dtype()))
        check(difference, fault)


def check(difference: Difference | None, fault: Fault) -> None:
    assert difference, fault
    assert (difference.layer, difference.operation) == (fault.layer, fault.operation)
    assert difference.ranks[0] == fault.ranks
    assert difference.deviating == (fault.deviating, ())
    if fault.operation == operations.EXPERTS:
        # experts 4 to 7 are those of rank 1; DeepSeek-V3 chooses groups of two here, which have the same tokens
        assert difference.experts in ((5,), (4, 5))


def record_replaying(trainer: Any, folder: Path, experts: list[np.ndarray] | None) -> None:
    from megarl.training.calls import RecordLayersCall

    trainer.record_layers(RecordLayersCall(folder, sequences(), experts))


def test_layouts_agree_in_bfloat16_where_experts_are_replayed(
    one_rank: dict[str, Any], tmp_path: Path
) -> None:
    """Whose choice rounding would otherwise change here and there; that of a wrong expert shows."""
    path, _ = one_rank["deepseek-v3"]
    shape = model_shape(path)

    def outputs(
        name: str, layout: TrainLayout, experts: list[np.ndarray] | None
    ) -> list[StoredPart]:
        folder = tmp_path / name
        folder.mkdir()
        run_world(recipe(path, layout, dtype="bfloat16"), record_replaying, folder, experts)
        return [part for file in sorted(folder.iterdir()) for part in read_parts(file)]

    expected = outputs("one", ONE_RANK, None)
    chosen = chosen_experts(expected, shape, sum(LENGTHS))
    assert chosen is not None
    experts = np.split(chosen, np.cumsum(LENGTHS)[:-1])
    layout = TrainLayout(2, 2, 1, 2)
    assert first_difference(compare(outputs("two", layout, experts), expected, "bfloat16")) is None
    others = [(of_sequence + 1) % shape.num_experts for of_sequence in experts]
    difference = first_difference(compare(outputs("other", layout, others), expected, "bfloat16"))
    assert difference and difference.operation == operations.ROUTER_WEIGHTS
