"""The size of adapters (LoRA) in a folder in PEFT's format, from its adapter_config.json."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.model.hf_values import ConfigFile, read_json
from megarl.types import UserError
from megarl.types.json_objects import JsonObject

CONFIG = "adapter_config.json"
# the layers of routed experts, and a pattern that PEFT tries before it:
OF_EXPERTS = r".*\.experts\..*"
OF_EACH_EXPERT = r".*\.experts\.\d+\..*"


def adapter_keys(folder: str) -> JsonObject:
    """The keys rank, alpha, targets and experts of a recipe's `lora` that the folder's adapters have.

    Empty where the file cannot be read or names the layers in another way than by a list; `peft.check` says why.
    """
    file = Path(folder) / CONFIG
    try:
        config = ConfigFile(file, read_json(file))
        rank = config.integer("r")
        alpha = config.number("lora_alpha", 0.0, most=math.inf)
        targets = config.texts("target_modules")
        experts = config.part("rank_pattern").integer(OF_EACH_EXPERT, default=rank, least=0)
    except UserError:
        return {}
    if config.content.get("target_modules") is None:
        return {}
    if config.content.get("exclude_modules") == OF_EXPERTS:
        experts = 0
    return {"rank": rank, "alpha": alpha, "targets": tuple(sorted(targets)), "experts": experts}
