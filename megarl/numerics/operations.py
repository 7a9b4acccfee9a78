"""The operations of a model whose outputs are compared, in the order of computation."""

from __future__ import annotations

EMBEDDING = "embedding"
INPUT_NORM = "input norm"
# of multi-head latent attention alone
QUERY_LATENT = "query latent norm"
KEY_VALUE_LATENT = "key-value latent norm"
QUERY_PROJECTION = "query before rope"
# of other attention, after the norms of heads and rope
QUERY = "query after rope"
KEY = "key after rope"
VALUE = "value"
HEADS = "attention heads"
ATTENTION = "attention output"
RESIDUAL = "residual after attention"
MLP_NORM = "pre-MLP norm"
ROUTER_LOGITS = "router logits"
ROUTER_CHOICES = "router choices"
ROUTER_WEIGHTS = "router weights"
SHARED_EXPERTS = "shared experts"
EXPERTS = "experts' output"
MLP = "MLP output"
LAYER = "layer output"
FINAL_NORM = "final norm"
LOGPROBS = "log-probabilities"
# not compared: by what a router chose, of each expert and each group of experts
ROUTER_SCORES = "router scores"
ROUTER_GROUPS = "router group scores"

BEFORE_LAYERS = -1  # the layer of the embedding
# of what comes after the last layer; no model has as many
AFTER_LAYERS = 1_000_000

ORDER = (
    EMBEDDING,
    INPUT_NORM,
    QUERY_LATENT,
    KEY_VALUE_LATENT,
    QUERY_PROJECTION,
    QUERY,
    KEY,
    VALUE,
    HEADS,
    ATTENTION,
    RESIDUAL,
    MLP_NORM,
    ROUTER_LOGITS,
    ROUTER_CHOICES,
    ROUTER_WEIGHTS,
    SHARED_EXPERTS,
    EXPERTS,
    MLP,
    LAYER,
    FINAL_NORM,
    LOGPROBS,
)


def layer_name(layer: int) -> str:
    """For people; "" before the first layer and after the last one."""
    return f"layer {layer}" if 0 <= layer < AFTER_LAYERS else ""
