"""Worlds are in float32 here, and in bfloat16 beside TransformerEngine; none is built with more ranks than GPUs."""

from __future__ import annotations

import pytest
import torch

from megarl.parallel import model
from tests.parallel import precision, worlds


def test_the_type_follows_transformer_engine_and_tolerances_the_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device, engine, dtype, tolerance in (
        ("cpu", True, "float32", 1e-4),
        ("cuda", False, "float32", 1e-4),
        ("cuda", True, "bfloat16", precision.IN_BFLOAT16),
    ):
        monkeypatch.setattr(precision, "DEVICE", device)
        monkeypatch.setattr(model, "TRANSFORMER_ENGINE", engine)
        assert (precision.dtype(), precision.within(1e-4)) == (dtype, tolerance)


def test_ranks_without_gpus_of_their_own_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(worlds.device, "DEVICE", "cpu")
    worlds.need_gpus(4)
    monkeypatch.setattr(worlds.device, "DEVICE", "cuda")
    worlds.need_gpus(1)
    with pytest.raises(pytest.skip.Exception, match="4 ranks on 1 GPU: each needs its own"):
        worlds.need_gpus(4)
