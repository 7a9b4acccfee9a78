"""Frozen weights that engines take from a checkpoint, without an exchange, by SGLang's custom weight loader."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.checkpoints import hf_export
from megarl.checkpoints.hf_import import load_hf
from megarl.checkpoints.quantised import fp8_checkpoint
from megarl.config import PrecisionConfig
from megarl.config.models import LoraConfig
from megarl.device import Address, address_of, host_store
from megarl.model.lora_pairs import LoraSize
from megarl.model.precision import FP8_TILES
from megarl.model.quantisation import Quantisation
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import sglang_map
from megarl.resharding.memory_handles import SourceHandles
from megarl.resharding.payloads import reshard_steps
from megarl.resharding.peer_copy import TARGET, CopyMember, PeerCopy, copy_messages
from megarl.resharding.session import Session, sessions
from megarl.resharding.shards import LayoutError
from megarl.rollout.sglang import weight_loader
from tests.checkpoints.test_quantised import WHOLE_TILES, params_of, publish, weights, write
from tests.resharding.test_exchange import Model

SHAPE = dataclasses.replace(WHOLE_TILES, num_mtp_layers=0)
SIZE = LoraSize(4, 0, 8.0, ("q_b_proj",), sync="adapters")


def test_fp8_checkpoint_are_read_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the second rank of an engine of TP2 EP2: every bit is what `load_hf` reads, and no store is joined."""
    files, _ = publish(weights(SHAPE), "fp8")
    engine, rank = EngineLayout(1, 2, 2, precision=FP8_TILES), 1
    folder = str(write(tmp_path, files))
    common = Session(
        meet=Address("127.0.0.1", 1), run_id="files", shape=SHAPE, train=TrainLayout(2, 2, 1, 1), engine=engine,
        transformer_engine=False, dtype="bfloat16", round_bytes=1 << 20, timeout_s=1.0, gpus_per_node=2, verify="full",
        lora=SIZE, fp8_checkpoint=folder,
    )  # fmt: skip
    message = sessions(common, [SourceHandles((), {})] * 2).engine_message(0, 0, 1, True, ["read"])
    shards = sglang_map.shards(SHAPE, engine, rank)
    model, expected = Model(params_of(shards, torch.bfloat16), 0), params_of(shards, torch.bfloat16)
    load_hf(folder, shards, expected)
    monkeypatch.setattr(weight_loader.dist, "get_rank", lambda: rank)

    def load() -> None:
        weight_loader.load(
            model,
            [
                (
                    "session",
                    torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8),
                )
            ],
        )

    monkeypatch.setattr(weight_loader, "_begun", [])
    load()
    assert weight_loader._begun == []
    params = dict(model.named_parameters())
    assert params.keys() == expected.keys()
    for name, param in params.items():
        assert torch.equal(param.detach().view(torch.uint8), expected[name].view(torch.uint8)), name
    model.get_submodule("model").use_triton_kernels = True  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="stores experts in an unmapped layout"):
        load()
    assert weight_loader._begun == [message["version"]]


def test_weights_that_are_not_whole_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine's host knows of the update that failed here; the target hears why."""
    store = host_store(30.0)
    copy = PeerCopy(
        meet=address_of(store), run_id="part", attempt=1, version=4, target=1, sources=(0,),
        layout=EngineLayout(1, 1, 1), verify="off", round_bytes=1 << 20, timeout_s=30.0,
    )  # fmt: skip
    monkeypatch.setattr(weight_loader.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(weight_loader, "_begun", [5])
    model = Model({"weight": torch.ones(4)}, 0)
    words = "the engine has half-written weights of version 5"
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        weight_loader.send([model], copy_messages(copy)[0][0], version=4)
    with pytest.raises(RuntimeError, match=f"engine 0, TP rank 0 cannot take part: {words}"):
        CopyMember(copy, TARGET, tp_rank=0).run({"weight": torch.ones(4)}, version=4)


def test_what_a_reshard_does() -> None:
    merged = dataclasses.replace(SIZE, sync="merged")
    assert (
        reshard_steps(None, has_weights=True)
        == reshard_steps(merged, has_weights=False)
        == ["weights"]
    )
    assert reshard_steps(SIZE, has_weights=False) == ["weights", "factors"]
    assert reshard_steps(SIZE, has_weights=False, from_files=True) == ["read", "factors"]
    assert reshard_steps(SIZE, has_weights=True, from_files=True) == ["factors"]


def checkpoint_read(sync: Any, fp8: bool, quantisation: Quantisation | None) -> str | None:
    recipe: Any = SimpleNamespace(
        lora=LoraConfig(sync=sync) if sync else None,
        model=SimpleNamespace(path="published"),
        rollout=SimpleNamespace(engine=SimpleNamespace(weights="fp8" if fp8 else "plain")),
        precision=PrecisionConfig(),
        train=SimpleNamespace(numbers="plain"),
    )
    model: Any = SimpleNamespace(
        facts=SimpleNamespace(quantisation=quantisation), shape=WHOLE_TILES
    )
    return fp8_checkpoint(recipe, model)


@pytest.mark.parametrize(
    ("sync", "fp8", "kind", "excluded", "reads"),
    [
        ("adapters", True, "fp8", [], True), ("adapters", False, "fp8", [], False), ("adapters", True, None, [], False),
        ("adapters", True, "int4", [], False), ("merged", True, "fp8", [], False), (None, True, "fp8", [], False),
        ("adapters", True, "fp8", ["lm_head", "model.layers.1.mlp.gate"], True),
        ("adapters", True, "fp8", [f"model.layers.{WHOLE_TILES.num_layers}"], True),
        ("adapters", True, "fp8", ["lm_head", "model.layers.1.self_attn.o_proj"], False),
        ("adapters", True, "fp8", ["model.layers.1.mlp.experts.3"], False),
    ],
)  # fmt: skip
def test_engines_read_what_is_published_as_they_have_it(
    sync: str | None, fp8: bool, kind: Any, excluded: list[str], reads: bool
) -> None:
    """Not where they would have to quantise a matrix: then all are quantised anew. Drafts have no adapters."""
    read_from = checkpoint_read(
        sync, fp8, Quantisation(kind, excluded=tuple(excluded)) if kind else None
    )
    assert read_from == ("published" if reads else None)
    if sync == "adapters":
        steps = reshard_steps(SIZE, has_weights=False, from_files=read_from is not None)
        assert steps == ["read" if reads else "weights", "factors"]


def test_what_convert_writes_in_fp8_is_read_as_it_is() -> None:
    """It names the matrices that stay in 16 bits: routers, the output layer and MTP's eh_proj."""
    excluded = tuple(hf_export._plain_modules(WHOLE_TILES, FP8_TILES))
    assert {"lm_head", "model.layers.1.mlp.gate"} < {*excluded}
    assert checkpoint_read("adapters", True, Quantisation("fp8", excluded=excluded)) == "published"
