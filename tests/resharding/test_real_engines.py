"""The map of engine parameters against the ones that SGLang's own classes build, at full width and few layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.model.families import family_of
from megarl.model.hf_config import model_shape
from megarl.model.lora_pairs import LoraSize
from megarl.model.precision import FP8_TILES, PLAIN, Precision, plain_modules
from megarl.placement.engine_layout import EngineLayout
from megarl.resharding import sglang_map
from megarl.resharding.shards import LayoutError, Shard, cells, verify_params
from tests.model.page_family import NAME, write_family
from tests.resharding.meta_engines import Request, build, write_config

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[2] / "recipes" / "models"
PUBLISHED = Path(__file__).parents[1] / "published"
FEW_LAYERS = {"num_hidden_layers": 2}


def published(name: str, **changes: Any) -> dict[str, Any]:
    file = PUBLISHED / f"{name}.json"
    if not file.exists():
        file = MODELS / name / "config.json"
    return json.loads(file.read_text()) | FEW_LAYERS | changes


def dense(family: str, **sizes: Any) -> dict[str, Any]:
    common = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
    }
    return common | {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        **FEW_LAYERS,
        **sizes,
    }


def wrapped(name: str, **changes: Any) -> dict[str, Any]:
    """Of a model with a vision tower; changes: of its language model."""
    config = published(name)
    return config | {"text_config": config["text_config"] | FEW_LAYERS | changes}


DEEPSEEK = published("deepseek-v3", first_k_dense_replace=1)
CONFIGS = {
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3.2": published("deepseek-v3.2", first_k_dense_replace=1),
    "glm-5": published("glm-5", first_k_dense_replace=1),
    "kimi-k2": published("kimi-k2"),
    "kimi-k2.5": wrapped("kimi-k2.5"),
    "moonlight": published("moonlight-16b-a3b", num_nextn_predict_layers=1),
    "minimax-m2": published("minimax-m2"),
    "hy-v3": published("hy-v3"),
    "mixtral-8x7b": published("mixtral-8x7b"),
    "qwen3-30b-a3b": published("qwen3-30b-a3b"),
    "qwen3-235b-a22b": published("qwen3-235b-a22b"),
    "qwen2.5-32b": published("qwen2.5-32b"),
    "qwen3, padded vocabulary": dense(
        "Qwen3", hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=151669, tie_word_embeddings=True,
    ),
    "llama-3.1-8b": dense(
        "Llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    ),
}  # fmt: skip
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "attention_bias": False,
    "partial_rotary_factor": None, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "head_dim": 64, "qk_nope_head_dim": 192, "vocab_size": 154880,
}  # fmt: skip
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "hidden_size": 3584,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151936,
    "head_dim": None, "norm_topk_prob": False,
}  # fmt: skip
CONFIGS |= {
    "qwen3-next-80b-a3b": published("qwen3-next-80b-a3b", full_attention_interval=2, num_nextn_predict_layers=1),
    "qwen3.5-397b-a17b": wrapped("qwen3.5-397b-a17b", full_attention_interval=2, mtp_num_hidden_layers=1),
    "qwen2-57b-a14b": published("qwen3-30b-a3b", **QWEN2_MOE),
    "glm-4.5-air": published("glm-4.5-air"),
    "glm-4.6": published("glm-4.6", first_k_dense_replace=1),
    "glm-4.7-flash": {**published("glm-4.5-air"), **GLM_FLASH},
}  # fmt: skip
CONFIGS["olmoe-1b-7b"] = {  # the family of docs/models.md; defaults of transformers 5.12.1
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    "vocab_size": 50304, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "norm_topk_prob": False,
    "clip_qkv": None, "tie_word_embeddings": False, "hidden_act": "silu", **FEW_LAYERS,
}  # fmt: skip
DENSE, SHARED, HEAD = {"whole_dense": True}, {"whole_shared": True}, {"group_head": True}
WHOLE = {**DENSE, **SHARED, **HEAD}
DEEPEP = {**WHOLE, "deepep": True}


def layout(tp: int, ep: int = 1, dp: int = 1, draft: int = 0, **more: Any) -> EngineLayout:
    return EngineLayout(1, tp, ep, dp, draft=draft, **more)


LAYOUTS = {  # in bfloat16, and in fp8 where no tile is cut
    "deepseek-v3": [
        layout(8), layout(16, 4), layout(16, 16, 8), layout(8, 8, 8), layout(32, 32, 8),
        layout(16, 16, 4, **DENSE), layout(16, 16, 4, **HEAD), layout(8, 8, 4, **SHARED), layout(16, 4, 8, **WHOLE),
        layout(16, 16, 8, **DENSE, **HEAD), layout(32, 32, 32, **WHOLE), layout(64, 64, 32, **WHOLE),
        layout(16, 16, 8, **DEEPEP), layout(32, 32, 32, **DEEPEP), layout(64, 64, 8, **DEEPEP),
        layout(8, 8, 8, draft=1), layout(16, 4, draft=3), layout(32, 32, 32, draft=2, **WHOLE),
        layout(16, 16, 8, draft=1, **DEEPEP),
    ],
    "deepseek-v3.2": [layout(8, 8, 8), layout(16, 16, 8, draft=1, **DEEPEP)],
    "glm-5": [layout(8, 8), layout(16, 16, 8, draft=1, **DEEPEP)],
    "kimi-k2": [layout(16, 16, 4), layout(32, 32, 32, **DEEPEP)],
    "kimi-k2.5": [layout(16, 16, 4), layout(8, 8, 8, **WHOLE), layout(16, 16, 8, **DEEPEP)],
    "moonlight": [layout(4, 2), layout(2, 2), layout(4, 4, 4, **WHOLE), layout(2, 2, draft=1)],
    "qwen3-30b-a3b": [
        layout(1), layout(4, 2, 2), layout(8, 8), layout(4, 2, 2, **DENSE, **HEAD), layout(8, 8, 4, **DEEPEP),
    ],
    "qwen3-235b-a22b": [
        layout(8, 8, 8), layout(16, 16, 4), layout(16, 16, 4, **DEEPEP), layout(32, 32, 8, **HEAD),
    ],
    "glm-4.5-air": [layout(8, 4, 4, **DENSE, **HEAD), layout(8, 8, 8, draft=1, **DEEPEP)],
    "glm-4.6": [layout(16, 16, 4, **WHOLE), layout(32, 32, 8, draft=1, **DEEPEP)],
    "glm-4.7-flash": [layout(4, 4), layout(4, 4, 4, **DEEPEP)],
    "minimax-m2": [layout(8, 8), layout(16, 4, 4, **DENSE), layout(8, 8, 4, **DENSE, deepep=True)],
    "hy-v3": [layout(4, 4), layout(8, 8)],
    "mixtral-8x7b": [layout(8), layout(4, 2)],
    "qwen3-next-80b-a3b": [
        layout(2), layout(8, 8, 4, **HEAD), layout(4, 2, draft=1), layout(8, 8, 8, draft=2, **DEEPEP),
    ],
    "qwen3.5-397b-a17b": [layout(4, 2, draft=1), layout(8, 8, 4, **HEAD), layout(8, 8, 8, draft=1, **DEEPEP)],
    "qwen2-57b-a14b": [layout(4, 2), layout(4, 4, 2, **SHARED), layout(4, 4, 4, **DEEPEP)],
    "olmoe-1b-7b": [layout(1)],
    "qwen2.5-32b": [layout(8), layout(4)],
    "qwen3, padded vocabulary": [layout(2), layout(4)],
    "llama-3.1-8b": [layout(8), layout(16)],
}  # fmt: skip
LAST, KINDS = (
    Precision("fp8", plain_last_layers=1),
    Precision("fp8", plain=("kv_b_proj", "shared_experts")),
)
SHARED_PLAIN = Precision("fp8", plain=("shared_experts",))
MIXED = [  # fp8 engines with plain weights among those that have tiles
    ("deepseek-v3", layout(8, 8, 8, draft=1), LAST),
    ("deepseek-v3", layout(16, 16, 8, draft=1), replace(LAST, plain=KINDS.plain)),
    ("deepseek-v3", layout(16, 16, 8, **DEEPEP), KINDS),
    ("moonlight", layout(4, 4), KINDS),  # whose kv_b_proj and shared experts would cut tiles
    ("qwen3-30b-a3b", layout(4, 2, 2), LAST), ("minimax-m2", layout(8, 8), LAST),
    ("hy-v3", layout(4, 4), replace(LAST, plain=SHARED_PLAIN.plain)), ("mixtral-8x7b", layout(4, 2), LAST),
    ("qwen2-57b-a14b", layout(4, 4, 2, **SHARED), SHARED_PLAIN), ("qwen2-57b-a14b", layout(4, 2), LAST),
    ("olmoe-1b-7b", layout(1), LAST), ("qwen2.5-32b", layout(8), LAST), ("llama-3.1-8b", layout(8), LAST),
    ("qwen3, padded vocabulary", layout(2), LAST), ("glm-4.6", layout(32, 32, 8, draft=1, **DEEPEP), SHARED_PLAIN),
    ("glm-4.7-flash", layout(4, 4, 4, **WHOLE), KINDS),
]  # fmt: skip
CUT_TILES = {
    "deepseek-v3": [layout(32, 32, 8)],
    "moonlight": [layout(4, 2)],
    "glm-4.5-air": LAYOUTS["glm-4.5-air"],  # a dense layer's width is 85.5 tiles
    "glm-4.6": LAYOUTS["glm-4.6"][:1],
    "glm-4.7-flash": LAYOUTS["glm-4.7-flash"][:1],
    "hy-v3": LAYOUTS["hy-v3"][1:],
}
NO_FP8 = {"qwen3-next-80b-a3b", "qwen3.5-397b-a17b"}  # refused by placement/engine_layout.py
# of a layer
CACHE_SCALES = {
    "deepseek-v3": 4,
    "deepseek-v3.2": 4,
    "glm-5": 4,
    "kimi-k2": 4,
    "kimi-k2.5": 4,
    "moonlight": 4,
    "glm-4.7-flash": 4,
    "minimax-m2": 2,
    "mixtral-8x7b": 2,
    "qwen2.5-32b": 2,
    "qwen2-57b-a14b": 2,
    "llama-3.1-8b": 2,
    "olmoe-1b-7b": 2,
}


class Case(NamedTuple):
    model: str
    engine: EngineLayout
    rank: int

    def __str__(self) -> str:
        engine, kind = self.engine, "fp8" if self.engine.fp8 else "bf16"
        precision = engine.precision
        if precision not in (PLAIN, FP8_TILES):
            kind += f" without {precision.plain_last_layers} layers {' '.join(precision.plain)}"
        flags = "".join(f" {name}" for name in DEEPEP if getattr(engine, name))
        flags += f" draft {engine.draft}" if engine.draft else ""
        return (
            f"{self.model} {kind} tp{engine.tp} ep{engine.ep} dp{engine.dp}{flags} rank {self.rank}"
        )


SPLIT_OLMOE = Case("olmoe-1b-7b", layout(2), 0)
PLAIN_CACHE = Case("deepseek-v3", EngineLayout(1, 16, 16, dp=8, precision=FP8_TILES), 0)
FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashmla"}


def cases() -> list[Case]:
    """The first and last rank of every layout, and in bfloat16 the middle one: its place decides boxes, not types."""
    return [
        Case(model, replace(engine, precision=FP8_TILES if fp8 else PLAIN), rank)
        for model, layouts in LAYOUTS.items()
        for engine in layouts
        for fp8 in (False, True)[: 1 + (model not in NO_FP8)]
        for rank in sorted({0, engine.tp - 1} | (set() if fp8 else {engine.tp // 2}))
        if not (fp8 and engine in CUT_TILES.get(model, ()))
    ] + [
        Case(model, replace(engine, precision=precision), engine.tp - 1)
        for model, engine, precision in MIXED
    ]


SMALL = {  # of DeepSeek-V3, so that slots of every expert have contents
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 16, "n_group": 1,
    "topk_group": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 96, "vocab_size": 512,
}  # fmt: skip
SMALL_QWEN3 = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
SMALL_DENSE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 151,
}  # fmt: skip
SMALL_MODELS = {
    "deepseek-v3, small": DEEPSEEK | SMALL,
    "deepseek-v3.2, small": published("deepseek-v3.2", first_k_dense_replace=1, **SMALL),
    "glm-5, small": published("glm-5", first_k_dense_replace=1, **SMALL),
    "kimi-k2.5, small": wrapped("kimi-k2.5", **SMALL),
    "moonlight, small": DEEPSEEK | SMALL | {"q_lora_rank": None},
    "qwen3-moe, small": published("qwen3-30b-a3b", **SMALL_QWEN3),
    "minimax-m2, small": published(
        "minimax-m2", **SMALL_DENSE, head_dim=32, rotary_dim=16, num_local_experts=16
    ),
    "hy-v3, small": published(
        "hy-v3", **SMALL_DENSE, head_dim=32, moe_intermediate_size=128, num_experts=16
    ),
    "mixtral, small": published("mixtral-8x7b", **SMALL_DENSE),
    "glm, small": published(
        "glm-4.5-air", **SMALL_DENSE, head_dim=32, moe_intermediate_size=128, n_routed_experts=16
    ),
    "glm-lite, small": {**published("glm-4.5-air"), **GLM_FLASH, **SMALL},
    "qwen3-next, small": published(
        "qwen3-next-80b-a3b",
        **SMALL_QWEN3,
        full_attention_interval=2,
        num_nextn_predict_layers=1,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        shared_expert_intermediate_size=128,
    ),
    "qwen3.5-moe, small": wrapped(
        "qwen3.5-35b-a3b",
        **SMALL_DENSE,
        full_attention_interval=2,
        mtp_num_hidden_layers=1,
        head_dim=32,
        num_experts=16,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
    ),
    "qwen2-moe, small": published(
        "qwen1.5-moe-a2.7b",
        **SMALL_DENSE,
        num_experts=16,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
    ),
    "llama, small": CONFIGS["llama-3.1-8b"]
    | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512},
    "qwen2, small": dense("Qwen2", **SMALL_DENSE, tie_word_embeddings=False),
    "qwen3, small": dense("Qwen3", **SMALL_DENSE, head_dim=32, tie_word_embeddings=True),
}
LOADED = [
    ("deepseek-v3, small", layout(4, 2)), ("deepseek-v3, small", layout(4, 4, 4)),
    ("deepseek-v3, small", layout(8, 2, 2, **DENSE)), ("deepseek-v3, small", layout(8, 2, 2, **SHARED)),
    ("deepseek-v3, small", layout(8, 2, 2, draft=3, **WHOLE)), ("deepseek-v3, small", layout(4, 4, 2, **DEEPEP)),
    ("deepseek-v3.2, small", layout(2)), ("glm-5, small", layout(2, draft=1)), ("kimi-k2.5, small", layout(2, 2)),
    ("moonlight, small", layout(2)), ("qwen3-moe, small", layout(8, 4)), ("qwen3-moe, small", layout(4, 2, 2, **HEAD)),
    ("llama, small", layout(2)), ("qwen2, small", layout(4)), ("qwen3, small", layout(2)),
    ("minimax-m2, small", layout(4, 2)), ("hy-v3, small", layout(4, 2)), ("mixtral, small", layout(4, 2)),
    ("qwen2-moe, small", layout(4, 2)), ("glm, small", layout(4, 2)), ("glm-lite, small", layout(2, 2)),
    ("qwen3-next, small", layout(4, 2, draft=1)), ("qwen3.5-moe, small", layout(4, 2, draft=1)),
]  # fmt: skip
ALL, SOME = (
    LoraSize(4, 4, 4.0, (), sync="adapters"),
    LoraSize(4, 4, 4.0, ("q_proj", "up_proj"), sync="adapters"),
)
ATTENTION = LoraSize(4, 0, 4.0, (), sync="adapters")
SLOT_CASES = [
    ("deepseek-v3, small", layout(4), ALL), ("deepseek-v3, small", layout(4, 4), ALL),
    ("deepseek-v3, small", layout(4, 2, **SHARED), ALL), ("deepseek-v3, small", layout(4, 4, 4, **WHOLE), ALL),
    ("deepseek-v3, small", layout(2), ATTENTION), ("qwen3-moe, small", layout(4, 2), ALL),
    ("qwen3-moe, small", layout(2), SOME), ("qwen3-moe, small", layout(4, 4, 4, **HEAD), ALL),
    ("kimi-k2.5, small", layout(2), ATTENTION), ("llama, small", layout(4), ALL), ("llama, small", layout(2), SOME),
]  # fmt: skip


def slots() -> list[tuple[str, EngineLayout, LoraSize, int]]:
    """All ranks of the engines with adapters."""
    return [
        (model, engine, size, rank)
        for model, engine, size in SLOT_CASES
        for rank in range(engine.tp)
    ]


def loaded() -> list[tuple[str, EngineLayout, int]]:
    """All ranks of the engines that load weights."""
    return [(model, engine, rank) for model, engine in LOADED for rank in range(engine.tp)]


class Models:
    """The folders with the configs, and what one child process built of all cases and of some others."""

    def __init__(self, folder: Path) -> None:
        paths = {name: write_config(folder / name, config) for name, config in CONFIGS.items()}
        self.shapes = {
            name: model_shape(path, NAME if name == SPLIT_OLMOE.model else None)
            for name, path in paths.items()
        }
        requests = [
            Request(paths[case.model], case.engine, case.rank, plain=self.plain_modules(case))
            for case in cases()
        ]
        requests.append(
            Request(paths[PLAIN_CACHE.model], PLAIN_CACHE.engine, PLAIN_CACHE.rank, FP8_CACHE)
        )
        requests.append(Request(paths[SPLIT_OLMOE.model], SPLIT_OLMOE.engine, SPLIT_OLMOE.rank))
        requests += [
            Request(paths[model], replace(engine, precision=FP8_TILES), 0)
            for model, (engine, *_) in CUT_TILES.items()
        ]
        small = {name: write_config(folder / name, config) for name, config in SMALL_MODELS.items()}
        requests += [
            Request(small[model], engine, rank, lora=size) for model, engine, size, rank in slots()
        ]
        requests += [
            Request(small[model], engine, rank, loads=True) for model, engine, rank in loaded()
        ]
        builds = build(requests)
        self.built = dict(zip(cases(), builds, strict=False))
        self.fp8_cache, self.split_olmoe, *cut = builds[len(cases()) :]
        self.cut = dict(zip(CUT_TILES, cut, strict=False))
        self.slots = cut[len(CUT_TILES) :][: len(slots())]
        self.loaded = cut[len(CUT_TILES) + len(slots()) :]

    def plain_modules(self, case: Case) -> tuple[str, ...]:
        return plain_modules(self.shapes[case.model], case.engine.precision)

    def shards(self, case: Case) -> list[Shard]:
        return sglang_map.shards(self.shapes[case.model], case.engine, case.rank)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    write_family(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return Models(folder)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_map_describes_the_parameters_of_sglangs_own_class(models: Models, case: Case) -> None:
    shape, built = models.shapes[case.model], models.built[case]
    assert not built.error, built.error
    assert case.engine.errors(shape, case.engine.tp) == case.engine.gpu_errors(shape) == []
    assert not built.unknown
    shards = models.shards(case)
    verify_params(shards, built.params)
    for shard in shards:
        for name, _ in cells(shard):
            assert built.params[name].dtype == getattr(torch, shard.dtype or "bfloat16"), name


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_scales_of_the_kv_cache_are_constants(models: Models, case: Case) -> None:
    """They start as made-up weights may; SGLang's own processing must take the 1 that was written."""
    built = models.built[case]
    layers = models.shapes[case.model].num_layers + bool(case.engine.draft)
    number = CACHE_SCALES.get(case.model, 0) * layers if case.engine.fp8 else 0
    assert len(built.constants) == number
    assert list(built.constants.values()) == built.cache_scales == [1.0] * number
    assert not built.constants.keys() & built.params.keys()


@pytest.mark.parametrize("case", [case for case in cases() if case.model == "deepseek-v3"], ids=str)
def test_latent_attention_derives_its_tensors_in_bfloat16(models: Models, case: Case) -> None:
    """As `derived_errors` expects them: also from fp8 tiles."""
    mla, heads = models.shapes[case.model].mla, 128 // case.engine.attention_tp
    assert mla is not None
    expected = {
        "w_kc": [[heads, mla.nope_dim, mla.kv_lora_rank], "bfloat16"],
        "w_vc": [[heads, mla.kv_lora_rank, mla.v_dim], "bfloat16"],
    }
    of_draft = (
        {f"draft.{name}": kind for name, kind in expected.items()} if case.engine.draft else {}
    )
    assert models.built[case].derived == expected | of_draft


@pytest.mark.parametrize("case", [case for case in cases() if case.engine.draft], ids=str)
def test_the_draft_model_shares_the_targets_embedding_and_output_layer(
    models: Models, case: Case
) -> None:
    names = models.built[case].params
    drafts = {name for name in names if name.startswith(sglang_map.DRAFT)}
    assert drafts and not [name for name in drafts if "embed_tokens" in name or "lm_head" in name]
    frame = family_of(models.shapes[case.model]).mtp
    assert names[f"draft.{frame.draft_frame}{frame.projection}.weight"].dtype == torch.bfloat16
    if alone := models.built.get(case._replace(engine=replace(case.engine, draft=0))):
        assert names.keys() - drafts == alone.params.keys()


def test_an_fp8_kv_cache_changes_no_parameter(models: Models) -> None:
    cached, plain = models.fp8_cache, models.built[PLAIN_CACHE]
    assert not cached.error, cached.error
    assert {name: (param.shape, param.dtype) for name, param in cached.params.items()} == {
        name: (param.shape, param.dtype) for name, param in plain.params.items()
    }
    assert cached.constants == plain.constants


MOE, LATENT = Case("qwen3-30b-a3b", layout(4, 2, 2), 3), Case("deepseek-v3", layout(16, 16, 8), 8)
DRAFTS = Case("deepseek-v3", layout(8, 8, 8, draft=1), 4)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (MOE, {"dp": 1}),
        (MOE, {"ep": 4}),
        (MOE, {"precision": FP8_TILES}),
        (MOE, HEAD),
        (LATENT, DENSE),
        (LATENT, SHARED),
        (LATENT, {"draft": 1}),
        (DRAFTS, {"draft": 0}),
    ],  # fmt: skip
    ids=str,
)
def test_another_layout_than_the_engines_is_refused(
    models: Models, case: Case, changes: dict[str, Any]
) -> None:
    other = case._replace(engine=replace(case.engine, **changes))
    with pytest.raises(LayoutError, match="weight map and model differ"):
        verify_params(models.shards(other), models.built[case].params)


def test_norms_that_sglang_does_not_split_are_refused_where_the_map_splits_them(
    models: Models,
) -> None:
    assert not models.split_olmoe.error, models.split_olmoe.error
    with pytest.raises(LayoutError, match=r"weight map and model differ.*q_norm"):
        verify_params(models.shards(SPLIT_OLMOE), models.split_olmoe.params)


@pytest.mark.parametrize("model", CUT_TILES)
def test_a_cut_tile_is_refused_by_us_before_sglang_refuses_it(models: Models, model: str) -> None:
    engine = replace(CUT_TILES[model][0], precision=FP8_TILES)
    assert engine.errors(models.shapes[model], engine.tp)
    assert "is not divisible by weight quantization block" in models.cut[model].error


def test_sglangs_own_loaders_fill_weights_and_slots_as_the_maps_do(models: Models) -> None:
    """Each number of a checkpoint; how adapters are filled, which have slots of their own."""
    builds = zip([*slots(), *loaded()], [*models.slots, *models.loaded], strict=True)
    for case, built in builds:
        assert not built.error and not built.wrong, (case, built.error, built.wrong[:5])
