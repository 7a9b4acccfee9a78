"""torch's profiler in a training rank: on a GPU its file has the kernels, too."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from megarl.device import DEVICE
from megarl.training import profiling


def test_a_profile_has_the_operations_and_on_a_gpu_its_kernels(tmp_path: Path) -> None:
    """Unverified on a GPU.

    training/profiling.py: torch's profiler with `ProfilerActivity.CUDA` around one call of `train`. Spans of ranks,
    which end when the host goes on, beside it. To check first: the file has the kernels of the policy's forward and
    backward pass; whether CUPTI may be used in a container; whether a rank's spans end before its kernels do.
    """
    file = tmp_path / "timeline" / "step_1.rank_0.json.gz"
    left = torch.ones(64, 64, device=DEVICE)
    profiling.begin(str(file))
    with profiling.profiled():
        torch.mm(left, left)
    assert profiling.end() == str(file)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
    kinds = {event.get("cat") for event in events}
    assert ("kernel" in kinds) == (DEVICE == "cuda")
