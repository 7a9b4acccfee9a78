"""The size of adapters (LoRA) in a folder in PEFT's format, from its adapter_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.model.hf_values import read_json
from megarl.types import UserError

CONFIG = "adapter_config.json"
# the layers of routed experts, and a pattern that PEFT tries before it:
OF_EXPERTS = r".*\.experts\..*"
OF_EACH_EXPERT = r".*\.experts\.\d+\..*"


def adapter_keys(folder: str) -> dict[str, Any]:
    """The keys rank, alpha, targets and experts of a recipe's `lora` that the folder's adapters have.

    Empty where the file cannot be read or names the layers in another way than by a list; `peft.check` says why.
    """
    try:
        config = read_json(Path(folder) / CONFIG)
    except UserError:
        return {}
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    patterns = config.get("rank_pattern") or {}
    if config.get("exclude_modules") == OF_EXPERTS:
        experts = 0
    else:
        experts = patterns.get(OF_EACH_EXPERT, rank)
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        return {}
    if (
        not isinstance(rank, int)
        or not isinstance(experts, int)
        or not isinstance(alpha, int | float)
    ):
        return {}
    if rank < 1 or experts < 0 or alpha <= 0:
        return {}
    return {"rank": rank, "alpha": alpha, "targets": tuple(sorted(targets)), "experts": experts}
