"""From a real Megatron world into a real SGLang engine, held against transformers on the exported checkpoint.

The training ranks' weights are not those of the checkpoint that everyone started from. The only file of this folder
that needs SGLang.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import PrefixStore

from megarl.checkpoints.hf_export import Export, export_hf
from megarl.device import Address, address_of, host_store, join_store
from megarl.model.hf_config import model_shape
from megarl.parallel.model import TRANSFORMER_ENGINE
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.expert_places import Places
from megarl.placement.train_layout import TrainLayout
from megarl.resharding.member import Member, collect_stats
from megarl.resharding.memory_handles import SourceHandles
from megarl.resharding.session import Session, sessions
from megarl.resharding.verify import VerifyMode
from megarl.rollout.sglang.arguments import EngineSettings
from megarl.rollout.sglang.engine import Engine, EngineError
from megarl.rollout.sglang.weight_loader import places_of
from megarl.types.sampling import Sampling
from tests.parallel import checkpoints, worlds
from tests.tiny_engines import Reference, write_tokenizer

pytestmark = pytest.mark.slow

TRAIN = TrainLayout(4, 2, 2, 2)
# with the engine of each; test_matrix.py has the exchanges of others, rollout/sglang/test_families.py their engines
FAMILIES: dict[str, tuple[EngineLayout, VerifyMode]] = {
    "qwen3-moe": (EngineLayout(1, 2, 1), "full"),
    "qwen3-next": (EngineLayout(1, 2, 2), "full"),
    "deepseek-v3": (
        EngineLayout(1, 2, 2, dp=2, whole_dense=True, whole_shared=True, group_head=True),
        "checksum",
    ),
}
PROMPTS = [[3, 7, 15, 8, 18, 4], [9, 9, 9], [3, *range(20, 44), 4]]
TOLERANCE = 1e-4
TIMEOUT_S = 60.0
WORLD_S = 600.0  # how long the training ranks wait for their next order
BROKEN = RuntimeError("broken off by the test")
LAST_RANK = TRAIN.world_size - 1  # has no engine in any of the layouts


@torch.no_grad()
def perturb(weights: Iterable[torch.Tensor]) -> None:
    """Element by element, so that replicas stay replicas and a slice stays a slice."""
    for weight in weights:
        weight.mul_(0.95).add_(torch.sin(40 * weight), alpha=0.02)


def train_rank(trainer: Any, meet: Address, source: str, exported: str) -> None:
    """What each rank of the Megatron world does: export, then orders from the store until there is none."""
    store, rank = PrefixStore("test", join_store(meet, TIMEOUT_S)), trainer.rank
    params = trainer.params()
    perturb(params.values())
    store.set(f"handles/{rank}", json.dumps(asdict(trainer.handles().source)))
    job = Export(
        exported, source, trainer.shape, trainer.layout, rank, TRANSFORMER_ENGINE, "float32", 2, TIMEOUT_S,
        file_bytes=500_000, round_bytes=100_000,
    )  # fmt: skip
    export_hf(job, params, PrefixStore("export", store))
    store.set(f"exported/{rank}", "")
    members: dict[str, Member] = {}
    for number in count():
        store.wait([f"order/{number}"], timedelta(seconds=WORLD_S))
        order = json.loads(store.get(f"order/{number}"))
        if not order:
            return
        store.set(f"answer/{number}/{rank}", carry_out(order, rank, members, params))


def carry_out(
    order: dict[str, Any], rank: int, members: dict[str, Member], params: dict[str, torch.Tensor]
) -> str:
    """Nothing, or the error."""
    if order["what"] == "perturb":
        perturb(params.values())
    elif str(rank) in order["sessions"]:
        session = Session.from_json(order["sessions"][str(rank)])
        member = members.setdefault(session.run_id, Member(session, params, "weights"))
        # having said that it is ready, when the others send already
        breaks = rank == order["breaks"]
        try:
            with (
                patch.object(member.planner, "executor", side_effect=BROKEN)
                if breaks
                else nullcontext()
            ):
                member.place(places_of(order))
                member.run(order["version"], order["attempt"])
        except Exception as error:
            return str(error)
    return ""


class World:
    """A Megatron world of processes that wait for orders, and what it has exported."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, num_mtp_layers = family, int(family == "deepseek-v3")
        self.source = checkpoints.write(folder / "source", family, mtp_layers=num_mtp_layers)
        write_tokenizer(self.source)
        self.exported = folder / "exported"
        self.host = host_store(TIMEOUT_S)
        self.store = PrefixStore("test", self.host)
        self._numbers = count()
        recipe = worlds.recipe(self.source, TRAIN)
        arguments = recipe, train_rank, address_of(self.host), str(self.source), str(self.exported)
        self._failures: list[Exception] = []
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()
        self.wait("exported")
        contents = [self.store.get(f"handles/{rank}") for rank in range(TRAIN.world_size)]
        self.handles = list(map(TypeAdapter(SourceHandles).validate_json, contents))

    def _run(self, *arguments: Any) -> None:
        try:
            with patch.object(worlds, "TIMEOUT_S", WORLD_S):
                worlds.run_world(*arguments)
        except Exception as error:
            self._failures.append(error)

    def wait(self, key: str) -> list[str]:
        """What every rank has written under a key of its own; raises what has ended the world instead."""
        values = []
        for rank in range(TRAIN.world_size):
            while not self.store.check([f"{key}/{rank}"]):
                self._thread.join(timeout=0.02)
                if not self._thread.is_alive():
                    raise (
                        self._failures[0]
                        if self._failures
                        else RuntimeError("the training ranks have ended")
                    )
            values.append(self.store.get(f"{key}/{rank}").decode())
        return values

    def tell(self, **order: Any) -> str:
        """Give all ranks an order; the key of their answers."""
        number = next(self._numbers)
        self.store.set(f"order/{number}", json.dumps(order))
        return f"answer/{number}"

    def end(self) -> None:
        self.tell()
        self._thread.join(TIMEOUT_S)


class Served:
    """An engine on the slots of a world."""

    def __init__(self, world: World) -> None:
        layout, verify = FAMILIES[world.family]
        self.world, self._attempts = world, count()
        common = Session(
            meet=address_of(world.host), run_id="test", shape=model_shape(world.source), train=TRAIN,
            engine=layout, transformer_engine=TRANSFORMER_ENGINE, dtype="float32", round_bytes=200_000,
            timeout_s=TIMEOUT_S, gpus_per_node=2, verify=verify,
        )  # fmt: skip
        self.sessions = sessions(common, world.handles)
        settings = EngineSettings(
            str(world.source), layout, "float32", 3, context_tokens=128, concurrency=64, load_weights=False,
            routed_experts=True,
        )  # fmt: skip
        self.engine = Engine(settings)

    def reshard(
        self, version: int, breaks: int | None = None, places: Places | None = None
    ) -> list[str]:
        """The training ranks' answers. Raises EngineError."""
        attempt = next(self._attempts)
        trainers = {
            str(rank): session.to_json() for rank, session in self.sessions.trainers.items()
        }
        answers = self.world.tell(
            what="reshard",
            sessions=trainers,
            version=version,
            attempt=attempt,
            breaks=breaks,
            places=places,
        )
        message = self.sessions.engine_message(
            0, version, attempt, first=attempt == 0, steps=["weights"], places=places
        )
        try:
            asyncio.run(self.engine.reshard(message, version))
        finally:
            results = self.world.wait(answers)
        of_run = self.world.host, self.sessions.engines[0][0].run_id
        stats = collect_stats(*of_run, attempt, TRAIN.world_size, ["weights"])
        assert stats.wire_bytes > 0
        return results

    def diff(self, reference: Reference) -> float:
        """The largest |engine - transformers| over all sampled tokens of all prompts."""

        async def sample_all() -> list[Any]:
            return await asyncio.gather(
                *(self.engine.generate(prompt, Sampling(4, 8)) for prompt in PROMPTS)
            )

        groups = asyncio.run(sample_all())
        assert {
            part.version for group in groups for sample in group for part in sample.only_row.parts
        } == {self.engine.version}
        diffs = [
            np.abs(
                sample.only_row.engine_logp_T
                - reference.logprobs(prompt, sample.only_row.response_ids_T.tolist()).numpy()
            ).max()
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for sample in group
        ]
        return float(max(diffs))


CASES = [
    pytest.param(family, marks=pytest.mark.nightly) if family == "qwen3-next" else family
    for family in FAMILIES
]


@pytest.fixture(scope="module", params=CASES)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    train_world = World(request.param, tmp_path_factory.mktemp("end-to-end"))
    yield train_world
    train_world.end()


@pytest.fixture(scope="module")
def reference(world: World) -> Reference:
    """The exported checkpoint in transformers; it goes through the same changes as the training ranks."""
    return Reference(world.exported)


@pytest.fixture(scope="module")
def served(world: World, fork_server: None) -> Iterator[Served]:
    serving = Served(world)
    yield serving
    serving.engine.shutdown()


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_the_export_is_the_training_ranks_weights(world: World) -> None:
    """All of them: the multi-token prediction layer's too."""
    before, exported = read(world.source), read(world.exported)
    assert exported.keys() == before.keys()
    for name, weight in before.items():
        assert not torch.allclose(exported[name], weight, atol=1e-3), (
            f"{name} is still the checkpoint's"
        )
        perturb([weight])
        assert torch.allclose(exported[name], weight, atol=1e-6), name


def test_the_engine_has_the_training_ranks_weights(served: Served, reference: Reference) -> None:
    """Unverified on a GPU.

    rollout/sglang/arguments.py, placement/engine_layout.py gpu_errors: `enable_dp_attention`, fp8 engines. To check
    first: an engine of DP attention serves after a reshard; a tile that is cut is refused.

    placement/roles.py engine_layout, rollout/sglang/batch_sizes.py group_arguments: whole dense layers and shared
    experts, an output layer for each attention group, sizes of chunks and CUDA graphs by their number: SGLang's
    models have these parameters on the meta device, and a CPU engine samples with them. To check first: an engine
    of dp = tp serves after a reshard, with the logprob gap of the others; `nvidia-smi` while it reads prompts.
    """
    with pytest.raises(EngineError, match="none were resharded into it yet"):
        asyncio.run(served.engine.generate(PROMPTS[0], Sampling(1, 1)))
    assert served.reshard(version=1) == [""] * TRAIN.world_size
    assert served.engine.version == 1
    assert served.diff(reference) < TOLERANCE


def test_a_reshard_broken_off_stops_generation_and_the_next_one_mends_it(
    served: Served, reference: Reference
) -> None:
    assert set(served.world.wait(served.world.tell(what="perturb"))) == {""}
    with pytest.raises(EngineError, match="version 2 failed: tensor-parallel rank 0"):
        served.reshard(version=2, breaks=LAST_RANK)
    assert served.engine.version == 1
    with pytest.raises(EngineError, match="half-written weights"):
        asyncio.run(served.engine.generate(PROMPTS[0], Sampling(1, 1)))
    assert served.reshard(version=2) == [""] * TRAIN.world_size
    assert served.engine.version == 2
    reference_after(reference)
    assert served.diff(reference) < TOLERANCE


def test_logprobs_and_routes_are_the_same_wherever_experts_are(
    served: Served, reference: Reference
) -> None:
    """The engine's tables are written in place, from one reshard to the next; routes are of the router's numbers.

    Unverified on a GPU.

    rollout/sglang/expert_maps.py: experts in other places, which captured graphs find by tables that a reshard writes.
    To check first: logprobs of an engine with graphs after two reshards with other places, with gather and with
    DeepEP (`ep_dispatch_algorithm` static); tokens a second before and after experts have moved.
    """
    shape, version = served.sessions.engines[0][0].shape, served.engine.version
    if FAMILIES[served.world.family][0].ep == 1:
        pytest.skip("each rank has all experts")
    before = greedy_routes(served.engine)
    random = Random(0)
    for number in (1, 2):
        places = tuple(
            tuple(random.sample(range(shape.num_experts), shape.num_experts))
            for _ in range(shape.num_sparse_layers)
        )
        assert served.reshard(version + number, places=places) == [""] * TRAIN.world_size
        assert served.diff(reference) < TOLERANCE
        routes = greedy_routes(served.engine)
        # not all of them: rounding may decide between two experts
        assert (
            np.mean([(old == new).mean() for old, new in zip(before, routes, strict=True)]) > 0.95
        )


def greedy_routes(engine: Engine) -> list[Any]:
    """The sorted experts of each prompt's tokens."""
    routes = []
    for prompt in PROMPTS:
        (sample,) = asyncio.run(engine.generate(prompt, Sampling(1, 4, temperature=0.0)))
        experts_TMK = sample.only_row.routed_experts
        assert experts_TMK is not None
        routes.append(np.sort(experts_TMK[: len(prompt)]))
    return routes


def reference_after(reference: Reference) -> None:
    """The training ranks' change, in transformers' model."""
    buffers = [
        b for name, b in reference.model.named_buffers() if name.endswith("e_score_correction_bias")
    ]
    perturb([*reference.model.parameters(), *buffers])
