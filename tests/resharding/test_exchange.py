"""The whole way with real processes: training ranks publish, engine ranks attach, plan, talk over gloo and write.

No Ray, SGLang or Megatron: the parameters are made from the maps' own tables. Every value encodes its tensor's name,
its row, its column and the version, so that a wrong element anywhere is seen.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megarl.device import host_store, join_store, use_loopback
from megarl.parallel.layout import EngineLayout, TrainLayout
from megarl.resharding import megatron_map, sglang_map
from megarl.resharding.member import Member, Session, Stats, collect_stats, load, sessions, unknown_layout
from megarl.resharding.publish import SourceHandles, attach, publish
from megarl.resharding.shards import VOCAB_TENSORS, LayoutError, Shard, param_table, rectangle
from megarl.types import ModelShape

FORK = multiprocessing.get_context("fork")  # the heavy imports are done; children use one thread
TIMEOUT_S = 60.0
TINY = ModelShape(2, 16, 8, 4, 4, 300, 4, 2, 64)
TWO_KV_HEADS = ModelShape(2, 16, 8, 2, 4, 300, 4, 2, 64)
PADDING = 77.0


def logical(name: str, rows: tuple[int, int], cols: tuple[int, int], version: int, dtype: torch.dtype) -> torch.Tensor:
    """The wanted content of a rectangle, in integers that the dtype holds exactly."""
    code = zlib.crc32(name.encode()) + 7_919 * version
    row = torch.arange(*rows, dtype=torch.int64).unsqueeze(1)
    col = torch.arange(*cols, dtype=torch.int64)
    return ((code + row * 104_729 + col * 1_299_709) % (256 if dtype == torch.bfloat16 else 1 << 24)).to(dtype)


def make_params(shards: list[Shard], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters as views of one flat buffer, as Megatron's are; vocabulary parameters get padding rows."""
    vocabulary = {shard.param for shard in shards if shard.name in VOCAB_TENSORS}
    sizes = {name: (rows + 5 * (name in vocabulary), cols) for name, (rows, cols) in param_table(shards).items()}
    flat = torch.full((sum(rows * cols for rows, cols in sizes.values()),), PADDING, dtype=dtype)
    parts = flat.split([rows * cols for rows, cols in sizes.values()])
    return {name: part.view(size) for part, (name, size) in zip(parts, sizes.items(), strict=True)}


def fill(params: dict[str, torch.Tensor], shards: list[Shard], version: int) -> None:
    for s in shards:
        part = rectangle(params[s.param], s.at, s.num_rows, s.num_cols)
        part.copy_(logical(s.name, s.rows, s.cols, version, part.dtype))


def wrong_params(params: dict[str, torch.Tensor], shards: list[Shard], version: int) -> list[str]:
    """Names of parameters that differ from the wanted content in any element, padding included."""
    wanted = make_params(shards, next(iter(params.values())).dtype)
    fill(wanted, shards, version)
    return [name for name in params if not torch.equal(params[name], wanted[name])]


class Tree(torch.nn.Module):
    """A module whose named_parameters() has the given dotted names."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in params.items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def trainer(pipe: Connection, shape: ModelShape, layout: TrainLayout, rank: int, dtype: torch.dtype) -> None:
    shards = megatron_map.shards(shape, layout, rank)
    params = make_params(shards, dtype)
    pipe.send(publish(params).to_json())
    member: Member | None = None
    for order, argument in iter(pipe.recv, None):
        if order == "fill":
            fill(params, shards, argument)
        elif order == "join":
            member = Member(Session.from_json(argument), params)
        elif order == "run":
            assert member is not None
            member.run(argument)
        pipe.send("done")


def engine_rank(
    pipe: Connection, port: int, shape: ModelShape, engine: EngineLayout, slot: int, dtype: torch.dtype
) -> None:
    index, tp_rank = divmod(slot, engine.tp)
    store = PrefixStore(f"engine{index}", join_store(port, TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=tp_rank, world_size=engine.tp)
    shards = sglang_map.shards(shape, engine, tp_rank)
    model = Tree(make_params(shards, dtype))
    for message in iter(pipe.recv, None):
        encoded = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        load(model, [("session", encoded)])
        pipe.send(wrong_params(dict(model.named_parameters()), shards, json.loads(message)["version"]))


def guarded(work: Callable[..., None], pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    use_loopback()
    try:
        work(pipe, *args)
    except Exception as error:
        pipe.send(error)


class Process:
    """A forked child that answers over a pipe; an exception in it is raised here."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self.pipe, other = FORK.Pipe()
        self.process = FORK.Process(target=guarded, args=(work, other, *args), daemon=True)
        self.process.start()
        other.close()

    def send(self, message: Any) -> None:
        self.pipe.send(message)

    def answer(self) -> Any:
        if not self.pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"child {self.process.pid} does not answer")
        found = self.pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.answer()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class World:
    """Forked training ranks and engine ranks of one layout pair."""

    def __init__(self, shape: ModelShape, train: TrainLayout, engine: EngineLayout, *dtypes: torch.dtype) -> None:
        """dtypes: of the training ranks and, if another, of the engine ranks."""
        dtype, engine_dtype = dtypes[0], dtypes[-1]
        assert not train.faults(shape) and not engine.faults(shape, train.world_size)
        self.engine, self.size, self.store = engine, train.world_size, host_store(TIMEOUT_S)
        port = self.store.port
        self.trainers = [Process(trainer, shape, train, rank, dtype) for rank in range(train.world_size)]
        self.engines = [Process(engine_rank, port, shape, engine, slot, engine_dtype) for slot in range(engine.slots)]
        self.handles = [SourceHandles.from_json(child.answer()) for child in self.trainers]
        self.options: dict[str, Any] = {
            "store_port": port,
            "run_id": "test",
            "shape": shape,
            "train": train,
            "engine": engine,
            "transformer_engine": False,
            "dtype": str(dtype).removeprefix("torch."),
            "timeout_s": TIMEOUT_S,
        }

    def start(self, round_bytes: int) -> None:
        self.sessions = sessions(self.handles, round_bytes=round_bytes, **self.options)
        for slot, session in self.sessions.trainers.items():
            self.trainers[slot].ask(("join", json.loads(json.dumps(session.to_json()))))

    def fill(self, version: int) -> None:
        for child in self.trainers:
            child.send(("fill", version))
        for child in self.trainers:
            child.answer()

    def reshard(self, version: int, first: bool) -> tuple[list[str], Stats]:
        """Run one exchange; the wrong parameters of all engine ranks, and the cost."""
        for slot, child in enumerate(self.engines):
            message = self.sessions.engine_message(slot // self.engine.tp, version, first)
            child.send(json.dumps(message).encode())
        for slot in self.sessions.trainers:
            self.trainers[slot].send(("run", version))
        for slot in self.sessions.trainers:
            self.trainers[slot].answer()
        wrong = [f"slot {slot}: {name}" for slot, child in enumerate(self.engines) for name in child.answer()]
        return wrong, collect_stats(self.store, "test", version, self.size)

    def end(self) -> None:
        for child in self.trainers + self.engines:
            child.end()


@contextmanager
def world(*args: Any) -> Iterator[World]:
    made = World(*args)
    try:
        yield made
    finally:
        made.end()


PAIRS = {
    "tp2 pp2 ep2 -> one tp2 engine on 4 slots": (TINY, TrainLayout(4, 2, 2, 2), EngineLayout(1, 2, 1)),
    "tp2 pp2 ep2 -> two tp2 engines": (TINY, TrainLayout(4, 2, 2, 2), EngineLayout(2, 2, 2)),
    "dp2 -> two tp1 engines": (TINY, TrainLayout(2, 1, 1, 1), EngineLayout(2, 1, 1)),
    "dp2 -> one tp2 ep2 engine": (TINY, TrainLayout(2, 1, 1, 1), EngineLayout(1, 2, 2)),
    "tp2 with split experts -> tp1": (TINY, TrainLayout(2, 2, 1, 1), EngineLayout(1, 1, 1)),
    "pp2 -> tp4 ep2 with replicated kv heads": (TWO_KV_HEADS, TrainLayout(4, 1, 2, 2), EngineLayout(1, 4, 2)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_every_byte_arrives(pair: tuple[ModelShape, TrainLayout, EngineLayout]) -> None:
    with world(*pair, torch.float32) as made:
        made.fill(1)
        made.start(round_bytes=9_000)
        wrong, stats = made.reshard(1, first=True)
        assert not wrong
        wrong, _ = made.reshard(1, first=False)
        assert not wrong
        num_keys = made.store.num_keys()
        made.fill(2)
        wrong, again = made.reshard(2, first=False)
        assert not wrong
        assert made.store.num_keys() == num_keys  # a long run does not fill the store
        assert (again.wire_bytes, again.local_bytes) == (stats.wire_bytes, stats.local_bytes)
        targets = [sglang_map.shards(pair[0], pair[2], slot % pair[2].tp) for slot in range(pair[2].slots)]
        assert stats.wire_bytes + stats.local_bytes == 4 * sum(shard.area for part in targets for shard in part)


def test_bfloat16_in_one_large_round() -> None:
    with world(TINY, TrainLayout(2, 1, 2, 1), EngineLayout(1, 2, 1), torch.bfloat16) as made:
        made.fill(1)
        made.start(round_bytes=1 << 29)
        assert made.reshard(1, first=True)[0] == []


def test_a_stale_target_is_seen() -> None:
    """The check itself can fail: the trainers move on and the engine does not."""
    engine = EngineLayout(1, 1, 1)
    with world(TINY, TrainLayout(1, 1, 1, 1), engine, torch.float32) as made:
        made.fill(1)
        made.start(round_bytes=9_000)
        assert len(made.reshard(2, first=True)[0]) == len(param_table(sglang_map.shards(TINY, engine, 0)))


def test_a_member_that_cannot_take_part_ends_all_with_its_words() -> None:
    """The engine of member 0 holds another dtype; member 1, the other training rank, must hear why, and soon."""
    train, engine = TrainLayout(2, 1, 2, 1), EngineLayout(1, 1, 1)
    with world(TINY, train, engine, torch.float32, torch.bfloat16) as made:
        made.start(round_bytes=9_000)
        started = time.perf_counter()
        with pytest.raises(RuntimeError, match="member 0 cannot take part: model.* is torch.bfloat16"):
            made.reshard(1, first=True)
        with pytest.raises(LayoutError, match="is torch.bfloat16, the exchange is of float32"):
            made.engines[0].answer()
        assert time.perf_counter() - started < TIMEOUT_S / 4


@pytest.mark.parametrize("damage", ["use_triton_kernels", "use_flashinfer_trtllm_moe", "load_up_proj_weight_first"])
def test_unknown_moe_layouts_are_refused(damage: str) -> None:
    model = Tree({"layers.0.experts.w13_weight": torch.zeros(1, 2, 3)})
    experts = model.get_submodule("layers.0.experts")
    experts.quant_method = SimpleNamespace(load_up_proj_weight_first=False)  # type: ignore[assignment]
    assert unknown_layout(model) is None
    setattr(experts.quant_method if damage == "load_up_proj_weight_first" else experts, damage, True)
    assert "layers.0.experts" in str(unknown_layout(model))


def shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def lend(pipe: Connection) -> None:
    base = torch.arange(1_000, dtype=torch.float32)
    views = {"a": base[:600].view(20, 30), "b": base[600:].view(20, 20).t(), "c": torch.zeros(7, dtype=torch.bfloat16)}
    pipe.send(publish(views).to_json())
    for value in iter(pipe.recv, None):
        base[0] = value
        pipe.send(float(views["c"][3]))


def test_publish_and_attach_share_memory_and_leave_no_file() -> None:
    before = shared_memory_files()
    lender = Process(lend)
    try:
        handles = SourceHandles.from_json(json.loads(json.dumps(lender.answer())))
        assert len(handles.storages) == 2
        seen = attach(handles)
        assert shared_memory_files() == before  # unlinked while both processes live
        assert seen["b"].stride() == (1, 20) and seen["b"][3, 1] == 600 + 23
        seen["c"].fill_(3)
        assert lender.ask(-5.0) == 3.0
        assert seen["a"][0, 0] == -5.0
        assert lender.process.pid
        os.kill(lender.process.pid, signal.SIGKILL)
        lender.process.join()
        assert seen["a"][0, 1] == 1.0  # the mapping outlives the lender
        assert shared_memory_files() == before
        with pytest.raises(RuntimeError, match=f"cannot map the weights of training process {lender.process.pid}"):
            attach(handles)
    finally:
        lender.end()
