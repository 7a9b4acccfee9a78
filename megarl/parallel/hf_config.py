"""What a HF `config.json` says beside the integers of ModelShape; without Megatron, so that it can be checked early."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megarl.types import UserFault


@dataclass(frozen=True)
class HfFacts:
    """What a `config.json` says beside the integers of ModelShape."""

    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    max_positions: int


def hf_facts(path: str | Path) -> HfFacts:
    """Read `config.json`. Raises UserFault where the model does something that megarl does not build."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # transformers 5 writes one dictionary where 4 wrote rope_theta and rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    wanted = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "use_sliding_window": (config.get("use_sliding_window", False), False),
        "rope_type": (rope_type, "default"),
    }
    for key, (value, supported) in wanted.items():
        if value != supported:
            problem, mend = f"{key} is {value!r}", f"use a checkpoint where it is {supported!r}"
            raise UserFault(str(file), problem, mend)
    return HfFacts(
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        max_positions=int(config.get("max_position_embeddings", 32_768)),
    )
