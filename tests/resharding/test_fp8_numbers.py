"""Engines and training ranks that compute in fp8 with the same codes: log-probabilities, and bytes on the wire."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch.distributed.distributed_c10d import PrefixStore

from megarl.device import Address, address_of, host_store, join_store
from megarl.fp8.linear import weight_codes
from megarl.model.hf_config import model_shape
from megarl.model.precision import Precision
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import fp8, megatron_map
from megarl.resharding.memory_handles import SourceHandles
from megarl.resharding.session import Session, sessions
from megarl.resharding.shards import views
from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.engine import Engine
from megarl.types import TrainSequence
from megarl.types.sampling import Sampling
from tests.parallel import worlds
from tests.parallel.fp8_models import PLAIN_KINDS, fp8_recipe, write_wide
from tests.tiny_engines import write_tokenizer

pytestmark = pytest.mark.slow

TRAIN = TrainLayout(2, 2, 1, 1)
ONE_RANK = TrainLayout(1, 1, 1, 1)
ENGINES = {
    "qwen3-moe": EngineLayout(1, 2, 2),
    "deepseek-v3": EngineLayout(1, 2, 1),
}
PROMPTS = [[3, 7, 15, 8, 18, 4], [9, 9, 9], [3, *range(20, 44), 4]]
TIMEOUT_S = 60.0
START_S = 120.0
WORLD_S = 600.0
# the difference of log-probabilities where both compute in fp8, over that where the engine does alone
LARGEST_RATIO = 0.1
SCALES = "powers_of_two"


def sequence(prompt: list[int], response: list[int]) -> TrainSequence:
    token_ids_T = np.array([*prompt, *response])
    return TrainSequence(
        token_ids_T=token_ids_T,
        loss_mask_T=np.arange(len(token_ids_T)) >= len(prompt),
        loss_weight_T=np.ones(len(token_ids_T), np.float32),
        engine_logp_T=np.zeros(len(token_ids_T), np.float32),
    )


def logprobs(trainer: Any, samples: list[tuple[list[int], list[int]]]) -> list[list[float]]:
    """Of each response's tokens."""
    arrays = trainer.token_outputs([[sequence(*sample)] for sample in samples])
    return [
        array[len(prompt) :].tolist() for array, (prompt, _) in zip(arrays, samples, strict=True)
    ]


def wrong_wires(trainer: Any) -> list[str]:
    """Weights that the sender quantises to other codes than those that the rank's layers multiply with."""
    params = trainer.params()
    precision = Precision("fp8", 0, trainer._recipe.precision.plain, SCALES)
    wrong = []
    for shard in megatron_map.shards(trainer.shape, trainer.layout, trainer.rank):
        if precision.is_plain(trainer.shape, shard.name) or not shard.area:
            continue
        for number, block in enumerate(views(params, shard.param, shard.at, shard.size)):
            name = shard.param.format(shard.at[0] + number)
            _, row, col = shard.at
            rows, cols = shard.size[1:]
            used = weight_codes(params[name], SCALES)
            codes = used.values_RK[row : row + rows, col : col + cols]
            scales = used.scales[row : row + rows : 128, col // 128 : -(-(col + cols) // 128)]
            sent = fp8.quantise(block, SCALES)[0]
            same = torch.equal(codes.float(), sent.float())
            if not same or not torch.equal(scales, fp8.tile_scales(block, SCALES)[0]):
                wrong.append(shard.name)
    return wrong


def train_rank(trainer: Any, meet: Address) -> list[list[float]]:
    """Send the weights to the engine, then compute the log-probabilities of what it has sampled."""
    store = PrefixStore("test", join_store(meet, TIMEOUT_S))
    store.set(f"wrong/{trainer.rank}", json.dumps(wrong_wires(trainer)))
    store.set(f"handles/{trainer.rank}", json.dumps(asdict(trainer.handles().source)))
    store.wait(["samples"], timedelta(seconds=WORLD_S))
    return logprobs(trainer, json.loads(store.get("samples")))


class Served:
    """A world of ranks, and an engine that has its weights; both on the same slots."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.path = write_wide(folder, family)
        write_tokenizer(self.path)
        self.host = host_store(TIMEOUT_S)
        self.store = PrefixStore("test", self.host)
        self.results: list[Any] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        # the engine starts afterwards: both change the environment of this process for their children
        keys = [f"handles/{rank}" for rank in range(TRAIN.world_size)]
        self.store.wait(keys, timedelta(seconds=START_S))
        self.handles = [
            TypeAdapter(SourceHandles).validate_json(self.store.get(key)) for key in keys
        ]

    def _run(self) -> None:
        recipe = fp8_recipe(self.path, self.family, TRAIN)
        with patch.object(worlds, "TIMEOUT_S", WORLD_S):
            self.results = worlds.run_world(recipe, train_rank, address_of(self.host))

    def sample(self) -> list[tuple[list[int], list[int], list[float]]]:
        """Prompts, responses and the engine's log-probabilities, with the ranks' weights."""
        precision = Precision("fp8", 0, PLAIN_KINDS[self.family], SCALES)
        layout = replace(ENGINES[self.family], precision=precision)
        shape = model_shape(self.path)
        settings = EngineSettings(
            str(self.path), layout, "float32", 3, context_tokens=128, concurrency=64, load_weights=False,
            plain_modules=tuple(f"self_attn.{kind}" for kind in PLAIN_KINDS[self.family]),
        )  # fmt: skip
        engine = Engine(settings)
        try:
            common = Session(
                meet=address_of(self.host), run_id="test", shape=shape, train=TRAIN, engine=layout,
                transformer_engine=False, dtype="float32", round_bytes=200_000, timeout_s=TIMEOUT_S,
                gpus_per_node=2, verify="full",
            )  # fmt: skip
            made = sessions(common, self.handles)
            message = made.engine_message(0, 1, 0, first=True, steps=["weights"])
            asyncio.run(engine.reshard(message, 1))
            return asyncio.run(_samples(engine))
        finally:
            engine.shutdown()


async def _samples(engine: Engine) -> list[tuple[list[int], list[int], list[float]]]:
    groups = await asyncio.gather(*(engine.generate(prompt, Sampling(4, 12)) for prompt in PROMPTS))
    return [
        (prompt, row.response_ids_T.tolist(), row.engine_logp_T.tolist())
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for row in (sample.only_row for sample in group)
    ]


@pytest.mark.parametrize("family", ENGINES)
def test_engine_and_ranks_agree(family: str, tmp_path: Path, fork_server: None) -> None:
    """Verified byte by byte on the way; the engine's ranks are cut in another way than the training ranks.

    Against ranks that compute with plain weights beside the same engine, which is what rounding to fp8 costs.
    """
    served = Served(family, tmp_path)
    sampled = served.sample()
    samples = [(prompt, response) for prompt, response, _ in sampled]
    served.store.set("samples", json.dumps(samples))
    plain_recipe = fp8_recipe(served.path, family, ONE_RANK, numbers="plain")
    (plain,) = worlds.run_world(plain_recipe, logprobs, samples)
    served.thread.join(TIMEOUT_S)
    for rank in range(TRAIN.world_size):
        assert json.loads(served.store.get(f"wrong/{rank}")) == []
    engine = np.concatenate([logps for _, _, logps in sampled])
    in_fp8 = np.concatenate(served.results[0])
    alone = np.abs(np.concatenate(plain) - engine).mean()
    together = np.abs(in_fp8 - engine).mean()
    assert alone > 1e-3
    assert together < LARGEST_RATIO * alone
