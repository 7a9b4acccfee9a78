"""Floating-point operations of a model on one sequence, and what share of a GPU's peak a step used. Pure.

The literature's count (Megatron-LM, Narayanan et al. 2021, section 5.1; PaLM, appendix B): 2 for each multiply-add of a
matrix product, nothing for norms, softmax, rotary positions or lookups. Unlike theirs, causal attention counts the
pairs that are computed, T (T + 1) / 2, and not T^2: a lower MFU, and the right work for balancing. Recomputed
activations do not count: MFU is of the work that had to be done. Multi-token prediction layers are not counted.
Under an indexer training multiplies all pairs and masks them (parallel/sparse_attention.py), so they count; the indexer
itself has a forward pass alone, of sequences that are longer than the keys that it chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megarl.model.families import has_output_gate
from megarl.model.shape import ModelShape
from megarl.training.shared_prompts import Prompted, summed_sizes
from megarl.types import IntArray, Metrics

TRAIN_OVER_FORWARD = 3  # backward: the gradients of weights and of inputs, each one forward's worth
# Assumption: what a micro-batch costs in itself, as the work of a sequence of so many tokens. Each parameter of a rank
# has its weight read twice and its fp32 gradient read and written: 12 bytes, 3,600 operations at the 300 a byte of an
# H800; a token is 6 for each parameter that it meets. That makes 600 tokens for DeepSeek-V3 at EP 32 and 900 for
# Qwen3-30B-A3B at EP 8, where EP is of data-parallel ranks alone, and up to 3,000 where TP is a part of it.
MICRO_BATCH_TOKENS = 1024
# Dense bf16 operations per second, from NVIDIA's data sheets (which print twice that, for sparse matrices), by what
# torch.cuda.get_device_name has in it; of several, the longest is meant.
PEAKS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H800": 989.4e12,
    "H800 PCIe": 756e12,
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H20": 148e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 operations per second of one GPU; None for one that is not in `PEAKS`, and on CPU."""
    words = device_name.replace("-", " ").split()
    named = [name for name in PEAKS if all(part in words for part in name.split())]
    if named:
        return PEAKS[max(named, key=len)]
    return None


def mfu(flops: float, seconds: float, gpus: int, peak: float) -> float:
    """Model FLOPs utilisation: operations that had to be done / what `gpus` GPUs of `peak` a second could have."""
    return flops / (seconds * gpus * peak)


def speed(
    shape: ModelShape,
    samples_by_update: Sequence[Sequence[Prompted]],
    seconds: float,
    gpus: int,
    device_name: str,
    *,
    shares_prompts: bool = False,
) -> Metrics:
    """What training on a step's samples in so many seconds comes to; MFU where the GPU's peak is known.

    All tokens count; where prompts are shared, the operations of each group's prompt once in each update.
    """
    work = train_work(shape)
    flops = sum(
        summed_sizes(samples, work, shares_prompts=shares_prompts) for samples in samples_by_update
    )
    tokens = sum(sample.length for samples in samples_by_update for sample in samples)
    metrics = {
        "speed/train_tokens_per_s": tokens / seconds,
        "speed/train_tflops_per_gpu": flops / seconds / gpus / 1e12,
    }
    peak = peak_flops(device_name)
    return metrics | ({"speed/train_mfu": mfu(flops, seconds, gpus, peak)} if peak else {})


def forward_flops(shape: ModelShape, length: int) -> float:
    """Operations of one forward pass over a sequence of `length` tokens, the output layer at every token included."""
    linear, per_pair = _multiply_adds(shape)
    layers = 2.0 * (length * linear + length * (length + 1) // 2 * per_pair)
    return layers + float(_indexer_flops(shape, np.array([length])).sum())


def total_forward_flops(shape: ModelShape, lengths: IntArray) -> float:
    """`forward_flops` of all sequences together."""
    linear, per_pair = _multiply_adds(shape)
    pairs = lengths * (lengths + 1) // 2
    layers = 2.0 * (float(lengths.sum()) * linear + float(pairs.sum()) * per_pair)
    return layers + float(_indexer_flops(shape, lengths).sum())


def train_work(shape: ModelShape) -> Callable[[int], float]:
    """Operations of forward and backward by a sequence's length: the work that batches are balanced by."""
    linear, per_pair = _multiply_adds(shape)

    def work(length: int) -> float:
        trained = 2.0 * (length * linear + length * (length + 1) // 2 * per_pair)
        return TRAIN_OVER_FORWARD * trained + float(_indexer_flops(shape, np.array([length]))[0])

    return work


def indexer_multiply_adds(shape: ModelShape) -> tuple[int, int]:
    """(for each token, for each pair of a query and a key) of the indexer of one layer."""
    indexer = shape.indexer
    mla = shape.mla
    if indexer is None or mla is None:
        return 0, 0
    queries = (mla.q_lora_rank or 0) * indexer.num_heads * indexer.head_dim
    keys = shape.hidden_size * (indexer.head_dim + indexer.num_heads)
    return queries + keys, indexer.num_heads * (indexer.head_dim + 1)


def _indexer_flops(shape: ModelShape, lengths: IntArray) -> np.ndarray:
    """Of a forward pass over each sequence, on training ranks, which compute the latent queries once more for it."""
    if shape.indexer is None or shape.mla is None:
        return np.zeros(len(lengths))
    per_token, per_pair = indexer_multiply_adds(shape)
    per_token += shape.hidden_size * (shape.mla.q_lora_rank or 0)
    pairs = lengths * (lengths + 1) // 2
    work = shape.num_layers * 2.0 * (lengths * per_token + pairs * per_pair)
    return np.where(lengths > shape.indexer.top_k, work, 0.0)


def module_forward_flops(shape: ModelShape, lengths: IntArray) -> dict[str, float]:
    """Of a forward pass over all sequences, the operations of the parts of layers that can be computed again.

    By Megatron's names of them (`recompute_modules`), those with matrix products; `moe` with its shared experts.
    """
    tokens = float(lengths.sum())
    pairs = float((lengths * (lengths + 1) // 2).sum())
    expert = 3 * shape.hidden_size * shape.moe_ffn_size
    shared = shape.num_sparse_layers * shape.num_shared_experts * expert
    routed = shape.num_sparse_layers * (
        shape.hidden_size * shape.num_experts + shape.experts_per_token * expert
    )
    num_full = shape.num_layers - shape.num_linear_layers
    linear = {
        "mla_up_proj": shape.num_layers * _up_projections(shape),
        "mlp": shape.num_dense_layers * 3 * shape.hidden_size * shape.ffn_size,
        "moe": routed + shared,
        "shared_experts": shared,
    }
    flops = {part: 2.0 * tokens * multiply_adds for part, multiply_adds in linear.items()}
    core = pairs * num_full * _attention(shape)[1]
    core += tokens * shape.num_linear_layers * _linear_attention(shape)[1]
    return flops | {"core_attn": 2.0 * core}


def output_forward_flops(shape: ModelShape, lengths: IntArray) -> float:
    """Of a forward pass over all sequences, the operations of the output layer; it is part of `total_forward_flops`."""
    return 2.0 * float(lengths.sum()) * _output_multiply_adds(shape)


def layers_beside(shape: ModelShape, *, trains_mtp: bool) -> float:
    """What the last pipeline rank computes beside its layers, in the operations of a mean layer at a short length.

    The output layer, and where multi-token prediction is trained, its layers with the output layer once more for each.
    """
    of_output = _output_multiply_adds(shape)
    of_layers = _multiply_adds(shape)[0] - of_output
    num_predicted = shape.num_mtp_layers * trains_mtp
    return num_predicted + (1 + num_predicted) * of_output * shape.num_layers / of_layers


def _output_multiply_adds(shape: ModelShape) -> int:
    """For each token."""
    return shape.hidden_size * (shape.num_labels or shape.vocab_size)


def _up_projections(shape: ModelShape) -> int:
    """Multiply-adds for each token of a layer's latent attention, from compressed queries, keys and values."""
    mla = shape.mla
    if mla is None:
        return 0
    from_width = shape.hidden_size if mla.q_lora_rank is None else mla.q_lora_rank
    queries = from_width * (mla.nope_dim + mla.rope_dim)
    return shape.num_heads * (queries + mla.kv_lora_rank * (mla.nope_dim + mla.v_dim))


def _multiply_adds(shape: ModelShape) -> tuple[int, int]:
    """(for each token, for each pair of a query and a key) of the whole model."""
    attention, per_pair = _attention(shape)
    dense = shape.num_dense_layers
    hidden = shape.hidden_size
    expert = 3 * hidden * shape.moe_ffn_size
    sparse_layer = (
        hidden * shape.num_experts + (shape.experts_per_token + shape.num_shared_experts) * expert
    )
    num_full = shape.num_layers - shape.num_linear_layers
    linear = num_full * attention + shape.num_linear_layers * sum(_linear_attention(shape))
    linear += dense * 3 * hidden * shape.ffn_size
    linear += shape.num_sparse_layers * sparse_layer + _output_multiply_adds(shape)
    return linear, num_full * per_pair


def _linear_attention(shape: ModelShape) -> tuple[int, int]:
    """(projections; convolution and recurrence) of one layer of Gated DeltaNet, for each token.

    A value head multiplies its state three times: with the key, with what is corrected, and with the query.
    """
    delta = shape.delta
    if delta is None:
        return 0, 0
    keys = 2 * delta.num_key_heads * delta.key_dim
    values = delta.num_value_heads * delta.value_dim
    projections = shape.hidden_size * (keys + 3 * values + 2 * delta.num_value_heads)
    return projections, (keys + values) * delta.kernel_size + 3 * values * delta.key_dim


def _attention(shape: ModelShape) -> tuple[int, int]:
    """(projections, for each token; scores and values, for each pair) of one layer."""
    hidden = shape.hidden_size
    heads = shape.num_heads
    if shape.mla is None:
        width = shape.head_dim
        projections = 2 * (heads + shape.num_kv_heads) + heads * has_output_gate(shape)
        return hidden * width * projections, 2 * heads * width
    mla = shape.mla
    key = mla.nope_dim + mla.rope_dim
    if mla.q_lora_rank is None:
        query = hidden * heads * key
    else:
        query = mla.q_lora_rank * (hidden + heads * key)
    latent = hidden * (mla.kv_lora_rank + mla.rope_dim) + mla.kv_lora_rank * heads * (
        mla.nope_dim + mla.v_dim
    )
    return query + latent + heads * mla.v_dim * hidden, heads * (key + mla.v_dim)
