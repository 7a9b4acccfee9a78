"""SGLang's slot for our adapter (LoRA): an engine starts with an empty, pinned one, and resharding writes its factors.

Facts from sglang/srt/lora 0.5.21: an adapter is read from a folder in PEFT's format when the engine starts; ours has no
folder, and its name and path, from which each node of an engine derives its number, are the same everywhere
(lora_registry.py). A layer of which an adapter has no tensor gets zeros (mem_pool.py). A pinned one is never evicted,
and one slot must be left unpinned, for requests without an adapter (lora_manager.py), of which megarl sends none. Slots
lie outside the memory that SGLang releases (model_runner.py); the weights are kept on the host meanwhile, because
nobody sends them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.model.lora_pairs import LoraSize
from megarl.model.shape import ModelShape
from megarl.resharding.engine_model import SLOT_NUMBER
from megarl.resharding.lora_slots import modules, slot_rank

ADAPTER_NAME = "policy"  # of the adapter, in SGLang's requests
ADAPTER_SLOTS = 2  # the adapter's, and that of requests without one


@dataclass(frozen=True)
class AdapterSlot:
    """rank: the largest that the slot has room for. modules: SGLang's names of the layers that have it."""

    rank: int
    modules: tuple[str, ...]

    @staticmethod
    def of(shape: ModelShape, size: LoraSize) -> AdapterSlot | None:
        """None where engines get no adapters of their own."""
        return AdapterSlot(slot_rank(size), modules(shape, size)) if size.in_slots else None


def server_arguments(slot: AdapterSlot, device: str) -> dict[str, Any]:
    """SGLang's server arguments for the slot."""
    return {
        "enable_lora": True,
        "max_lora_rank": slot.rank,
        "lora_target_modules": list(slot.modules),
        "lora_paths": [{"lora_name": ADAPTER_NAME, "lora_path": ADAPTER_NAME, "pinned": True}],
        "max_loras_per_batch": ADAPTER_SLOTS,
        "experts_shared_outer_loras": False,
        "lora_backend": "torch_native" if device == "cpu" else "triton",
        "enable_weights_cpu_backup": device != "cpu",
    }


def start_empty(slot: AdapterSlot) -> None:
    """Let the adapter start without files; run in a scheduler before its model is built."""
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    # Of rank and alpha alike, so that SGLang multiplies with 1 (lora_slots.py).
    config = {
        "peft_type": "LORA",
        "r": slot.rank,
        "lora_alpha": slot.rank,
        "target_modules": list(slot.modules),
    }
    LoRAConfig.get_lora_config = lambda self, dummy=False: config
    LoRAConfig.get_added_tokens_config = lambda self: None
    LoRAAdapter.initialize_weights = lambda self: None


def occupy_slot(model_runner: Any) -> None:
    """Give the adapter its slot for good, and leave the slot's number on the model for the weight loader."""
    manager = model_runner.lora_manager
    (uid,) = manager.lora_refs
    manager.fetch_new_loras({None, uid})
    setattr(model_runner.model, SLOT_NUMBER, manager.memory_pool.get_buffer_id(uid))
