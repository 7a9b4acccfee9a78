"""The sizes of a model, as its folder states them."""

from __future__ import annotations

from dataclasses import dataclass

# the head of a model for sequence classification, in Hugging Face checkpoints
SCORE = "score.weight"


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): widths of its projections, per head where not a rank."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class DeltaShape:
    """Gated DeltaNet (Yang et al., 2024): its heads, their widths, and the width of its convolution.

    full_every: each layer whose number, counted from 1, is a multiple of it has attention in its place.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    full_every: int


@dataclass(frozen=True)
class IndexerShape:
    """The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): its query heads and their width.

    top_k: keys that a query attends to. interleaved_rope: rotary positions turn neighbouring numbers, as pairs; without
    it, a number of the first half with one of the second.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved_rope: bool


@dataclass(frozen=True)
class ModelShape:
    """The integers of a HF `config.json` that layouts and weight maps are computed from.

    A dense model has no experts and num_dense_layers == num_layers. With `mla`, num_kv_heads and head_dim mean nothing.
    family: the name of the model's row in megarl.model.families, which has all that is no size.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_size: int = 0  # of one expert
    num_dense_layers: int = 0  # the first ones
    ffn_size: int = 0  # of a dense layer
    num_shared_experts: int = 0  # one MLP of num_shared_experts x moe_ffn_size
    router_bias: bool = False  # e_score_correction_bias
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = False  # lm_head is embed_tokens
    # multi-token prediction layers, numbered after the decoder's in the checkpoint
    num_mtp_layers: int = 0
    mla: MlaShape | None = None
    delta: DeltaShape | None = None  # of the layers with linear attention
    indexer: IndexerShape | None = None  # of latent attention over a part of the keys
    num_labels: int = 0  # scores of each token in place of the vocabulary's logits
    family: str = "Qwen3MoeForCausalLM"

    @property
    def num_sparse_layers(self) -> int:
        """Decoder layers with experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def num_linear_layers(self) -> int:
        """Decoder layers with linear attention."""
        return sum(map(self.is_linear, range(self.num_layers)))

    def is_dense(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0; MTP layers count on from num_layers) has an MLP and no experts."""
        return layer < self.num_dense_layers

    def is_linear(self, layer: int) -> bool:
        """Whether layer `layer`, numbered as in `is_dense`, has linear attention; MTP layers have none."""
        if self.delta is None or layer >= self.num_layers:
            return False
        return (layer + 1) % self.delta.full_every != 0
