"""Adapters in PEFT's format: PEFT computes with them what the merged weights do, and what does not fit is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints import peft
from megarl.model.hf_config import model_shape
from megarl.model.lora_pairs import LoraSize, weight_of
from megarl.resharding.shards import Shard
from tests.parallel import checkpoints

SIZE = LoraSize(4, 4, 6.0, ())
# adapters of experts that PEFT loads
LOADED = [("down_proj",), ("gate_proj", "up_proj", "down_proj")]
LOST = [
    *(("gate_proj", "up_proj"), ("gate_proj",), ("up_proj",)),
    *(("gate_proj", "down_proj"), ("up_proj", "down_proj")),
]
EXPERTS = [f"model.layers.1.mlp.experts.0.{name}.lora_A.weight" for name in LOADED[1]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("llama", "qwen3-moe", "deepseek-v3")
    return {
        name: checkpoints.write(
            tmp_path_factory.mktemp(name), name, vocab_size=200, pad_token_id=None
        )
        for name in families
    }


def factors_of(path: Path, size: LoraSize) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = peft._sizes(model_shape(path), size)
    return {name: 0.1 * torch.randn(extent, generator=generator) for name, extent in sizes.items()}


def merged(path: Path, factors: dict[str, torch.Tensor], size: LoraSize, out: Path) -> Path:
    """The model's folder with the adapters merged into its weights, by hand."""
    weights = load_file(path / "model.safetensors")
    for name in (name for name in factors if ".lora_A." in name):
        scale = size.alpha / (size.expert_rank if ".experts." in name else size.rank)
        weights[weight_of(name)] += (
            scale * factors[name.replace("lora_A", "lora_B")] @ factors[name]
        )
    out.mkdir()
    (out / "config.json").write_text((path / "config.json").read_text())
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_adapters_of_a_model_with_a_vision_tower_are_named_as_its_files(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "model", "kimi-k25")
    factors = factors_of(path, SIZE)
    adapters = tmp_path / "adapters"
    peft.write(factors, model_shape(path), SIZE, str(path), adapters)
    assert peft.check(str(adapters), model_shape(path), SIZE) == []
    names = load_file(adapters / "adapter_model.safetensors").keys()
    assert names == {f"base_model.model.language_model.{name}" for name in factors}
    name = min(factors)
    (rows, cols) = factors[name].shape
    shards = [Shard(name, (0, rows), (0, cols), name)]
    read = {name: torch.zeros_like(factors[name])}
    peft.load(str(adapters), model_shape(path), shards, read)
    assert read[name].equal(factors[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama", SIZE),
        ("qwen3-moe", SIZE),
        ("qwen3-moe", replace(SIZE, expert_rank=2)),
        ("qwen3-moe", replace(SIZE, expert_rank=0, targets=("q_proj", "v_proj"))),
        ("deepseek-v3", replace(SIZE, expert_rank=0, targets=("q_a_proj", "kv_b_proj", "o_proj"))),
    ],
    ids=["dense", "experts", "experts of another rank", "without experts", "latent attention"],
)
def test_peft_computes_what_the_merged_weights_do(
    paths: dict[str, Path], tmp_path: Path, family: str, size: LoraSize
) -> None:
    path = paths[family]
    factors = factors_of(path, size)
    peft.write(factors, model_shape(path), size, str(path), tmp_path / "adapters")
    tokens = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(1))
    folders = path, merged(path, factors, size, tmp_path / "hf")
    base, expected = (checkpoints.load(folder)[0](tokens).logits for folder in folders)
    model: Any = checkpoints.load(path)[0]
    model.load_adapter(str(tmp_path / "adapters"))
    logits = model(tokens).logits
    assert (expected - base).abs().max() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def folder(paths: dict[str, Path], tmp_path: Path) -> Path:
    path = paths["qwen3-moe"]
    peft.write(factors_of(path, SIZE), model_shape(path), SIZE, str(path), tmp_path / "adapters")
    return tmp_path / "adapters"


def told(path: Path, folder: Path, size: LoraSize = SIZE) -> list[str]:
    return [str(error) for error in peft.check(str(folder), model_shape(path), size)]


@pytest.mark.slow
def test_what_was_written_fits(paths: dict[str, Path], folder: Path) -> None:
    assert told(paths["qwen3-moe"], folder) == []
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "says"),
    [
        (
            replace(SIZE, alpha=8.0),
            ["lora.alpha: 8, and {}/adapter_config.json has lora_alpha 6.0; set it to 6.0, or"],
        ),
        (
            replace(SIZE, rank=8),
            ["lora.rank: 8, and {}/adapter_config.json has r 4; set it to 4, or"],
        ),
        (replace(SIZE, expert_rank=2), ["lora.path: base_model.model.model.layers."]),
        (
            replace(SIZE, targets=("q_proj",)),
            [
                "lora.path: {} has weights of down_proj, gate_proj, k_proj, o_proj, up_proj, v_proj (base_model.model."
            ],
        ),
    ],
    ids=["alpha", "rank", "rank of experts", "targets"],
)
def test_another_size_is_named_by_its_key(
    paths: dict[str, Path], folder: Path, size: LoraSize, says: list[str]
) -> None:
    errors = told(paths["qwen3-moe"], folder, size)
    for error, say in zip(errors, says, strict=True):
        assert error.startswith(say.format(folder)), errors


@pytest.mark.slow
def test_a_missing_factor_and_other_kinds_of_adapters_are_named(
    paths: dict[str, Path], folder: Path
) -> None:
    wider = replace(SIZE, targets=())
    factors = load_file(folder / "adapter_model.safetensors")
    missing = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    save_file(
        {name: factor for name, factor in factors.items() if name != missing},
        folder / "adapter_model.safetensors",
    )
    (line,) = told(paths["qwen3-moe"], folder, wider)
    assert line.startswith(
        f"lora.path: {folder} lacks weights of o_proj ({missing}, 1 in all); set lora.targets"
    ), line
    save_file(factors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    for key, value in (
        ("use_dora", True),
        ("init_lora_weights", "pissa"),
        ("alpha_pattern", {"q_proj": 1}),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        (line,) = told(paths["qwen3-moe"], folder)
        assert line.startswith(f"lora.path: {folder}/adapter_config.json has {key} "), line
    (folder / "adapter_config.json").unlink()
    (line,) = told(paths["qwen3-moe"], folder)
    assert line.startswith(f"lora.path: {folder}/adapter_config.json: "), line


def test_what_transformers_stacks_is_told(paths: dict[str, Path]) -> None:
    """It takes adapters of shared experts for those of experts; of Qwen3-MoE's layers it loses none."""
    lost = {name: peft.lost_in_transformers(factors_of(path, SIZE)) for name, path in paths.items()}
    assert lost["llama"] is None and lost["qwen3-moe"] is None
    assert lost["deepseek-v3"] == "model.layers.0.mlp.down_proj.weight"
    without = replace(SIZE, targets=("q_a_proj", "o_proj"))
    assert peft.lost_in_transformers(factors_of(paths["deepseek-v3"], without)) is None


@pytest.mark.parametrize("targets", LOADED + LOST, ids="+".join)
def test_experts_without_a_projection_that_peft_fuses_are_told_by_name(
    paths: dict[str, Path], targets: tuple[str, ...]
) -> None:
    factors = factors_of(paths["qwen3-moe"], replace(SIZE, targets=("q_proj", *targets)))
    first = f"model.layers.0.mlp.experts.0.{min(targets)}.weight"
    assert peft.lost_in_transformers(factors) == (first if targets in LOST else None)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [LOADED[0], LOST[0], LOST[3]], ids="+".join)
def test_which_projections_of_experts_peft_loads(
    paths: dict[str, Path], tmp_path: Path, targets: tuple[str, ...]
) -> None:
    """Down alone; of gate and up it loads nothing without a word, and of one of them it raises an error."""
    path, tokens, size = (
        paths["qwen3-moe"],
        torch.arange(20, 40)[None],
        replace(SIZE, targets=targets),
    )
    factors = factors_of(path, size)
    peft.write(factors, model_shape(path), size, str(path), tmp_path / "adapters")
    model: Any = checkpoints.load(path)[0]
    if len({"gate_proj", "up_proj"} & {*targets}) == 1:
        # PEFT's message fails itself: a list minus a set
        with pytest.raises((TypeError, ValueError)):
            model.load_adapter(str(tmp_path / "adapters"))
        return
    model.load_adapter(str(tmp_path / "adapters"))
    is_lost = peft.lost_in_transformers(factors) is not None
    computed = path if is_lost else merged(path, factors, size, tmp_path / "whole")
    expected = checkpoints.load(computed)[0](tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_transformers_stacks_it_loses(paths: dict[str, Path], tmp_path: Path) -> None:
    """Of DeepSeek-V3's adapters those of dense layers and shared experts; the day that it has them this fails."""
    path, tokens = paths["deepseek-v3"], torch.arange(20, 40)[None]
    factors = factors_of(path, SIZE)
    peft.write(factors, model_shape(path), SIZE, str(path), tmp_path / "adapters")
    lost = {name for name in factors if peft.lost_in_transformers([name, *EXPERTS]) is not None}
    kept = {name: factor for name, factor in factors.items() if name not in lost}
    assert {name.split(".")[4] for name in lost} == {
        "shared_experts",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    whole = checkpoints.load(merged(path, factors, SIZE, tmp_path / "whole"))[0](tokens).logits
    without = checkpoints.load(merged(path, kept, SIZE, tmp_path / "without"))[0](tokens).logits
    model: Any = checkpoints.load(path)[0]
    model.load_adapter(str(tmp_path / "adapters"))
    torch.testing.assert_close(model(tokens).logits, without, rtol=1e-4, atol=1e-4)
    assert (whole - without).abs().max() > 0.1


def test_what_an_interrupted_one_has_left_is_removed(paths: dict[str, Path]) -> None:
    folder = paths["llama"].parent / "again"
    (folder.parent / "again.unfinished").mkdir()
    peft.write(factors_of(paths["llama"], SIZE), model_shape(paths["llama"]), SIZE, "base", folder)
    assert folder.is_dir() and not (folder.parent / "again.unfinished").exists()
