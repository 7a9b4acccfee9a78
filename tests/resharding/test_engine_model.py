"""What is asked of a model object: weights, layouts that have no map, tensors that are derived from weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.resharding import engine_model
from megarl.resharding.shards import LayoutError

HEADS, NOPE, V, RANK = 3, 5, 4, 6


class Attention(torch.nn.Module):
    """Latent attention as SGLang keeps it: kv_b_proj, and what `derive` makes of it."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Module()
        self.kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        if scales is not None:
            self.kv_b_proj.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
        self.w_kc: torch.Tensor | None = None
        self.w_vc: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.kv_b_proj.get_parameter("weight")

    def derive(self, plain: torch.Tensor) -> None:
        key, value = plain.view(-1, NOPE + V, RANK).split([NOPE, V], dim=1)
        self.w_kc, self.w_vc = key.clone(), value.transpose(1, 2).clone()


class Model(torch.nn.Module):
    """One layer; its embedding is its head too."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4, 2)
        self.lm_head = self.embed_tokens
        self.self_attn = attention
        self.register_buffer("cos_sin_cache", torch.zeros(3))


class Derives(Model):
    self_attn: Attention

    def post_load_weights(self) -> None:
        self.self_attn.derive(self.self_attn.weight)


def latent() -> Derives:
    return Derives(Attention(torch.randn(HEADS * (NOPE + V), RANK)))


def test_a_vision_tower_is_no_weight() -> None:
    whole = torch.nn.Module()
    whole.vision_tower = torch.nn.Linear(2, 2)
    whole.language_model = latent()
    assert engine_model.joined([whole]) is whole.language_model
    assert engine_model.copied([whole]).keys() == engine_model.params(whole.language_model).keys()
    assert engine_model.joined([whole.language_model]) is whole.language_model


def test_weights_are_named_once_and_buffers_are_none() -> None:
    assert engine_model.params(latent()).keys() == {
        "embed_tokens.weight",
        "self_attn.kv_b_proj.weight",
    }


def test_derived_tensors_are_held_against_their_weight() -> None:
    model = latent()
    assert engine_model.derived_errors(model) == [], "nothing is derived before the first load"
    engine_model.refresh_derived(model)
    assert engine_model.derived_errors(model) == []
    assert model.self_attn.w_vc is not None
    model.self_attn.w_vc[1, 2, 3] += 1e-3
    assert engine_model.derived_errors(model) == [
        "self_attn.w_vc differs from its kv_b_proj.weight"
    ]
    model.self_attn.weight.mul_(2)
    assert len(engine_model.derived_errors(model)) == 2
    engine_model.refresh_derived(model)
    assert engine_model.derived_errors(model) == []


def test_fp8_weights_are_multiplied_out() -> None:
    rows, cols = HEADS * (NOPE + V) * 10, RANK  # more than one row of tiles
    weight = torch.randn(rows, cols).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), 1)
    model = Model(Attention(weight, scales))
    plain = torch.cat(
        [weight[i : i + 128].float() * scales[i // 128] for i in range(0, rows, 128)]
    ).bfloat16()
    assert isinstance(model.self_attn, Attention)
    model.self_attn.derive(plain)
    assert engine_model.derived_errors(model) == []
    scales[1] *= 2
    model.self_attn.kv_b_proj.get_parameter("weight_scale_inv").copy_(scales)
    assert len(engine_model.derived_errors(model)) == 2


def test_a_model_without_derived_tensors_needs_nothing() -> None:
    model = Model(torch.nn.Linear(2, 2))
    engine_model.refresh_derived(model)
    assert engine_model.derived_errors(model) == []
    assert engine_model.unknown_layout(model) is None


def mark(owner: str, name: str, value: Any):
    def change(model: Derives) -> None:
        if owner == "method":
            setattr(model.self_attn, "quant_method", SimpleNamespace(**{name: value}))  # noqa: B010
        else:
            setattr(model.self_attn if owner == "module" else model.self_attn.weight, name, value)

    return change


class CachedAttention(torch.nn.Module):
    """As SGLang makes it in fp8 engines."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_scale", "v_scale"):
            self.register_parameter(
                name, torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
            )
        self.k_scale_float = self.v_scale_float = None


def test_the_scales_of_the_kv_cache_are_written_in_place_and_verified() -> None:
    model = Model(CachedAttention())
    names = ["self_attn.k_scale", "self_attn.v_scale"]
    constants = engine_model.constants(model)
    assert list(constants) == names and not constants.keys() & engine_model.params(model).keys()
    assert engine_model.constant_errors(model) == [f"{name} is -1, not 1" for name in names]
    engine_model.write_constants(model)
    assert engine_model.constant_errors(model) == []
    assert all(param is engine_model.constants(model)[name] for name, param in constants.items()), (
        "graphs keep the tensors"
    )
    constants["self_attn.v_scale"].fill_(float("nan"))
    assert engine_model.constant_errors(model) == ["self_attn.v_scale is nan, not 1"]


def test_a_scale_for_each_head_is_no_constant() -> None:
    """The map must refuse what it does not know."""
    model = Model(CachedAttention())
    model.self_attn.k_scale = torch.nn.Parameter(torch.ones(4))
    assert "self_attn.k_scale" in engine_model.params(
        model
    ) and "self_attn.k_scale" not in engine_model.constants(model)


UNKNOWN = [
    (
        mark("module", "use_triton_kernels", True),
        r"self_attn: .*use_triton_kernels.*moe_runner_backend to triton",
    ),
    (mark("module", "use_flashinfer_trtllm_moe", True), "use_flashinfer_trtllm_moe.*to triton"),
    (
        mark("module", "w13_swiglu_interleaved", True),
        "w13_swiglu_interleaved.*leave SGLANG_OPT_FUSE_SWIGLU",
    ),
    (mark("method", "load_up_proj_weight_first", True), "load_up_proj_weight_first"),
    (mark("module", "num_fused_shared_experts", 1), "fused the shared experts"),
    (mark("module", "w_kc_qrep", torch.ones(1)), "replicated the query weights"),
    (mark("module", "v_scale_float", 0.5), r"self_attn: .*captured its graphs with v_scale 0\.5"),
    (mark("parameter", "format_ue8m0", True), r"self_attn\.kv_b_proj\.weight: .* powers of two"),
]


@pytest.mark.parametrize(("change", "words"), UNKNOWN)
def test_a_layout_without_a_map_is_named(change: Any, words: str) -> None:
    model = latent()
    assert engine_model.unknown_layout(model) is None
    change(model)
    error = engine_model.unknown_layout(model)
    assert isinstance(error, LayoutError)
    with pytest.raises(LayoutError, match=words):
        raise error
