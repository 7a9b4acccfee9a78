"""Settings that do not go with drafts (rollout.engine.draft), as SGLang 0.5.21 has them.

Facts from sglang/srt: speculative/draft_utils.py names the attention backends of draft models; eagle_utils.py beside it
verifies seeded samples with random numbers of its own; state_capturer/routed_experts.py sizes the buffer of a step's
routed experts by sequences and by the chunk of prompts, without the tokens that are verified.
"""

from __future__ import annotations

from megarl.config import Recipe
from megarl.rollout.sglang.arguments import LATENT_FP8_BACKENDS, WHERE
from megarl.rollout.sglang.batch_sizes import given_sizes, limit_of, most_sequences
from megarl.types import UserError
from megarl.types.listed import ErrorIterator, listed

# Attention backends that run a draft model on NVIDIA's GPUs.
DRAFT_BACKENDS = ("fa3", "fa4", "flashinfer", *LATENT_FP8_BACKENDS)
_LEAST_CHUNK = 8192  # tokens of prompts that SGLang reads at once on cards of 60 GiB and more


@listed
def draft_errors(recipe: Recipe) -> ErrorIterator:
    """Settings that do not go with drafts: seeds, other attention backends, more routed experts than SGLang stores."""
    engine = recipe.rollout.engine
    if not engine.draft:
        return
    none = "or rollout.engine.draft to 0"
    if recipe.rollout.seeded:
        problem = "true, but SGLang's verification of drafts does not use the samples' seeds"
        yield UserError("rollout.seeded", problem, f"set it to false, {none}")
    backends = f"{', '.join(DRAFT_BACKENDS[:-1])} or {DRAFT_BACKENDS[-1]}"
    for key in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if (backend := engine.sglang.get(key)) and backend not in DRAFT_BACKENDS:
            problem = f"{backend} does not run a draft model"
            yield UserError(f"{WHERE}.{key}", problem, f"remove it, set it to {backends}, {none}")
    if recipe.train.replay == "r3":
        yield from _capture_errors(recipe)


def _capture_errors(recipe: Recipe) -> list[UserError]:
    """More tokens in a step than SGLang keeps the experts of: its buffer counts one for each sequence of a step."""
    tokens = limit_of(recipe, most_sequences(recipe)) * (1 + recipe.rollout.engine.draft)
    stored = given_sizes(recipe).get("chunked_prefill_size") or _LEAST_CHUNK
    if tokens <= stored:
        return []
    problem = f"r3, but SGLang stores the experts of {stored} tokens a step, and with drafts it verifies up to {tokens}"
    hint = f"set {WHERE}.chunked_prefill_size to at least {tokens}, or rollout.engine.draft to 0"
    return [UserError("train.replay", problem, hint)]
