"""An exchange with the processes of a run: ranks share parameters, engines map them, agree, and are written."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megarl.device import Address, address_of, host_store, join_store
from megarl.model.lora_pairs import LoraSize
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import engine_model
from megarl.resharding.agreement import Agreement, suspects_of
from megarl.resharding.member import Member, Stats, collect_stats, conclude, exchange_suspects
from megarl.resharding.memory_handles import (
    CpuStorage,
    CudaStorage,
    ParamView,
    SourceHandles,
    map_params,
    share_params,
)
from megarl.resharding.payloads import PayloadName
from megarl.resharding.peer_copy import PeerCopy, copy_messages
from megarl.resharding.planner import Planner
from megarl.resharding.session import Session, sessions
from megarl.resharding.sglang_map import DRAFT
from megarl.rollout.sglang.weight_loader import load, send
from megarl.types import UserError
from tests.leftovers import left_since, shared_files
from tests.resharding.worlds import (
    MLA,
    MOE,
    TIMEOUT_S,
    Pair,
    Params,
    Process,
    fill,
    make_params,
    wrong_params,
)

WEIGHTS: list[PayloadName] = ["weights"]


class Model(torch.nn.Module):
    """A module whose named_parameters() has the given dotted names, and latent attention's derived tensors."""

    def __init__(self, params: Params, mla_rows: int) -> None:
        super().__init__()
        for name, tensor in params.items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
        self.mla_rows, self.forgets = mla_rows, False
        self.derive()

    def derive(self) -> None:
        """w_kc [heads, nope, rank] and w_vc [heads, rank, v] of each attention, here with as many rows each."""
        for module in self.modules() if self.mla_rows else ():
            if hasattr(module, "kv_b_proj"):
                heads = (
                    module.get_parameter("kv_b_proj.weight")
                    .detach()
                    .clone()
                    .unflatten(0, (-1, 2 * self.mla_rows))
                )
                module.w_kc, module.w_vc = (
                    heads[:, : self.mla_rows],
                    heads[:, self.mla_rows :].transpose(1, 2),
                )

    def post_load_weights(self) -> None:
        """As SGLang's; `forgets` is the fault that verification must find."""
        if not self.forgets:
            self.derive()


def trainer(pipe: Connection, pair: Pair, rank: int) -> None:
    shards = pair.source_shards(rank)
    params = make_params(shards, pair.torch_dtype)
    pipe.send(share_params(params))
    member: Member | None = None
    for order, *arguments in iter(pipe.recv, None):
        if order == "fill":
            fill(params, shards, arguments[0], pair.torch_dtype)
        elif order == "join":
            member = Member(arguments[0], params, "weights")
        elif order == "run":
            assert member is not None
            member.run(*arguments)
        pipe.send("done")


def engine_rank(
    pipe: Connection, meet: Address, pair: Pair, slot: int, dtype: str, name: str = "engine"
) -> None:
    """name: of the engine, among those that were started on its slots."""
    at = pair.engine.member(slot)
    assert at
    store = PrefixStore(f"{name}{at[0]}", join_store(meet, TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=at[1], world_size=pair.engine.tp)
    shards, mla = pair.target_shards(slot), pair.shape.mla
    models = made_models(make_params(shards, getattr(torch, dtype)), mla.nope_dim if mla else 0)
    model = engine_model.joined(models)
    for order, *arguments in iter(pipe.recv, None):
        try:
            if order == "flag":
                owner = model.get_submodule(arguments[0]) if arguments[0] else models[0]
                setattr(owner, arguments[1], True)
                pipe.send("done")
            elif order == "buffer":
                model.get_submodule(arguments[0]).register_buffer("table", torch.zeros(2))
                pipe.send("done")
            elif order == "send":
                send(models, *arguments)
                pipe.send("done")
            elif order == "starve":
                Planner.executor = starving  # type: ignore[method-assign]
                pipe.send("done")
            else:
                message = json.dumps(arguments[0]).encode()
                for called in models[: arguments[1]]:
                    load(
                        called,
                        [("session", torch.frombuffer(bytearray(message), dtype=torch.uint8))],
                    )
                version = arguments[0]["version"]
                expected = make_params(shards, pair.torch_dtype)
                pipe.send(
                    wrong_params(
                        dict(model.named_parameters()), expected, shards, version, pair.torch_dtype
                    )
                )
        except Exception as error:
            pipe.send(error)


def made_models(params: Params, mla_rows: int) -> list[Model]:
    """An engine's model, and with drafts its draft model, which has the same embedding and output layer."""
    of_draft = {name: tensor for name, tensor in params.items() if name.startswith(DRAFT)}
    target = Model(
        {name: tensor for name, tensor in params.items() if name not in of_draft}, mla_rows
    )
    if not of_draft:
        return [target]
    draft = Model({name.removeprefix(DRAFT): tensor for name, tensor in of_draft.items()}, mla_rows)
    draft.get_submodule("model").add_module(
        "embed_tokens", target.get_submodule("model.embed_tokens")
    )
    draft.add_module("lm_head", target.get_submodule("lm_head"))
    return [target, draft]


def starving(self: Planner, rounds: list[int], targets: Params) -> NoReturn:
    raise MemoryError("no room for its tables")


class World:
    """Forked training ranks and engine ranks of one pair; engine_dtype: what the engines really hold."""

    def __init__(self, pair: Pair, engine_dtype: str = "") -> None:
        assert not pair.train.errors(pair.shape) and not pair.engine.errors(
            pair.shape, pair.num_members
        )
        self.pair, self.attempt, self.store = pair, 0, host_store(TIMEOUT_S)
        self.trainers = [Process(trainer, pair, rank) for rank in range(pair.train.world_size)]
        self.engines = {
            slot: Process(
                engine_rank, address_of(self.store), pair, slot, engine_dtype or pair.dtype
            )
            for slot in range(pair.engine.first, pair.engine.end)
        }
        self.handles = [child.answer() for child in self.trainers]
        self.start()

    def start(self) -> None:
        """Hand out the sessions; the engines get theirs with the next attempt."""
        pair = self.pair
        common = Session(
            meet=address_of(self.store), run_id="test", shape=pair.shape, train=pair.train,
            engine=pair.engine, transformer_engine=pair.transformer_engine, dtype=pair.dtype,
            round_bytes=pair.round_bytes, timeout_s=TIMEOUT_S, gpus_per_node=pair.gpus_per_node,
            verify=pair.verify,
        )  # fmt: skip
        self.sessions = sessions(common, self.handles)
        # the engines that get them
        self.new_engines = {*range(pair.engine.count)}
        for rank, session in self.sessions.trainers.items():
            self.trainers[rank].ask(("join", session))

    def restart_trainer(self, rank: int) -> None:
        """Another process in the place of a training rank, which publishes other memory."""
        self.trainers[rank].end()
        self.trainers[rank] = Process(trainer, self.pair, rank)
        self.handles[rank] = self.trainers[rank].answer()
        self.start()

    def restart_engine(self, slot: int) -> None:
        """Another process in the place of an engine of one rank, without weights."""
        self.engines[slot].end()
        meet = address_of(self.store)
        self.engines[slot] = Process(
            engine_rank, meet, self.pair, slot, self.pair.dtype, f"restarted{self.attempt}-"
        )
        self.new_engines.add(slot - self.pair.engine.first)

    def fill(self, version: int) -> None:
        for child in self.trainers:
            child.send(("fill", version))
        for child in self.trainers:
            child.answer()

    def reshard(self, version: int) -> tuple[list[str], Stats]:
        """Run one exchange; the wrong parameters of all engine ranks, and the cost."""
        self.attempt += 1
        for slot, child in self.engines.items():
            at = self.pair.engine.member(slot)
            assert at
            message = self.sessions.engine_message(
                at[0], version, self.attempt, at[0] in self.new_engines, WEIGHTS
            )
            child.send(("load", message, None))
        self.new_engines.clear()
        for rank in self.sessions.trainers:
            self.trainers[rank].send(("run", version, self.attempt))
        for rank in self.sessions.trainers:
            self.trainers[rank].answer()
        wrong = [
            f"slot {slot}: {name}"
            for slot, child in self.engines.items()
            for name in child.answer()
        ]
        return wrong, collect_stats(
            self.store, "test", self.attempt, self.pair.num_members, WEIGHTS
        )

    def suspects(self) -> list[int] | None:
        """The members by which the last exchange may have failed."""
        num_members = self.pair.num_members
        return exchange_suspects(self.store, "test", self.attempt, num_members, WEIGHTS)

    def end(self) -> None:
        for child in [*self.trainers, *self.engines.values()]:
            child.end()


@contextmanager
def world(pair: Pair, engine_dtype: str = "") -> Iterator[World]:
    members = World(pair, engine_dtype)
    try:
        yield members
    finally:
        members.end()


PAIRS = {
    "a TP2 engine on two of four slots": Pair(MOE, TrainLayout(4, 2, 2, 2), EngineLayout(1, 2, 1)),
    "engines beside the training ranks": Pair(
        MOE, TrainLayout(2, 1, 2, 1), EngineLayout(2, 1, 1, first=2), "bfloat16"
    ),
    "MLA on slots partly shared": Pair(
        MLA,
        TrainLayout(2, 2, 1, 2),
        EngineLayout(1, 2, 2, first=1),
        gpus_per_node=2,
        verify="checksum",
    ),
    "MLA with a draft model": Pair(
        MLA, TrainLayout(2, 1, 2, 1), EngineLayout(1, 2, 2, draft=1), verify="full"
    ),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_published_weights_arrive(pair: Pair) -> None:
    with world(pair) as members:
        for version in (1, 1, 2):
            members.fill(version)
            wrong, stats = members.reshard(version)
            assert not wrong and stats.wire_bytes > 0


def test_a_training_rank_that_was_restarted_is_mapped_anew() -> None:
    with world(Pair(MOE, TrainLayout(2, 1, 2, 1), EngineLayout(1, 2, 1))) as members:
        members.fill(1)
        assert not members.reshard(1)[0]
        members.restart_trainer(1)
        members.fill(2)
        assert not members.reshard(2)[0]


def test_an_engine_that_was_restarted_is_copied_and_then_takes_part() -> None:
    """Its weights are those of another engine, draft model and derived tensors included, until the next reshard."""
    engine = EngineLayout(2, 1, 1, draft=1)
    with world(Pair(MLA, TrainLayout(2, 1, 2, 1), engine, verify="checksum")) as members:
        members.fill(1)
        assert not members.reshard(1)[0]
        members.restart_engine(1)
        copy = PeerCopy(
            meet=address_of(members.store), run_id="test", attempt=1, version=1, target=1, sources=(0,),
            layout=engine, verify="checksum", round_bytes=16_000, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        sources, target = copy_messages(copy)
        members.engines[0].send(("send", sources[0], 1))
        assert members.engines[1].ask(("load", {**target, "version": 1}, None)) == []
        assert members.engines[0].answer() == "done"
        members.fill(2)
        assert not members.reshard(2)[0]


def test_a_stale_target_is_seen() -> None:
    """The check itself can fail: the trainers move on and the engine does not."""
    with world(Pair(MOE, TrainLayout(1, 1, 1, 1), EngineLayout(1, 1, 1))) as members:
        members.fill(1)
        assert len(members.reshard(2)[0]) > 10


@pytest.mark.parametrize(
    ("draft", "forgetful", "wrong"),
    [
        (0, "", "model.layers.0.self_attn.w_kc"),
        (1, "", "model.layers.0.self_attn.w_kc"),
        (1, "draft", "draft.model.decoder.self_attn.w_kc"),
    ],
)
def test_derived_tensors_are_part_of_the_exchange(draft: int, forgetful: str, wrong: str) -> None:
    """An engine whose post_load_weights leaves w_kc as it was is refused, when verification is on."""
    engine = EngineLayout(1, 1, 1, draft=draft)
    with world(Pair(MLA, TrainLayout(1, 1, 1, 1), engine, verify="full")) as members:
        members.fill(1)
        assert not members.reshard(1)[0]
        members.engines[0].ask(("flag", forgetful, "forgets"))
        members.fill(2)
        with pytest.raises(RuntimeError, match=f"{wrong} differs from its kv_b_proj.weight"):
            members.reshard(2)


def test_an_update_that_ends_before_the_draft_models_turn_writes_nothing() -> None:
    """SGLang's loop over the models ends at a failure; the next attempt writes both, with nothing of the one before."""
    pair = Pair(MLA, TrainLayout(2, 1, 2, 1), EngineLayout(1, 2, 2, draft=1), verify="checksum")
    with world(pair) as members:
        members.fill(1)
        assert not members.reshard(1)[0]
        for child in members.engines.values():
            members.attempt += 1
            half = members.sessions.engine_message(
                0, version=1, attempt=members.attempt, first=False, steps=WEIGHTS
            )
            assert child.ask(("load", half, 1)) == [], "all is still what it was"
        members.fill(2)
        assert not members.reshard(2)[0]


def test_a_buffer_of_the_draft_model_alone_is_refused() -> None:
    pair = Pair(MLA, TrainLayout(1, 1, 1, 1), EngineLayout(1, 1, 1, draft=1))
    with world(pair) as members:
        members.engines[0].ask(("buffer", "draft.model.decoder"))
        with pytest.raises(
            RuntimeError, match=r"draft.model.decoder.table: a buffer of the draft model alone"
        ):
            members.reshard(1)[0]


@pytest.mark.parametrize("error", ["another type", "an unknown layout"])
def test_a_member_that_cannot_take_part_ends_all_with_its_words(error: str) -> None:
    """Member 1, the other training rank, must hear why the engine on member 0 cannot, and soon."""
    pair = Pair(MOE, TrainLayout(2, 1, 2, 1), EngineLayout(1, 1, 1))
    with world(pair, "bfloat16" if error == "another type" else "") as members:
        words = r"model\S* is torch.bfloat16, the exchange brings float32"
        if error == "an unknown layout":
            members.engines[0].ask(("flag", "model.layers.1.mlp.experts", "use_triton_kernels"))
            words = r"model.layers.1.mlp.experts: this MoE backend of SGLang \(use_triton_kernels\)"
        started = time.perf_counter()
        with pytest.raises(RuntimeError, match="reshard: member 0 cannot take part: " + words):
            members.reshard(1)
        with pytest.raises(RuntimeError, match=words):
            members.engines[0].answer()
        assert members.suspects() == [0]
        assert time.perf_counter() - started < TIMEOUT_S / 4


def test_nobody_joins_a_group_before_all_are_prepared() -> None:
    """NCCL's start waits without a bound for a member that ran out of memory on its way there; gloo's for its bound."""
    with world(Pair(MOE, TrainLayout(2, 1, 2, 1), EngineLayout(1, 1, 1))) as members:
        members.engines[0].ask(("starve",))
        started = time.perf_counter()
        with pytest.raises(
            RuntimeError,
            match=r"^reshard: member 0 failed in the exchange: no room for its tables$",
        ):
            members.reshard(1)
        with pytest.raises(MemoryError, match="no room for its tables"):
            members.engines[0].answer()
        assert members.suspects() == [0]
        assert time.perf_counter() - started < TIMEOUT_S / 4


def test_a_session_is_json() -> None:
    layouts = TrainLayout(4, 2, 2, 2, stage_layers=(3, 1)), EngineLayout(1, 2, 2, first=4)
    storages = CpuStorage(1, 2, 3), CudaStorage(("a", 1, 2, "b", 3, "c", True))
    views = {"p": ParamView(0, 1, (2, 3), (3, 1), "float32")}
    handles = [SourceHandles(storages, views)] * 4
    common = Session(
        meet=Address("127.0.0.1", 1), run_id="a", shape=MLA, train=layouts[0], engine=layouts[1],
        transformer_engine=False, dtype="bfloat16", round_bytes=1 << 20, timeout_s=1.0, gpus_per_node=4, verify="full",
        lora=LoraSize(8, 2, 16.0, ("q_proj",)),
    )  # fmt: skip
    all_sessions = sessions(common, handles)
    assert set(all_sessions.trainers) == {0, 1, 2, 3} and [
        set(engine) for engine in all_sessions.engines
    ] == [{0, 1}]
    assert all_sessions.engines[0][1].source is None and all_sessions.engines[0][1].num_members == 6
    for session in (
        all_sessions.trainers[3],
        all_sessions.engines[0][1],
        replace(all_sessions.trainers[0], source=handles[0]),
    ):
        assert Session.from_json(json.loads(json.dumps(session.to_json()))) == session
    with pytest.raises(UserError, match="engines begin at GPU 5, the training ranks end at 4"):
        sessions(replace(common, engine=replace(layouts[1], first=5)), handles)


def test_members_that_were_told_different_things_do_not_begin() -> None:
    votes = [
        {
            "inputs": {"round_bytes": "8", "version": "1"},
            "rounds": [1, 3],
            "digest": "5",
            "group": "a",
        },
        {
            "inputs": {"round_bytes": "8", "version": "1"},
            "rounds": [2, 1],
            "digest": str(2**128 - 5),
            "group": "a",
        },
    ]
    assert conclude("new", votes) == {"rounds": [2, 3], "group": "a"}
    assert conclude("new", [votes[0], {**votes[1], "group": ""}])["group"] == "new"
    with pytest.raises(RuntimeError, match="version is 1 for member 0 and 2 for member 1"):
        conclude("new", [votes[0], {**votes[1], "inputs": {"round_bytes": "8", "version": "2"}}])
    with pytest.raises(
        RuntimeError, match="the members' plans do not match: sends differ from receives"
    ):
        conclude("new", [votes[0], {**votes[1], "digest": "5"}])


def test_a_member_that_does_not_come_is_named() -> None:
    store = host_store(TIMEOUT_S)
    agreement = Agreement(store, member=1, num_members=3, timeout_s=0.2)
    with pytest.raises(
        RuntimeError, match=r"reshard: member 0, member 2 did not arrive within 0.2 s"
    ):
        agreement.reach("1/ready", {}, lambda votes: {})
    assert suspects_of(store, "1/ready", 3) == [0, 2]
    with pytest.raises(RuntimeError, match="member 0, member 2 did not arrive"):
        agreement.reach("1/ready", {}, lambda votes: {})


def onload_for(pipe: Connection) -> None:
    base = torch.arange(1_000, dtype=torch.float32)
    views = {
        "a": base[:600].view(20, 30),
        "b": base[600:].view(20, 20).t(),
        "c": torch.zeros(7, dtype=torch.bfloat16),
    }
    pipe.send(share_params(views))
    for value in iter(pipe.recv, None):
        base[0] = value
        pipe.send(float(views["c"][3]))


def test_publish_and_attach_share_memory_and_leave_no_file() -> None:
    before = shared_files()
    lender = Process(onload_for)
    try:
        handles = lender.answer()
        assert len(handles.storages) == 2
        seen = map_params(handles)
        assert left_since(before) == [], "unlinked while both processes live"
        assert seen["b"].stride() == (1, 20) and seen["b"][3, 1] == 600 + 23
        seen["c"].fill_(3)
        assert lender.ask(-5.0) == 3.0
        assert seen["a"][0, 0] == -5.0
        assert lender.process.pid
        os.kill(lender.process.pid, signal.SIGKILL)
        lender.process.join()
        assert seen["a"][0, 1] == 1.0  # the mapping outlives the lender
        with pytest.raises(
            RuntimeError, match=f"cannot map the weights of training process {lender.process.pid}"
        ):
            map_params(handles)
    finally:
        lender.end()
