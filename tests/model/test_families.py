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
from megarl.cpu import megatron_patches
from megarl.device import Address
from megarl.model.hf_config import hf_facts, model_shape
from megarl.parallel import groups, model
from megarl.parallel.local_spec import use_local_layers
from megarl.parallel.routing import Routing
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import megatron_map
from tests.parallel import checkpoints as checkpoints_of_families
from tests.parallel import precision
from tests.parallel.checkpoints import write
from tests.parallel.precision import within
from tests.parallel.worlds import TIMEOUT_S, assign, need_gpus, ragged, recipe, run_ranks, run_world

SPARSE, DENSE = ("qwen3-moe", "deepseek-v3"), ("qwen3", "qwen2", "llama")
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
CASES = [(family, name) for family in SPARSE for name in EVERY_LAYOUT | SPARSE_LAYOUTS] + [
    (family, name) for family in DENSE for name in EVERY_LAYOUT | DENSE_LAYOUTS
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("families")
    mtp = {"deepseek-v3": 1}
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
    load_hf(path, megatron_map.shards(shape, layout, rank, model.TRANSFORMER_ENGINE), params)
    return len(params)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_map_describes_the_real_model(
    checkpoints: dict[str, Path], family: str, name: str
) -> None:
    layout = (EVERY_LAYOUT | SPARSE_LAYOUTS | DENSE_LAYOUTS)[name]
    need_gpus(layout.world_size)
    assert all(run_ranks(layout.world_size, load_real_model, checkpoints[family], layout))


def trainer_logprobs(trainer: Any) -> list[np.ndarray] | None:
    sequences = ragged(6, trainer.shape.vocab_size, seed=3)
    return trainer.token_outputs(
        assign(sequences, trainer.layout.coords(trainer.rank).dp, trainer.layout.dp, 2)
    )


def transformers_logprobs(path: Path, vocab_size: int) -> list[np.ndarray]:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    logprobs = []
    for sequence in ragged(6, vocab_size, seed=3):
        tokens_T = torch.from_numpy(sequence.token_ids_T)
        with torch.no_grad():
            logp_TV = hf(tokens_T[None]).logits[0].log_softmax(-1)
        logprobs.append(
            np.concatenate([[0.0], logp_TV[:-1].gather(-1, tokens_T[1:, None])[:, 0].numpy()])
        )
    return logprobs


@pytest.mark.slow
def test_routers_and_positions_of_kimi_k2(tmp_path: Path) -> None:
    """DeepSeek-V3's with one group of experts, and with a ramp of YaRN that begins and ends at the same frequency."""
    rope = checkpoints_of_families.LATENT["rope_parameters"] | {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
    }
    path = write(
        tmp_path,
        "deepseek-v3",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        rope_parameters=rope,
    )
    (logprobs,) = run_world(recipe(path, TrainLayout(1, 1, 1, 1)), trainer_logprobs)
    expected = transformers_logprobs(path, model_shape(path).vocab_size)
    assert logprobs is not None
    np.testing.assert_allclose(
        np.concatenate(logprobs), np.concatenate(expected), atol=within(1e-4)
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", SPARSE + DENSE)
def test_logprobs_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    # without multi-token prediction, which transformers does not have
    path = write(tmp_path, family)
    expected = transformers_logprobs(path, model_shape(path).vocab_size)
    ep = 2 if family in SPARSE else 1
    for layout in (TrainLayout(1, 1, 1, 1), TrainLayout(4, 2, 2, ep)):
        need_gpus(layout.world_size)
        results = run_world(recipe(path, layout), trainer_logprobs)
        for rank, logprobs in enumerate(results):
            assert (logprobs is None) == (layout.coords(rank).pp < layout.pp - 1)
            if logprobs is not None:
                np.testing.assert_allclose(
                    np.concatenate(logprobs), np.concatenate(expected), atol=within(1e-4)
                )
