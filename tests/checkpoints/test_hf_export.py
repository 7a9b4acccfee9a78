"""Checkpoints written by several processes together, from parameters filled out of another checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import PrefixStore

from megarl.checkpoints import hf_import
from megarl.checkpoints.hf_export import Export, export_hf, plan_files
from megarl.checkpoints.quantised import file_bytes
from megarl.device import Address, join_store
from megarl.model import tensors
from megarl.model.families import family_of
from megarl.model.hf_config import hf_facts, model_shape
from megarl.model.precision import Precision
from megarl.model.rope import with_rope_scaling
from megarl.model.shape import ModelShape
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import fp8, megatron_map
from megarl.resharding.shards import cells, param_table
from tests.parallel import checkpoints
from tests.parallel.worlds import TIMEOUT_S, run_ranks


def export_rank(rank: int, meet: Address, job: Export, damage: dict[int, str]) -> str:
    job = replace(job, rank=rank)
    shards = megatron_map.shards(job.shape, job.layout, rank, job.transformer_engine)
    table = {name: torch.zeros(size) for name, size in param_table(shards).items()}
    hf_import.load_hf(job.source, shards, table, wrapper=family_of(job.shape).wrapper)
    table.pop(damage.get(rank, ""), None)
    try:
        export_hf(job, table, PrefixStore("export", join_store(meet, TIMEOUT_S)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def export_ranks(rank: int, meet: Address, jobs: list[Export]) -> list[str]:
    return [export_rank(rank, meet, job, {}) for job in jobs]


def export(job: Export, damage: dict[int, str] | None = None) -> list[str]:
    """What every rank says in the end; damage: rank -> a parameter that it does not have."""
    return run_ranks(job.layout.world_size, export_rank, job, damage or {})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folders_by_key: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = f"{family}-{changes}"
        if key not in folders_by_key:
            folder = tmp_path_factory.mktemp("source")
            folders_by_key[key] = checkpoints.write(folder, family, num_hidden_layers=2, **changes)
            (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
            (folder / "pytorch_model.bin.index.json").write_text("{}", encoding="utf-8")
        return folders_by_key[key]

    return get


def job(source: Path, folder: Path, layout: TrainLayout, **changes: Any) -> Export:
    fixed = {"dtype": "float32", "gpus_per_node": 2, "timeout_s": TIMEOUT_S} | changes
    return Export(str(folder), str(source), model_shape(source), layout, 0, False, **fixed)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


SAMPLE = [  # weights that stay as they are, and some that do not
    *("lm_head.weight", "model.layers.1.mlp.gate.weight", "model.layers.2.eh_proj.weight"),
    *("model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.experts.0.down_proj.weight"),
]
CASES: dict[str, tuple[str, dict[str, Any], TrainLayout, dict[str, Any]]] = {
    "qwen3-moe tp2 pp2 ep2": ("qwen3-moe", {}, TrainLayout(4, 2, 2, 2), {"file_bytes": 150_000}),
    "deepseek with mtp tp2 pp2 ep2, in bfloat16": (
        "deepseek-v3",
        {"mtp_layers": 1},
        TrainLayout(4, 2, 2, 2),
        {"file_bytes": 200_000, "dtype": "bfloat16"},
    ),
    "kimi-k2.5 tp2 ep2, with its vision tower": (
        "kimi-k25",
        {},
        TrainLayout(2, 2, 1, 2),
        {"file_bytes": 200_000, "dtype": "float16"},
    ),
    "tied qwen3 tp2, one file": ("qwen3", {}, TrainLayout(2, 2, 1, 1), {}),
    "qwen2 pp2, with a recipe's scaling": (
        "qwen2",
        {"max_position_embeddings": checkpoints.SHORT},
        TrainLayout(2, 1, 2, 1),
        {"file_bytes": 300_000, "rope_scaling": dict(checkpoints.YARN)},
    ),
}


def is_exact(name: str) -> bool:
    """Whether a tensor is exported as it is, whatever the data type."""
    return "correction_bias" in name or name.startswith(("vision_tower.", "mm_projector."))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_checkpoint_that_the_weights_came_from(
    case: str, source: Callable[..., Path], tmp_path: Path
) -> None:
    """In the data type of the export, but for what must be exact.

    Unverified on a GPU.

    checkpoints/hf_export.py: files collected in GPU memory before they are written. To check first: the memory that
    a 4 GB file takes beside the training state.
    """
    family, changes, layout, options = CASES[case]
    original, folder = source(family, **changes), tmp_path / "out"
    export_job = job(original, folder, layout, round_bytes=65_536, **options)
    assert export(export_job) == ["done"] * layout.world_size
    expected = {
        name: tensor if is_exact(name) else tensor.to(getattr(torch, export_job.dtype))
        for name, tensor in read(original).items()
    }
    written = read(folder)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name
    files = sorted(folder.glob("*.safetensors"))
    assert hf_import.check_hf(folder, export_job.shape) == []
    if "file_bytes" not in options:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        assert len(files) > layout.world_size, "more than one wave"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    config = json.loads((folder / "config.json").read_text())
    source_config = json.loads((original / "config.json").read_text())
    if family == "kimi-k25":
        source_config["text_config"]["dtype"] = export_job.dtype
    assert config == with_rope_scaling(
        source_config | {"dtype": export_job.dtype}, export_job.rope_scaling
    )
    assert (folder / "tokenizer.json").exists()
    assert not folder.with_name("out.unfinished").exists()


OTHERS = (
    *("minimax-m2", "hy-v3", "mixtral", "qwen2-moe", "qwen3-next", "qwen3.5-moe"),
    *("glm4-moe", "glm4-moe-lite", "deepseek-v3.2"),
)


@pytest.mark.slow
def test_transformers_loads_what_is_written_of_every_other_family(tmp_path: Path) -> None:
    """One rank writes all of them: each tensor to the bit, by its own name; the loaded model gives the same logits."""
    jobs = {}
    for family in OTHERS:
        ahead = int(family in ("qwen3-next", "qwen3.5-moe"))  # which transformers leaves unread
        original = checkpoints.write(tmp_path / family, family, mtp_layers=ahead)
        out = tmp_path / f"{family}-out"
        jobs[family] = job(original, out, TrainLayout(1, 1, 1, 1), file_bytes=400_000)
    (done,) = run_ranks(1, export_ranks, list(jobs.values()))
    assert dict(zip(jobs, done, strict=True)) == dict.fromkeys(jobs, "done")
    tokens_1T = torch.arange(3, 40)[None]
    for family, written in jobs.items():
        expected, tensors_again = read(Path(written.source)), read(Path(written.folder))
        assert tensors_again.keys() == expected.keys(), family
        assert [name for name in expected if not expected[name].equal(tensors_again[name])] == []
        logits = []
        for folder in (written.source, written.folder):
            model, told = checkpoints.load(Path(folder))
            assert not told["missing_keys"] and not told["unexpected_keys"], (family, told)
            with torch.no_grad():
                logits.append(model(tokens_1T).logits)
        assert logits[0].isfinite().all(), family
        # stacks of experts are used where the file is mapped, and sums depend on the place
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5, msg=family)


MIXED = Precision("fp8", plain_last_layers=1, plain=("kv_b_proj",))


def is_quantised(name: str) -> bool:
    """In a checkpoint of 2 layers and an MTP layer, all projections that `MIXED` does not keep plain."""
    is_kept = name.startswith("model.layers.1.") or "kv_b_proj" in name
    return tensors.is_projection(name) and not is_kept


@pytest.mark.slow
def test_in_fp8_and_back(source: Callable[..., Path], tmp_path: Path) -> None:
    """In tiles, from ranks that cut them; what other ranks read of it they write again as it is, without tiles."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 160}
    original, tiles, plain = (
        source("deepseek-v3", mtp_layers=1, **sizes),
        tmp_path / "tiles",
        tmp_path / "plain",
    )
    assert (
        export(job(original, tiles, TrainLayout(4, 2, 2, 2), precision=MIXED, file_bytes=600_000))
        == ["done"] * 4
    )
    written, expected = read(tiles), {}
    for name, tensor in read(original).items():
        expected[name] = tensor
        if is_quantised(name):
            expected[name] = fp8.quantise(tensor[None])[0]
            expected[name + "_scale_inv"] = fp8.tile_scales(tensor[None])[0]
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    index = json.loads((tiles / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys()
    shape, facts = model_shape(tiles), hf_facts(tiles)
    sizes_together = sum(tensor.nbytes for tensor in written.values())
    assert index["metadata"]["total_size"] == sizes_together == file_bytes(shape, facts)
    assert hf_import.check_hf(tiles, shape) == []
    assert facts.quantisation and facts.quantisation.kind == "fp8"
    assert all(facts.quantisation.covers(name) == is_quantised(name) for name in SAMPLE)

    assert export(job(tiles, plain, TrainLayout(2, 2, 1, 1))) == ["done"] * 2
    again, config = read(plain), json.loads((plain / "config.json").read_text())
    assert "quantization_config" not in config and again.keys() == read(original).keys()
    for name in filter(is_quantised, again):
        scales = written[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, cols = again[name].shape
        assert torch.equal(again[name], written[name].float() * scales[:rows, :cols]), name


@pytest.mark.slow
def test_a_rank_that_cannot_is_heard_by_all_and_nothing_gets_the_name(
    source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    export_job = job(source("qwen3-moe"), folder, TrainLayout(2, 1, 2, 1))
    missing = "decoder.final_layernorm.weight"
    answers = export(export_job, damage={1: missing})
    assert f"{missing}: the model has no such parameter" in answers[1]
    assert "member 1 cannot export" in answers[0]
    assert missing in answers[0]
    assert not folder.exists()
    assert export(export_job) == ["done"] * 2, "the next one clears away what was left"


@pytest.mark.slow
def test_a_folder_that_exists_is_left_alone(source: Callable[..., Path], tmp_path: Path) -> None:
    answers = export(job(source("qwen3-moe"), tmp_path, TrainLayout(2, 1, 2, 1)))
    assert all("exists already" in answer for answer in answers)
    assert list(tmp_path.iterdir()) == []


def test_files_hold_every_tensor_once_and_stay_in_their_limit() -> None:
    shape = ModelShape(2, 8, 4, 2, 2, 100, num_experts=5, experts_per_token=2, moe_ffn_size=16)
    limit = 4 * 16 * 8 * 3
    files = plan_files(shape, "float32", limit)
    names = [name for file in files for shard in file for name, _ in cells(shard)]
    assert len(names) == len(set(names))
    assert set(names) == set(hf_import.hf_tensors(shape))
    for file in files:
        assert sum(shard.area * 4 for shard in file) <= limit or len(file) == 1
    assert any(shard.items == (2, 5) for file in files for shard in file), (
        "a stack is cut between experts"
    )
