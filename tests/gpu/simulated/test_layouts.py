"""Ranks on simulated GPUs learn what one rank on the CPU does, in every layout, with adapters too (see cuda.py).

With TransformerEngine's Python where it is installed (`bash scripts/gpu_check.sh --simulated`), else with the layers
that do without it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.placement.train_layout import TrainLayout
from tests.gpu import tiny
from tests.gpu.child import ON_CPU, Child
from tests.gpu.simulated.world import SETTINGS, World, axes, world

pytestmark = pytest.mark.slow

STEPS = 3
ADAPTED: dict[str, Any] = {"weight_decay": 0.1, "adapters": True}
LAYOUTS = {
    "one rank": TrainLayout(1, 1, 1, 1),
    "tp2": TrainLayout(2, 2, 1, 1),
    "ep2": TrainLayout(2, 1, 1, 2),
    "cp2": TrainLayout(2, 1, 1, 1, cp=2),
    "cp auto": TrainLayout(2, 1, 1, 1, max_cp=2),
    "pp2": TrainLayout(2, 1, 2, 1, stage_layers=(2, 1)),
    "tp2 ep2": TrainLayout(2, 2, 1, 2),
    "tp2 ep2 etp2": TrainLayout(4, 2, 1, 2, expert_tp=2),
    "tp2 pp2 ep2": TrainLayout(4, 2, 2, 2, stage_layers=(2, 1)),
}
BY_DAY = ("deepseek-v3", "tp2 ep2", "weights")
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
need_engine = pytest.mark.skipif(
    not HAS_ENGINE, reason="bash scripts/gpu_check.sh --simulated has TransformerEngine"
)


def marks(family: str, name: str, trained: str) -> Any:
    """tests/parallel holds all layouts of the layers that do without TransformerEngine."""
    if (family, name, trained) == BY_DAY:
        return ()
    return pytest.mark.nightly if name == "tp2 ep2" else (pytest.mark.nightly, need_engine)


CASES = [
    pytest.param(family, name, trained, marks=marks(family, name, trained))
    for family in SETTINGS
    for name in LAYOUTS
    for trained in ("weights", "adapters")
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: tiny.write(tmp_path_factory.mktemp("models") / family, family)
        for family in SETTINGS
    }


@pytest.fixture(scope="module")
def on_cpu(paths: dict[str, Path]) -> Any:
    """A function: what one rank on the CPU computes in float32 of a family's model, made once."""
    results: dict[Any, dict[str, Any]] = {}

    def expected(family: str, trained: str) -> dict[str, Any]:
        if (family, trained) not in results:
            settings = SETTINGS[family] if trained == "weights" else ADAPTED
            with Child(
                "tests.gpu.rank:Rank",
                ON_CPU,
                folder=str(paths[family]),
                dtype="float32",
                **settings,
            ) as rank:
                logprobs = rank.ask("logprobs")
                results[family, trained] = {
                    "logprobs": logprobs,
                    "steps": [rank.ask("step") for _ in range(STEPS)],
                }
        return results[family, trained]

    return expected


@pytest.mark.parametrize(("family", "name", "trained"), CASES)
def test_a_layout_learns_what_one_rank_on_the_cpu_does(
    paths: dict[str, Path], on_cpu: Any, tmp_path: Path, family: str, name: str, trained: str
) -> None:
    """With its memory lent after the first step, and a checkpoint taken and resumed after the second."""
    layout, expected = LAYOUTS[name], on_cpu(family, trained)
    settings = SETTINGS[family] if trained == "weights" else ADAPTED
    has_engines_attributes = trained == "weights"
    options = {
        **settings,
        **axes(layout),
        "dtype": "float32",
        "has_engines_attributes": has_engines_attributes,
    }
    with world(paths[family], layout.world_size, **options) as ranks:
        assert set(ranks.ask("device")) == {"cuda"}
        if trained == "weights":
            check_attributes(ranks.ask("weights"), layout)
        if layout.pp == layout.dp == 1:
            for logprobs in ranks.ask("logprobs"):
                np.testing.assert_allclose(logprobs, expected["logprobs"], atol=1e-4)
        steps = [ranks.ask("step")]
        assert all(held["on_host"] and held["pinned"] for held in ranks.ask("offload"))
        ranks.ask("onload")
        steps.append(ranks.ask("step"))
        check_resumed(ranks, tmp_path, steps)
    for step, of_cpu in zip(steps, expected["steps"], strict=True):
        check_step(step, of_cpu, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("family", SETTINGS)
def test_ranks_with_megatrons_flex_dispatcher_learn_what_one_rank_on_the_cpu_does(
    paths: dict[str, Path], on_cpu: Any, family: str
) -> None:
    """Above DeepEP's stand-in: Megatron's own code for tensors of a GPU, on its streams."""
    layout, expected = LAYOUTS["ep2"], on_cpu(family, "weights")
    options = {**SETTINGS[family], **axes(layout), "dtype": "float32"}
    flex = {"moe_token_dispatcher_type": "flex"}
    with world(paths[family], layout.world_size, megatron=flex, **options) as ranks:
        assert set(ranks.ask("device")) == {"cuda"}
        assert ranks.ask("dispatchers") == [["MoEFlexTokenDispatcher"]] * layout.world_size
        for of_cpu in expected["steps"]:
            check_step(ranks.ask("step"), of_cpu, layout)


def check_attributes(ranks: list[dict[str, list[Any]]], layout: TrainLayout) -> None:
    """By what the ranks hold: the first two are neighbours in TP, and hold a weight that is not split alike."""
    if layout.tp == 1:
        return
    for weight, (content, is_split, is_summed) in ranks[0].items():
        is_other = ".experts." in weight or content != ranks[1][weight][0]
        assert (is_split, is_summed) == (is_other, not is_other), weight


def check_resumed(ranks: World, folder: Path, steps: list[Any]) -> None:
    """Take the third step, go back to the checkpoint before it, and take it again."""
    ranks.ask("save", folder=str(folder))
    saved = ranks.ask("digest")
    steps.append(ranks.ask("step"))
    ranks.ask("load", folder=str(folder))
    assert ranks.ask("digest") == saved
    again = ranks.ask("step")
    for name in ("loss", "grad_norm"):
        assert [rank[name] for rank in again] == pytest.approx(
            [rank[name] for rank in steps[-1]], rel=1e-5
        )


def check_step(
    ranks: list[dict[str, float]], expected: dict[str, float], layout: TrainLayout
) -> None:
    """Every rank knows the norm; a loss is that of the sequences of one data-parallel rank, on its last stage."""
    at = [layout.coords(rank) for rank in range(layout.world_size)]
    ends = {coords.dp: ranks[coords.rank]["loss"] for coords in at if coords.pp == layout.pp - 1}
    assert sum(ends.values()) == pytest.approx(expected["loss"], rel=1e-3, abs=1e-6)
    for rank in ranks:
        assert rank["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "is_on_host", [False, True], ids=["optimizer on the gpu", "optimizer on the host"]
)
@pytest.mark.parametrize("name", ["one rank", "tp2 ep2"])
@pytest.mark.parametrize("family", SETTINGS)
def test_bfloat16_stays_near_the_cpus_float32(
    paths: dict[str, Path], on_cpu: Any, tmp_path: Path, family: str, name: str, is_on_host: bool
) -> None:
    """A router may choose other experts, as on a GPU: the bound is that of tests/gpu/test_rank.py."""
    layout, steps = LAYOUTS[name], []
    options = {
        **SETTINGS[family],
        **axes(layout),
        "dtype": "bfloat16",
        "optimizer_offload": is_on_host,
    }
    with world(paths[family], layout.world_size, **options) as ranks:
        for logprobs in ranks.ask("logprobs"):
            diff = np.abs(np.subtract(logprobs, on_cpu(family, "weights")["logprobs"]))
            assert diff.mean() < 0.1
        steps.append(ranks.ask("step"))
        ranks.ask("offload")
        ranks.ask("onload")
        ranks.ask("save", folder=str(tmp_path))
        saved = ranks.ask("digest")
        ranks.ask("step")
        ranks.ask("load", folder=str(tmp_path))
        assert ranks.ask("digest") == saved
    norm = on_cpu(family, "weights")["steps"][0]["grad_norm"]
    assert [rank["grad_norm"] for rank in steps[0]] == pytest.approx(
        [norm] * layout.world_size, rel=0.2
    )


@pytest.mark.nightly
@need_engine
@pytest.mark.parametrize("family", SETTINGS)
def test_transformer_engines_python_calls_its_kernels(paths: dict[str, Path], family: str) -> None:
    """Otherwise these tests would be of other layers."""
    with world(paths[family], 1, **SETTINGS[family]) as ranks:
        assert ranks.ask("has_engine") == [True]
        ranks.ask("step")
        (calls,) = ranks.ask("calls")
    used = {"generic_gemm", "te_general_grouped_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "attention"}
    assert used | {"multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"} <= calls.keys()
