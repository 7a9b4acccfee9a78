"""Every family's real Megatron model against its weight map, and against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megarl.parallel  # noqa: F401  isort: skip  (before Megatron, which the patches import)
from megarl import device
from megarl.checkpoints.hf_import import load_hf
from megarl.config import TrainConfig
from megarl.config.models import RopeScalingConfig
from megarl.cpu import megatron_patches
from megarl.device import Address
from megarl.model.families import family_of
from megarl.model.hf_config import hf_facts, model_shape
from megarl.parallel import groups, model
from megarl.parallel.local_spec import use_local_layers
from megarl.parallel.routing import Routing
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from tests.model.page_family import NAME, write_family
from tests.parallel import checkpoints as checkpoints_of_families
from tests.parallel import precision
from tests.parallel.checkpoints import SHORT, YARN, rescaled, write
from tests.parallel.precision import within
from tests.parallel.worlds import TIMEOUT_S, assign, need_gpus, ragged, recipe, run_ranks, run_world
from tests.parallel.wrapped import of_text

SPARSE, DENSE = (
    (
        *("qwen3-moe", "deepseek-v3", "kimi-k25", "glm4-moe", "glm4-moe-lite"),
        *("deepseek-v3.2", "glm-5"),
        *("minimax-m2", "hy-v3", "mixtral", "qwen2-moe", "qwen3-next", "qwen3.5-moe"),
    ),
    ("qwen3", "qwen2", "llama"),
)
# test_reference.py has the others; Moonlight is DeepSeek-V3 without a rank of queries, and without YaRN
WITH_LOGPROBS = (*DENSE, *SPARSE[2:], "glm4-moe without norms", "moonlight")
# whose sizes are divided in another way than those of the families that tests/parallel/test_parity.py has on ranks
ON_FOUR_RANKS = ("qwen3.5-moe", "kimi-k25", "glm4-moe-lite", "glm-5")
# of up to 4 ranks; the checkpoints have 4 layers and, but for DeepSeek-V3, 2 key/value heads
EVERY_LAYOUT = {
    "one rank": TrainLayout(1, 1, 1, 1),
    "uneven pp": TrainLayout(2, 1, 2, 1, stage_layers=(3, 1)),
    "vpp2": TrainLayout(2, 1, 2, 1, vpp=2),
    "uneven vpp2": TrainLayout(2, 1, 2, 1, vpp=2, stage_layers=(1, 1, 2, 0)),
    "cp2": TrainLayout(2, 1, 1, 1, cp=2),
}
SPARSE_LAYOUTS = {
    "tp2": TrainLayout(2, 2, 1, 1),
    "ep2": TrainLayout(2, 1, 1, 2),
    "tp2 ep2 etp2": TrainLayout(4, 2, 1, 2, expert_tp=2),
    "tp2 pp2 ep2": TrainLayout(4, 2, 2, 2),
}
DENSE_LAYOUTS = {"kv heads < tp4": TrainLayout(4, 4, 1, 1), "tp2 pp2": TrainLayout(4, 2, 2, 1)}
# In the others a rank loads its weights through the map, too: tests/parallel/test_parity.py and test_lora.py by day.
# Megatron's side of a block is the same in every family that has it, and each family's names are loaded by one rank
# (WITH_LOGPROBS): so a family is here by day that has a block which no family of those files has in such a layout.
BY_DAY = [("qwen3", "kv heads < tp4"), ("qwen2", "kv heads < tp4")]
BY_DAY += [("qwen3", "uneven vpp2"), ("qwen3-moe", "uneven vpp2")]
BY_DAY += [("qwen3-next", "tp2 pp2 ep2"), ("qwen3-next", "uneven vpp2")]
CASES = [
    pytest.param(
        family,
        name,
        marks=() if (family, name) in BY_DAY or device.DEVICE == "cuda" else pytest.mark.nightly,
    )
    for families, layouts in ((SPARSE, SPARSE_LAYOUTS), (DENSE, DENSE_LAYOUTS))
    for family in families
    for name in EVERY_LAYOUT | layouts
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("families")
    predicting = [
        "deepseek-v3",
        "deepseek-v3.2",
        "glm4-moe",
        "glm4-moe-lite",
        "qwen3-next",
        "qwen3.5-moe",
    ]
    mtp = dict.fromkeys(predicting, 1)
    yield {
        family: write(folder / family, family, mtp_layers=mtp.get(family, 0))
        for family in SPARSE + DENSE
    }


def load_real_model(rank: int, meet: Address, path: Path, layout: TrainLayout) -> int:
    """Build this rank's chunks and load them through the map, which proves that it describes every parameter."""
    dtype, train = model.DTYPES[precision.dtype()], TrainConfig(lr=1.0, local_layers=True)
    if device.DEVICE == "cpu":
        megatron_patches.patch_megatron()
        use_local_layers()
    else:
        torch.cuda.set_device(rank)
        model.select_layers(train, dtype)
    shape = model_shape(path)
    groups.join(device.join_store(meet, TIMEOUT_S), rank, layout, seed=1, timeout_s=TIMEOUT_S)
    config = model.transformer_config(hf_facts(path), shape, layout, dtype, train)
    params = model.params(
        model.build_chunks(config, hf_facts(path), shape, layout, rank, Routing())
    )
    shards = megatron_map.shards(shape, layout, rank, model.TRANSFORMER_ENGINE)
    load_hf(path, shards, params, wrapper=family_of(shape).wrapper)
    return len(params)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_map_describes_the_real_model(
    checkpoints: dict[str, Path], family: str, name: str
) -> None:
    layout = (EVERY_LAYOUT | SPARSE_LAYOUTS | DENSE_LAYOUTS)[name]
    need_gpus(layout.world_size)
    assert all(run_ranks(layout.world_size, load_real_model, checkpoints[family], layout))


def trainer_logprobs(trainer: Any, longest: int = 23) -> list[np.ndarray] | None:
    sequences = ragged(6, trainer.shape.vocab_size, seed=3, longest=longest)
    return trainer.token_outputs(assign(sequences, 0, 1, 2))


def transformers_logprobs(path: Path, longest: int = 23) -> list[np.ndarray]:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(of_text(path), dtype=torch.float32).eval()
    logprobs = []
    for sequence in ragged(6, hf.config.vocab_size, seed=3, longest=longest):
        tokens_T = torch.from_numpy(sequence.token_ids_T)
        with torch.no_grad():
            logp_TV = hf(tokens_T[None]).logits[0].log_softmax(-1)
        logprobs.append(
            np.concatenate([[0.0], logp_TV[:-1].gather(-1, tokens_T[1:, None])[:, 0].numpy()])
        )
    return logprobs


ROPE = checkpoints_of_families.LATENT["rope_parameters"] | {"beta_fast": 1.0, "beta_slow": 1.0}
# one group of experts, and a ramp of YaRN that begins and ends at the same frequency
KIMI_K2: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": ROPE | {"factor": 32.0},
}


@pytest.mark.slow
def test_logprobs_of_kimi_k2_equal_those_of_transformers(tmp_path: Path) -> None:
    path = write(tmp_path, "deepseek-v3", **KIMI_K2)
    check_logprobs(path, transformers_logprobs(path))


def check_logprobs(
    path: Path, expected: list[np.ndarray], layout: TrainLayout = EVERY_LAYOUT["one rank"]
) -> None:
    *_, logprobs = run_world(recipe(path, layout), trainer_logprobs)
    assert logprobs is not None
    np.testing.assert_allclose(
        np.concatenate(logprobs), np.concatenate(expected), atol=within(1e-4)
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_LOGPROBS)
def test_logprobs_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    """On one rank, which every layout equals (tests/parallel); of the other sparse families test_reference.py."""
    path = write(tmp_path, family)
    check_logprobs(path, transformers_logprobs(path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ON_FOUR_RANKS)
def test_ranks_compute_what_transformers_does(tmp_path: Path, family: str) -> None:
    path = write(tmp_path, family)
    check_logprobs(path, transformers_logprobs(path), TrainLayout(4, 2, 2, 2))


@pytest.mark.slow
def test_a_family_of_a_user_computes_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of docs/models.md, in ranks that import it by its name."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    write_family(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = dict(checkpoints_of_families.COMMON, num_experts=8, num_experts_per_tok=2)
    olmoe = OlmoeForCausalLM(OlmoeConfig(**fields))
    checkpoints_of_families.randomise(olmoe)
    olmoe.save_pretrained(tmp_path)
    plain = recipe(tmp_path, TrainLayout(2, 2, 1, 1))
    model_keys = plain.model.model_copy(update={"family": NAME})
    logprobs, *_ = run_world(plain.model_copy(update={"model": model_keys}), trainer_logprobs)
    assert logprobs is not None
    expected = np.concatenate(transformers_logprobs(tmp_path))
    np.testing.assert_allclose(np.concatenate(logprobs), expected, atol=within(1e-4))


LONG = {  # a family in a layout, with values that transformers and Megatron read beside those of a recipe
    "qwen3-moe, cp2": ("qwen3-moe", EVERY_LAYOUT["cp2"], {}),
    "qwen3, no whole frequencies": (
        "qwen3",
        EVERY_LAYOUT["one rank"],
        {"truncate": False, "beta_fast": 4.0},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_logprobs_beyond_the_length_of_pretraining(tmp_path: Path, case: str) -> None:
    """By the recipe's scaling alone, or by that of config.json where it has what recipes have no key for.

    Unverified on a GPU.

    parallel/yarn.py: YaRN's scale beside TransformerEngine. To check first: that no fused kernel of rotary positions
    runs, since it leaves the scale out.
    """
    family, layout, values = LONG[case]
    path = write(tmp_path / "short", family, max_position_embeddings=SHORT)
    scaled = rescaled(path, tmp_path / "long", {**YARN, **values})
    made = recipe(scaled if values else path, layout)
    if not values:
        model = made.model.model_copy(update={"rope_scaling": RopeScalingConfig(**YARN)})
        made = made.model_copy(update={"model": model})
    logprobs, *_ = run_world(made, trainer_logprobs, 4 * SHORT)
    expected = transformers_logprobs(scaled, 4 * SHORT)
    unscaled = transformers_logprobs(path, 4 * SHORT)
    assert logprobs is not None
    assert max(map(len, logprobs)) > 2 * SHORT
    np.testing.assert_allclose(
        np.concatenate(logprobs), np.concatenate(expected), atol=within(1e-4)
    )
    assert np.abs(np.concatenate(logprobs) - np.concatenate(unscaled)).max() > 100 * within(1e-4)
