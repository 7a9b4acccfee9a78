"""Forked slots for tests of the whole exchange: parameters made from the maps, gloo between the processes.

No Ray, SGLang or Megatron. Every value encodes its tensor's name, its item, row and column and the version, so that a
wrong element anywhere is seen. The processes of a `Pool` are forked once and given one pair of layouts after another.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from megarl.device import address_of, host_store, use_loopback
from megarl.model.lora_pairs import LoraSize, factor_name
from megarl.model.shape import MlaShape, ModelShape
from megarl.model.tensors import STACK
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.expert_places import Places
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import fp8, lora_map, lora_slots, megatron_map, sglang_map
from megarl.resharding.member import Member, Stats, collect_stats
from megarl.resharding.payloads import PayloadName
from megarl.resharding.reshard_plan import Copy
from megarl.resharding.session import Session
from megarl.resharding.shards import VOCAB_TENSORS, Box, Shard, cells, param_table, views
from megarl.resharding.verify import VerifyMode
from tests import forked

TIMEOUT_S = 60.0
# the first child waits for the imports of its server, too, which may take a minute on a busy machine
ANSWER_S = 300.0
PADDING = 77.0
Params = dict[str, torch.Tensor]

MOE = ModelShape(4, 16, 8, 4, 4, 301, num_experts=8, experts_per_token=2, moe_ffn_size=64)
MLA = ModelShape(
    4, 16, 8, 8, 8, 300, 8, 2, 64, num_dense_layers=1, ffn_size=96, num_shared_experts=1, router_bias=True,
    qk_norm=False, num_mtp_layers=1, mla=MlaShape(q_lora_rank=12, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8),
)  # fmt: skip
DENSE = ModelShape(4, 16, 8, 4, 4, 200, num_dense_layers=4, ffn_size=64)
FP8_MOE = ModelShape(2, 256, 4, 2, 128, 300, 4, 2, 256)
FP8_MLA = ModelShape(
    2, 256, 4, 4, 64, 300, 4, 2, 256, num_dense_layers=1, ffn_size=256, num_shared_experts=1, router_bias=True,
    qk_norm=False, mla=MlaShape(q_lora_rank=128, kv_lora_rank=128, nope_dim=64, rope_dim=64, v_dim=64),
)  # fmt: skip


def logical(name: str, box: Box, version: int, dtype: torch.dtype) -> torch.Tensor:
    """The wanted content of a box, in integers that the dtype holds exactly."""
    code = zlib.crc32(name.encode()) + 7_919 * version
    item, row, col = (torch.arange(*extent, dtype=torch.int64) for extent in box)
    number = code + item[:, None, None] * 15_485_863 + row[:, None] * 104_729 + col * 1_299_709
    return (number % (251 if dtype == torch.bfloat16 else 1 << 24)).to(dtype)


def factor(name: str, box: Box, version: int, dtype: torch.dtype) -> torch.Tensor:
    """The content of a box of an adapter's factor: small integers, so that products and their sums are exact."""
    return logical(name, box, version, dtype) % 5 - 2


def delta(shard: Shard, version: int, dtype: torch.dtype, size: LoraSize) -> torch.Tensor:
    """What the adapters add to a shard of a weight."""
    width = (0, size.rank_of(STACK in shard.name))
    boxes = {"A": (shard.items, width, shard.cols), "B": (shard.items, shard.rows, width)}
    a, b = (
        factor(factor_name(shard.name, each), box, version, dtype) for each, box in boxes.items()
    )
    return size.scale_of(STACK in shard.name) * (b @ a)


def wanted_content(
    shard: Shard,
    version: int,
    dtype: torch.dtype,
    size: LoraSize | None = None,
    adapted: frozenset[str] = frozenset(),
) -> torch.Tensor:
    """What a shard must hold; of an fp8 engine the model's own values, quantised as a whole.

    adapted: the weights into which adapters of this size are merged.
    """
    if size and shard.name in adapted:
        return logical(shard.name, shard.box, version, dtype) + delta(shard, version, dtype, size)
    if ".lora_" in shard.name:
        scale = size.scale_of(STACK in shard.name) if size and ".lora_B." in shard.name else 1
        return scale * factor(shard.name, shard.box, version, dtype)
    if shard.dtype == "float8_e4m3fn":
        return fp8.quantise(logical(shard.name, shard.box, version, dtype))
    if shard.name.endswith(fp8.SCALE_SUFFIX):
        rows, cols = ((start * 128, stop * 128) for start, stop in (shard.rows, shard.cols))
        weight = shard.name.removesuffix(fp8.SCALE_SUFFIX)
        return fp8.tile_scales(logical(weight, (shard.items, rows, cols), version, dtype))
    return logical(shard.name, shard.box, version, dtype)


def make_params(shards: Sequence[Shard], dtype: torch.dtype) -> Params:
    """Parameters as views of one flat buffer for each type, as Megatron's are; those of the vocabulary get padding."""
    filled = [(shard, name) for shard in shards for name, _ in cells(shard)]
    dtypes = {name: getattr(torch, shard.dtype) if shard.dtype else dtype for shard, name in filled}
    vocabulary = {name for shard, name in filled if shard.name in VOCAB_TENSORS}
    single = {name for shard, name in filled if STACK not in shard.name or STACK in shard.param}
    params: Params = {}
    for stored_dtype in sorted(set(dtypes.values()), key=str):
        sizes = {
            name: size for name, size in param_table(shards).items() if dtypes[name] == stored_dtype
        }
        sizes = {
            name: (items, rows + 5 * (name in vocabulary), cols)
            for name, (items, rows, cols) in sizes.items()
        }
        lengths = [items * rows * cols for items, rows, cols in sizes.values()]
        flat = torch.full((sum(lengths),), PADDING, dtype=stored_dtype)
        for part, (name, size) in zip(flat.split(lengths), sizes.items(), strict=True):
            params[name] = part.view(size[1:] if name in single else size)
    return params


def fill(
    params: Params, shards: Sequence[Shard], version: int, dtype: torch.dtype, *adapters: Any
) -> None:
    """Write the version's content into every shard; dtype: the model's; adapters: as of `wanted_content`."""
    for shard in shards:
        content = wanted_content(shard, version, dtype, *adapters)
        places = views(params, shard.param, shard.at, shard.size)
        for place, part in zip(
            places, [content] if len(places) == 1 else content.split(1), strict=True
        ):
            place.copy_(part)


def wrong_params(
    params: Params,
    wanted: Params,
    shards: Sequence[Shard],
    version: int,
    dtype: torch.dtype,
    *adapters: Any,
) -> list[str]:
    """Names of parameters that differ from the wanted content in any bit, padding included; wanted: new ones."""
    fill(wanted, shards, version, dtype, *adapters)
    assert params.keys() == wanted.keys()
    return [name for name in params if not same_bits(params[name], wanted[name])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)))


class Process:
    """A forked child that answers over a pipe; an exception in it is raised here."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self.process, self.pipe = forked.start(guarded, work, *args)

    def send(self, message: Any) -> None:
        self.pipe.send(message)

    def answer(self) -> Any:
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError(f"child {self.process.pid} does not answer")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.answer()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def guarded(pipe: Connection, work: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    use_loopback()
    try:
        work(pipe, *args)
    except Exception as error:
        pipe.send(error)


@dataclass(frozen=True)
class Pair:
    """One training layout and one engine layout of a model."""

    shape: ModelShape
    train: TrainLayout
    engine: EngineLayout
    dtype: str = "float32"
    round_bytes: int = 16_000
    gpus_per_node: int = 16
    transformer_engine: bool = False
    verify: VerifyMode = "off"
    lora: LoraSize | None = None
    payload: PayloadName = "weights"

    @property
    def num_members(self) -> int:
        return max(self.train.world_size, self.engine.end)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def source_shards(self, slot: int) -> list[Shard]:
        inside = slot < self.train.world_size
        return (
            megatron_map.shards(self.shape, self.train, slot, self.transformer_engine)
            if inside
            else []
        )

    def factor_shards(self, slot: int) -> list[Shard]:
        if self.lora is None or slot >= self.train.world_size:
            return []
        return lora_map.shards(self.shape, self.train, slot, self.lora, self.transformer_engine)

    @property
    def sends_frozen_weights(self) -> bool:
        """Whether adapters are left out of what is sent."""
        return self.payload == "weights" and self.lora is not None and self.lora.in_slots

    @property
    def adapted(self) -> frozenset[str]:
        """The weights with adapters."""
        factors = [
            shard.name
            for slot in range(self.train.world_size)
            for shard in self.factor_shards(slot)
        ]
        return frozenset(name.replace(".lora_A.", ".") for name in factors if ".lora_A." in name)

    def target_shards(self, slot: int, places: Places | None = None) -> list[Shard]:
        at = self.engine.member(slot)
        if not at:
            return []
        if self.payload == "weights":
            return sglang_map.shards(self.shape, self.engine, at[1], places)
        assert self.lora
        parts = lora_slots.target_parts(self.shape, self.engine, self.lora)
        return [shard for part in parts if slot in part.members for shard in part.shards]

    def made_targets(self, slot: int) -> Params:
        """Parameters of an engine's rank, or all of its slots' tensors, in which the map leaves gaps of 0."""
        at = self.engine.member(slot)
        if self.payload == "weights" or not at:
            return make_params(self.target_shards(slot), self.torch_dtype)
        assert self.lora
        sizes = lora_slots.slot_sizes(self.shape, self.engine, at[1], self.lora)
        stacks = {shard.param for shard in self.target_shards(slot) if STACK in shard.name}
        targets = {name: torch.zeros(size, dtype=self.torch_dtype) for name, size in sizes.items()}
        return {name: tensor if name in stacks else tensor[0] for name, tensor in targets.items()}


class FailingGroup:
    """A process group of which this member's sends fail after `sends` of them, or kill the process."""

    def __init__(self, group: Any, sends: int, kill: bool) -> None:
        self._group, self._sends, self._kill = group, sends, kill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, *arguments: Any) -> Any:
        self.count()
        return self._group.send(*arguments)

    def count(self) -> None:
        self._sends -= 1
        if self._sends >= 0:
            return
        if self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the cable is broken")


class Slot:
    """One GPU slot of a pair, both sides in one process."""

    def __init__(self, pair: Pair, session: Session) -> None:
        self.pair, self.session, slot = pair, session, session.member
        self.source_shards = pair.source_shards(slot) + pair.factor_shards(slot)
        self.target_shards, self.adapted = pair.target_shards(slot), pair.adapted
        self.sources = make_params(self.source_shards, pair.torch_dtype)
        self.targets = pair.made_targets(slot)
        self.member = Member(session, self.sources, pair.payload)

    def fill(self, version: int) -> None:
        fill(self.sources, self.source_shards, version, self.pair.torch_dtype)

    def run(self, version: int, attempt: int) -> list[str]:
        """Exchange; the parameters that are wrong then."""
        self.member.run(version, attempt, self.targets)
        return self.wrong(version)

    def run_placed(self, version: int, attempt: int, places: Places | None) -> list[str]:
        """Exchange with experts in these places; the parameters that are wrong then."""
        self.target_shards = self.pair.target_shards(self.session.member, places)
        self.member.place(places)
        self.member.run(version, attempt, self.targets)
        return self.wrong(version)

    def wrong(self, version: int) -> list[str]:
        expected = self.pair.made_targets(self.session.member)
        adapters = () if self.pair.sends_frozen_weights else (self.pair.lora, self.adapted)
        return wrong_params(
            self.targets, expected, self.target_shards, version, self.pair.torch_dtype, *adapters
        )

    def verify(self) -> None:
        self.member.verify(self.targets)

    def streams(self) -> list[Copy]:
        """All that goes out of or comes into this slot."""
        return [
            copy
            for send_stage in self.member.planner.streams.send_stages
            for copies in send_stage.values()
            for copy in copies
        ]

    def change(self, how: Callable[[Slot], None]) -> None:
        how(self)

    def sabotage(self, sends: int, kill: bool) -> None:
        """Let the next exchange fail in the middle, at this end."""
        assert self.member._group
        failing = FailingGroup(self.member._group.process_group, sends, kill)
        self.member._group = self.member._group._replace(process_group=failing)


def slot_process(pipe: Connection) -> None:
    """Answers ("open", pair, session) and (name of a method of Slot, its arguments...) until told None."""
    slot: Slot | None = None
    for order, *arguments in iter(pipe.recv, None):
        try:
            if order == "open":
                slot = None
                slot = Slot(*arguments)
                pipe.send(None)
            else:
                pipe.send(getattr(slot, order)(*arguments))
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


class Pool:
    """Slot processes, forked once."""

    def __init__(self, size: int) -> None:
        self.slots = [Process(slot_process) for _ in range(size)]
        self.store = host_store(TIMEOUT_S)
        self.num_pairs = 0

    def open(self, pair: Pair, timeout_s: float = TIMEOUT_S) -> Opened:
        """Give the pair to the first slots."""
        errors = pair.train.errors(pair.shape) + pair.engine.errors(pair.shape, pair.num_members)
        assert not errors, "\n".join(map(str, errors))
        self.num_pairs += 1
        return Opened(self, pair, f"pair{self.num_pairs}", timeout_s)

    def revive(self, slot: int) -> None:
        """Another process in the place of one that ended."""
        self.slots[slot].end()
        self.slots[slot] = Process(slot_process)

    def end(self) -> None:
        for slot in self.slots:
            slot.end()


class Opened:
    """A pool's slots at work on one pair."""

    def __init__(self, pool: Pool, pair: Pair, run_id: str, timeout_s: float) -> None:
        self.pool, self.pair, self.run_id, self.timeout_s, self.attempt = (
            pool,
            pair,
            run_id,
            timeout_s,
            0,
        )
        self.slots = range(pair.num_members)
        for slot in self.slots:
            self.open_slot(slot)
        for slot in self.slots:
            self.pool.slots[slot].answer()

    def open_slot(self, slot: int) -> None:
        """Give the slot its part; it answers when it is ready."""
        pair = self.pair
        session = Session(
            address_of(self.pool.store), self.run_id, pair.shape, pair.train, pair.engine,
            pair.transformer_engine, pair.dtype, pair.round_bytes, self.timeout_s,
            pair.gpus_per_node, pair.verify, slot, lora=pair.lora,
        )  # fmt: skip
        self.pool.slots[slot].send(("open", pair, session))

    def ask(self, slot: int, *order: Any) -> Any:
        return self.pool.slots[slot].ask(order)

    def tell(self, *order: Any) -> list[Any]:
        """Give every slot the same order; each one's answer, an exception where it failed."""
        for slot in self.slots:
            self.pool.slots[slot].send(order)
        answers = []
        for slot in self.slots:
            try:
                answers.append(self.pool.slots[slot].answer())
            except (RuntimeError, EOFError) as error:
                answers.append(error)
        return answers

    def fill(self, version: int) -> None:
        assert self.tell("fill", version) == [None] * len(self.slots)

    def try_run(self, version: int) -> list[Any]:
        """One attempt: for each slot its wrong parameters, or the exception that it ended with."""
        self.attempt += 1
        return self.tell("run", version, self.attempt)

    def run(self, version: int) -> Stats:
        """One attempt that must bring every bit to every slot."""
        answers = self.try_run(version)
        assert answers == [[]] * len(self.slots)
        return collect_stats(
            self.pool.store, self.run_id, self.attempt, len(self.slots), [self.pair.payload]
        )
