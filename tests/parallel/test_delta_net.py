"""Our Gated DeltaNet against transformers' own layer, sequence by sequence and on ranks that share its work out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megarl.device import Address
from megarl.parallel.delta_net import DeltaNet, DeltaNetSubmodules, torch_rule
from megarl.parallel.packing import rank_order, zigzag
from megarl.parallel.shared_rows import RowParams
from tests.parallel.worlds import run_ranks

HIDDEN = 24
SIZES: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
LENGTHS = [8, 136, 4, 72]  # over two chunks, under one, under the convolution's width
BOUNDS = torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)


def reference() -> Qwen3NextGatedDeltaNet:
    torch.manual_seed(0)
    layer = Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=HIDDEN, **SIZES), 0)
    with torch.no_grad():
        for param in layer.parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.3)
    return layer


def hidden_states() -> Tensor:
    return torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(1))


def alone(layer: Qwen3NextGatedDeltaNet, hidden_TH: Tensor) -> Tensor:
    """Each sequence in a pass of its own."""
    return torch.cat([layer(each[None])[0] for each in hidden_TH.split(LENGTHS)])


def weights_of(layer: Qwen3NextGatedDeltaNet, of: str = "data") -> dict[str, Tensor]:
    """What DeltaNet's docstring says of a checkpoint's tensors, or of their gradients."""
    heads = SIZES["linear_num_key_heads"]
    named = {name: getattr(param, of) for name, param in layer.named_parameters()}

    def by_head(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, -1))

    projections = named["in_proj_qkvz.weight"], named["in_proj_ba.weight"]
    keys = heads * SIZES["linear_key_head_dim"]
    q_k_v = named["conv1d.weight"].split([keys, keys, len(named["conv1d.weight"]) - 2 * keys])
    return {
        "in_proj.weight": torch.cat([*map(by_head, projections)], dim=1).flatten(0, 1),
        "conv1d.weight": torch.cat([*map(by_head, q_k_v)], dim=1).flatten(0, 1),
        "A_log": named["A_log"],
        "dt_bias": named["dt_bias"],
        "out_norm.weight": named["norm.weight"],
        "out_proj.weight": named["out_proj.weight"],
    }


def cut(weights: dict[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    dims = {"out_proj.weight": 1, "out_norm.weight": None}
    parts = {name: dims.get(name, 0) for name in weights}
    return {
        name: weight if parts[name] is None else weight.chunk(tp, dim=parts[name])[rank]
        for name, weight in weights.items()
    }


def on_rank(
    rank: int, meet: Address, tp: int, cp: int, weights: dict[str, Tensor], selective: bool
) -> tuple[Any, ...]:
    """Places and outputs, gradients of weights and of hidden states of a rank whose layers begin with the TP rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl import device
    from megarl.cpu import megatron_patches

    megatron_patches.patch_megatron()
    store = device.join_store(meet, 60.0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp * cp)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if selective else None,
        recompute_modules=["core_attn"] if selective else None,
        **SIZES,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    linears = DeltaNetSubmodules(ColumnParallelLinear, RowParallelLinear)
    layer = DeltaNet(config, linears, 1, pg_collection=groups)
    at = groups.tp.rank(), groups.cp.rank()
    layer.load_state_dict(cut(weights, tp, at[0]), strict=False)
    places = torch.from_numpy(zigzag(BOUNDS.long().numpy(), cp, at[1])).chunk(tp)[at[0]]
    hidden = hidden_states()[places].requires_grad_()
    row = RowParams(qkv_format="thd", cu_seqlens_q=BOUNDS, cu_seqlens_kv=BOUNDS)
    output, bias = layer(hidden[:, None], None, packed_seq_params=row)
    assert bias is None
    (output[:, 0] * loss_weights()[places]).sum().backward()
    gradients = {name: param.grad for name, param in layer.named_parameters()}
    for name, gradient in gradients.items():  # as data parallelism and sequence parallelism sum
        assert gradient is not None
        dist.all_reduce(gradient, group=groups.cp)
        if name == "out_norm.weight":
            dist.all_reduce(gradient, group=groups.tp)
    own = {name: gradient.numpy() for name, gradient in gradients.items() if gradient is not None}
    assert hidden.grad is not None
    return places.numpy(), output[:, 0].detach().numpy(), own, hidden.grad.numpy()


def loss_weights() -> Tensor:
    return torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(2))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp", "selective"), [(1, 1, True), (2, 2, False)])
def test_ranks_compute_what_transformers_does(tp: int, cp: int, selective: bool) -> None:
    layer = reference()
    weights = weights_of(layer)
    hidden = hidden_states().requires_grad_()
    expected = alone(layer, hidden)
    (expected * loss_weights()).sum().backward()
    results = run_ranks(tp * cp, on_rank, tp, cp, weights, selective)
    places, outputs, gradients, of_hidden = zip(*results, strict=True)
    order = np.concatenate(places).argsort()
    assert len(order) == sum(LENGTHS)
    close(np.concatenate(outputs)[order], expected)
    close(np.concatenate(of_hidden)[order], hidden.grad)
    for rank, own in enumerate(gradients):
        for name, part in cut(weights_of(layer, "grad"), tp, rank % tp).items():
            close(own[name], part)


def close(actual: np.ndarray, expected: Any) -> None:
    values = expected.detach().numpy()
    np.testing.assert_allclose(actual, values, atol=1e-5 * abs(values).max(), rtol=1e-4)


def slow_rule(inputs: list[Tensor], lengths: list[int]) -> Tensor:
    """The recurrence of the module's docstring, token by token and head by head."""
    outputs = []
    for q, k, v, g, beta in zip(*(each.split(lengths) for each in inputs), strict=True):
        state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype)
        for t in range(len(q)):
            state = state * g[t].exp()[:, None, None]
            correction = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + torch.einsum("hk,hv->hkv", k[t], correction)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) / q.shape[2] ** 0.5)
    return torch.stack(outputs)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.integers(0, 2**31))
def test_the_rule_of_chunks_is_the_recurrence(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k = (torch.randn(total, 3, 8, generator=generator) for _ in range(2))
    v = torch.randn(total, 3, 5, generator=generator)
    g = -torch.rand(total, 3, generator=generator) * 20  # over chunks the decay is 0 in float32
    beta = torch.rand(total, 3, generator=generator)
    inputs = [q, k / k.norm(dim=-1, keepdim=True), v, g, beta]
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    computed = torch_rule(inputs[0], inputs[1], v, g, beta, bounds)
    torch.testing.assert_close(computed, slow_rule(inputs, lengths), atol=2e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([2, 4]))
def test_the_order_of_shares_is_that_of_the_zigzag(chunks: list[int], cp: int) -> None:
    bounds = np.cumsum([0, *(2 * cp * chunk for chunk in chunks)]).astype(np.int64)
    places = np.concatenate([zigzag(bounds, cp, rank) for rank in range(cp)])
    order = rank_order(torch.from_numpy(bounds), int(bounds[-1]), cp)
    assert order.places_T.tolist() == places.tolist()
    assert order.order_T.tolist() == np.argsort(places).tolist()
