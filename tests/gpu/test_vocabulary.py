"""Log-probabilities of 32,768 tokens over 151,936 words without whole logits, against float32 in chunks."""

from __future__ import annotations

import pytest

from megarl.device import DEVICE
from megarl.parallel.logprobs import CHUNK_BYTES
from tests.gpu.child import Child
from tests.gpu.conftest import Record

ON_GPU = DEVICE == "cuda"
TOKENS, HIDDEN, VOCAB = (32_768, 4096, 151_936) if ON_GPU else (200, 64, 1000)
# Half a unit in the last place of the largest logits: 2 ** -9 of about 5 standard deviations, and of the peak's too.
LOGP_BOUND = {"bfloat16": 0.08, "float32": 1e-3 if ON_GPU else 1e-4}
GRADIENT_BOUND = {"bfloat16": 0.02, "float32": 1e-3}


@pytest.mark.parametrize("dtype", LOGP_BOUND)
def test_a_large_vocabulary(dtype: str, record: Record) -> None:
    """Unverified on a GPU.

    parallel/logprobs.py: chunks of 256 MiB, products in bfloat16, NCCL. To check first: peak memory for 32k tokens
    x 152k vocabulary; the ratio to whole logits.
    """
    with Child(
        "tests.gpu.vocabulary:Vocabulary", tokens=TOKENS, hidden=HIDDEN, vocab=VOCAB, dtype=dtype
    ) as child:
        if not ON_GPU:
            child.ask("set_chunk", chunk_bytes=4 * VOCAB * 16)
        figures = child.ask("measure")
        diffs = child.ask("compare")
    record("peak beside the inputs", figures["peak_bytes"] / 2**30, "GiB")
    record("whole logits would be", 4 * TOKENS * VOCAB / 2**30, "GiB")
    record("time", figures["seconds"], "s")
    for name, diff in diffs.items():
        record(f"gap of {name}", diff, "")
    assert diffs["logp"] < LOGP_BOUND[dtype] and diffs["entropy"] < LOGP_BOUND[dtype]
    assert (
        diffs["hidden_grad"] < GRADIENT_BOUND[dtype]
        and diffs["weight_grad"] < GRADIENT_BOUND[dtype]
    )
    if ON_GPU:
        width = 2 if dtype == "bfloat16" else 4
        # Hidden states gathered, their gradient and this rank's share of it; the weight's gradient in float32, a
        # chunk's part of it and its last copy; a few numbers a token.
        gradients = 3 * width * TOKENS * HIDDEN + (4 + 2 * width) * VOCAB * HIDDEN + 64 * TOKENS
        assert figures["peak_bytes"] < 1.05 * (gradients + 3 * CHUNK_BYTES)
